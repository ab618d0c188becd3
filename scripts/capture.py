"""docs/img/server.png and live.png: the server's chat with an answer in it, and
`/moeoff`. Needs a headless Chromium, and a build with the page.

usage: capture.py MODEL [--memory SIZE]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browser import Browser, Chat, find_browser

IMAGES = ROOT / "docs" / "img"
# the demo model gets it right
QUESTION = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"


@click.command()
@click.argument("model")
@click.option("--memory")
def main(model: str, memory: str | None) -> None:
    """Draw the pictures anew."""
    from moeoff import Server

    os.chdir(Path(model).absolute().parent)  # the page shows the model's path
    model = Path(model).name
    options = {"port": 0, "n_ctx": 1024, "memory": memory, "args": ("-n", "256", "--temp", "0")}
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(model, **options) as served,
        Browser(find_browser() or "chromium", Path(folder)) as window,
    ):
        live = window.open(f"{served.url.removesuffix('/v1')}/moeoff", 1280, 750)
        chat = Chat(window, served.url)
        chat.ask(QUESTION)
        chat.read(timeout=600)
        for page, name in ((chat.page, "server"), (live, "live")):
            page.screenshot(IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
