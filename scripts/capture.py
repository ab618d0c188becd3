"""Pictures for the docs, of the report and of the server's web page; they need a headless Chromium.

usage: capture.py report MODEL --memory SIZE | server MODEL [--memory SIZE]
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browser import Browser, Chat, find_browser

IMAGES = ROOT / "docs" / "img"
QUESTION = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"  # the demo model gets it right
SIZES = {1280: 2150, 390: 2950}  # pixels of a desktop's page and a phone's, across and down
SCHEMES = {"dark": 0, "light": 1}  # as Chromium numbers them
browser_option = click.option("--browser", default=find_browser() or "chromium", show_default=True)


@click.group()
def main() -> None:
    """Writes what the docs show."""


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
        for (width, height), (scheme, number) in itertools.product(SIZES.items(), SCHEMES.items()):
            shot = IMAGES / f"report-{width}-{scheme}.png"
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/browser"]
            flags += [f"--blink-settings=preferredColorScheme={number}", "--force-device-scale-factor=1"]
            size = [f"--window-size={width},{height}", f"--screenshot={shot}"]
            subprocess.run([browser, *flags, *size, page.as_uri()], check=True, capture_output=True, timeout=120)
            print(shot)


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
