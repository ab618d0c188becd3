"""A picture of llama-server's web page for the docs, with an answer in it. Needs a headless Chromium, and a build with the page.

usage: capture_server.py MODEL [--memory SIZE] [--ask QUESTION] [--tokens N] [--browser chromium]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.browser import Browser, Chat, find_browser
from moeoff.server.server import Server

IMAGE = ROOT / "docs" / "img" / "server.png"
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory")
    parser.add_argument("--ask", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=256, help="the answer's most")
    parser.add_argument("--browser", default=find_browser() or "chromium")
    options = parser.parse_args()
    args = ("-n", str(options.tokens), "--temp", "0")
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(options.model, port=0, n_ctx=4096, memory=options.memory, args=args) as server,
        Browser(options.browser, Path(folder)) as browser,
    ):
        chat = Chat(browser, server.url)
        chat.ask(options.ask)
        chat.read(timeout=600)
        chat.page.screenshot(IMAGE)
    print(IMAGE)


if __name__ == "__main__":
    main()
