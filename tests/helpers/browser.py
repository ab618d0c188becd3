"""A headless Chromium, driven over its DevTools protocol: for the tests of the server's
web page, and for its picture in the docs.

The protocol goes through a pipe, so that nothing but the browser itself is needed; it
ends when the pipe does.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from helpers.waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
    " --force-device-scale-factor=1 --no-first-run"
    # a page that is not in front must not wait for the one that is
    " --disable-background-timer-throttling --disable-backgrounding-occluded-windows"
    " --disable-renderer-backgrounding"
).split()
# The browser wants to read at file descriptor 3 and to write at 4.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
    " os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class BrowserError(Exception):
    """The browser refused a command, or a script in a page failed."""


class Browser:
    """`folder` holds its profile; a new folder remembers no conversations."""

    def __init__(self, program: str, folder: Path):
        theirs, self._out = os.pipe()
        self._in, answers = os.pipe()
        # not 3 or 4, which they become
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs, answers)]
        command = [
            sys.executable,
            "-c",
            START,
            *map(str, ends),
            program,
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            *FLAGS,
        ]
        self.process = subprocess.Popen(
            command,
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (theirs, answers, *ends):
            os.close(fd)
        self._last, self._buffer = 0, b""

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_exc: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            # with its renderers, so that nothing writes to the profile any more
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str, width: int = 1280, height: int = 800) -> Page:
        """In a window of its own, which shows this many pixels of the page."""
        target = self.call("Target.createTarget", url=url, newWindow=True)["targetId"]
        page = Page(
            self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        )
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        wait_until(page.is_there)
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command of the protocol. Nobody asks for events; those that come are
        passed over.
        """
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 300
        while (answer := self._read(deadline)).get("id") != self._last:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 16) if ready else b""
            if not chunk:
                raise BrowserError(
                    "the browser has ended" if ready else "the browser does not answer"
                )
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """A page that `Browser.open` returns."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; that of a promise once it is kept."""
        reply = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            failed = reply["exceptionDetails"]
            raise BrowserError(failed.get("exception", {}).get("description") or failed["text"])
        return reply["result"].get("value")

    def wait(self, script: str, timeout: float = 300) -> None:
        """Until the expression is true."""
        wait_until(lambda: self.evaluate(script), timeout)

    def is_there(self) -> bool:
        """Return whether the new document has loaded."""
        try:
            return self.evaluate(
                "window.isOld !== true && location.href !== 'about:blank' && document.readyState"
                " === 'complete'"
            )
        except BrowserError:  # before the first one, and between two, there is none to ask
            return False

    def reload(self) -> None:
        """Returns when the new document is there; what its scripts have yet to do must
        be waited for.
        """
        self.evaluate("window.isOld = true")
        self.call("Page.reload")
        wait_until(self.is_there)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {
            "key": "Enter",
            "code": "Enter",
            "windowsVirtualKeyCode": 13,
            "nativeVirtualKeyCode": 13,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )


class Chat:
    """A conversation on llama-server's web page, in a window of its own."""

    # textContent: innerText is empty for what is scrolled out of sight
    ANSWER = (
        "([...document.querySelectorAll('.chat-message-assistant')].at(-1)?.querySelector('.agentic-text')?.textContent.trim()"
        " ?? '')"
    )
    QUESTION = (
        "([...document.querySelectorAll('.chat-message-user-bubble')].at(-1)?.textContent.trim()"
        " ?? '')"
    )
    # an answer has its place before it has a first word
    IS_ASKED = (
        "document.querySelectorAll('.chat-message-assistant').length ==="
        " document.querySelectorAll('.chat-message-user').length"
    )
    STOP = (
        "[...document.querySelectorAll('form button')].find((b) => b.textContent.trim() === 'Stop')"
    )

    def __init__(self, browser: Browser, url: str):
        self.page = browser.open(url)

    def write(self, text: str) -> None:
        """The question, which is not sent yet."""
        self.page.wait("document.querySelector('form textarea:enabled') !== null")
        self.page.evaluate("document.querySelector('form textarea').focus()")
        self.page.type(text)
        self.page.wait("document.querySelector('form button[type=submit]:enabled') !== null")

    def ask(self, text: str) -> None:
        """Returns when the page shows the question."""
        self.write(text)
        self.page.press_enter()
        self.page.wait(f"{self.QUESTION} === {json.dumps(text)} && {self.IS_ASKED}")

    def slow_down(self, bytes_per_second: int) -> None:
        """Once the page is there, answers come no faster."""
        self.page.wait("document.querySelector('form textarea:enabled') !== null")
        limit = {"offline": False, "latency": 0, "uploadThroughput": -1}
        self.page.call("Network.enable")
        self.page.call(
            "Network.emulateNetworkConditions", downloadThroughput=bytes_per_second, **limit
        )

    def reload(self) -> None:
        """Loads the page anew. Returns when it shows a question and an answer again."""
        self.page.reload()
        # a message is made when it first comes into sight
        self.page.wait(
            f"document.querySelector('.chat-message')?.scrollIntoView(), {self.QUESTION} !== '' &&"
            f" {self.ANSWER} !== ''"
        )

    def question(self) -> str:
        """The last one."""
        return self.page.evaluate(self.QUESTION)

    def answer(self) -> str:
        """As far as it is shown."""
        return self.page.evaluate(self.ANSWER)

    def is_answering(self) -> bool:
        return self.page.evaluate(f"{self.STOP} !== undefined")

    def read(self, timeout: float = 300) -> str:
        """The answer, once it has come to its end."""
        self.page.wait(f"{self.STOP} === undefined && {self.ANSWER} !== ''", timeout)
        return self.answer()

    def watch(self) -> list[int]:
        """The lengths of the answer that were seen until its end."""
        return self.page.evaluate(f"""new Promise((done) => {{
            const seen = [];
            const timer = setInterval(() => {{
                const length = {self.ANSWER}.length;
                if (length > (seen.at(-1) ?? 0)) seen.push(length);
                if (length > 0 && {self.STOP} === undefined) {{ clearInterval(timer); done(seen); }}
            }}, 5);
        }})""")

    def stop_after(self, n: int) -> None:
        """Presses the button as soon as the answer has n characters. Fails if it ends
        before.
        """
        self.page.evaluate(f"""new Promise((done, failed) => {{
            const timer = setInterval(() => {{
                const length = {self.ANSWER}.length, stop = {self.STOP};
                if (length > 0 && stop === undefined) {{ clearInterval(timer); failed(new Error(`it ended after ${{length}} characters`)); }}
                if (length >= {n}) {{ clearInterval(timer); stop.click(); done(); }}
            }}, 5);
        }})""")
        self.page.wait(f"{self.STOP} === undefined")
