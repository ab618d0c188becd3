"""docs/img/server.png: llama-server's web page with an answer in it. Needs a headless Chromium, and a build with the page.

usage: capture.py MODEL [--memory SIZE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browser import Browser, Chat, find_browser

PICTURE = ROOT / "docs" / "img" / "server.png"
QUESTION = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"  # the demo model gets it right


@click.command()
@click.argument("model")
@click.option("--memory")
def main(model: str, memory: str | None) -> None:
    """Draws the picture anew."""
    from moeoff import Server

    options = {"port": 0, "n_ctx": 4096, "memory": memory, "args": ("-n", "256", "--temp", "0")}
    with tempfile.TemporaryDirectory() as folder, Server(model, **options) as served, Browser(find_browser() or "chromium", Path(folder)) as window:
        page = Chat(window, served.url)
        page.ask(QUESTION)
        page.read(timeout=600)
        page.page.screenshot(PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
