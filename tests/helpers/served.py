"""A server in a process of its own, and OpenAI's client for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import openai

SCRIPT = """
import json, signal, sys, threading
from moeoff.server.server import Server

server = Server(sys.argv[1], port=0, **json.loads(sys.argv[2]))
done = threading.Event()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: done.set())
with server:
    print(server.url, flush=True)
    done.wait()
print("stopped", flush=True)
"""


class Served:
    """A process that serves until it is told to stop. first: code that it runs before all else."""

    def __init__(self, model: str, first: str = "", **options):
        command = [sys.executable, "-c", first + SCRIPT, model, json.dumps(options)]
        self._errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill up
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http"):
            self.process.wait()
            self._errors.seek(0)
            raise AssertionError(self._errors.read())
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=options.get("api_key", "none"), max_retries=0, timeout=60)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def complete(self, text: str, n: int):
        return self.client.completions.create(model="x", prompt=text, max_tokens=n, temperature=0, extra_body={"ignore_eos": True})

    def ask(self, text: str, **options):
        return self.client.chat.completions.create(model="x", messages=[{"role": "user", "content": text}], temperature=0, **{"max_tokens": 24} | options)
