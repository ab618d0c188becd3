"""llama-server of the same build, without moeoff: what an answer should be."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx

from helpers.files import ROOT
from helpers.waiting import wait_until


@contextlib.contextmanager
def stock_server(model: str, *args: str) -> Iterator[str]:
    """Its URL. It computes as our kernels do: without repacking, with flash attention, one answer at a time on two threads."""
    built = subprocess.run([sys.executable, ROOT / "scripts/build/fork.py", "llama-server"], check=True, text=True, stdout=subprocess.PIPE)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [built.stdout.splitlines()[-1], "-m", model, "--port", str(port), "--no-repack", "-fa", "on", "-t", "2", "-np", "1", "--no-warmup", *args]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or _is_ready(port))
            assert process.poll() is None, "llama-server has ended"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
