"""Captures for the docs: a chat in a real terminal as text; pictures of the report and of the server's web page, which need a headless Chromium.

usage: capture.py chat | report MODEL --memory SIZE | server MODEL [--memory SIZE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browser import Browser, Chat, find_browser
from helpers.terminal import Terminal

IMAGES = ROOT / "docs" / "img"
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"
CHAT = ["--memory", "100M", "--temp", "0", "-n", "48", "-c", "512"]
LINES = [QUESTION, "And how many in June?", "/memory 120M", "/stats", "/reset", "/exit"]
# of the report: as a desktop and as a phone show it
SHOTS = {"report.png": (1100, 1750, []), "report-phone.png": (390, 1500, ["--blink-settings=preferredColorScheme=0"])}  # 0: dark
browser_option = click.option("--browser", default=find_browser() or "chromium", show_default=True)


@click.group()
def main() -> None:
    """Writes what the docs show."""


@main.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=ROOT / "docs" / "guides" / "chat.txt")
def chat(output: Path) -> None:
    """A chat with the demo model: what was typed and what came out."""
    with tempfile.TemporaryDirectory() as cache, Terminal(*CHAT, cache=Path(cache)) as terminal:
        parts = [f"$ moeoff run {' '.join(CHAT)}\n", terminal.ready()]
        for line in LINES[:-1]:
            parts += [" ", line, "\n", terminal.ask(line).lstrip("\n")]
        terminal.say(LINES[-1])
        if terminal.ended() != 0:
            raise click.ClickException("the chat did not end well")
    output.write_text("".join(parts) + f" {LINES[-1]}\n")
    print(output)


@main.command()
@click.argument("model")
@click.option("--memory", required=True)
@browser_option
def report(model: str, memory: str, browser: str) -> None:
    """The page of `moeoff report`."""
    from moeoff.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(write_report(model, memory=memory, flash_attn=True), encoding="utf-8")
        for name, (width, height, more) in SHOTS.items():
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/browser", *more]
            size = ["--force-device-scale-factor=1", f"--window-size={width},{height}", f"--screenshot={IMAGES / name}"]
            subprocess.run([browser, *flags, *size, page.as_uri()], check=True, capture_output=True, timeout=120)
            print(IMAGES / name)


@main.command()
@click.argument("model")
@click.option("--memory")
@click.option("--ask", default=QUESTION, show_default=True)
@click.option("--tokens", default=256, show_default=True, help="The answer's most.")
@browser_option
def server(model: str, memory: str | None, ask: str, tokens: int, browser: str) -> None:
    """llama-server's web page with an answer in it; needs a build with the page."""
    from moeoff import Server

    options = {"port": 0, "n_ctx": 4096, "memory": memory, "args": ("-n", str(tokens), "--temp", "0")}
    with tempfile.TemporaryDirectory() as folder, Server(model, **options) as served, Browser(browser, Path(folder)) as window:
        page = Chat(window, served.url)
        page.ask(ask)
        page.read(timeout=600)
        page.page.screenshot(IMAGES / "server.png")
    print(IMAGES / "server.png")


if __name__ == "__main__":
    main()
