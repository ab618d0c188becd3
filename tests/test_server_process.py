"""A server in a process of its own: it says what is wrong, and never outlives the one who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from helpers.waiting import wait_until
from moeoff.errors import MoeoffError
from moeoff.server.process import ServerProcess

PARENT = """
import sys, time
from moeoff.server.process import ServerProcess

server = ServerProcess(sys.argv[1], memory="150M", n_threads=1)
print(server.pid, server.socket, flush=True)
time.sleep(600)
"""


def test_answers_and_stops(demo):
    server = ServerProcess(demo, memory="150M", n_threads=1)
    with httpx.Client(transport=httpx.HTTPTransport(uds=server.socket), base_url="http://server", timeout=60) as client:
        reply = client.post("/v1/completions", json={"prompt": "One, two", "max_tokens": 4})
    assert reply.json()["usage"]["completion_tokens"] == 4 and server.running
    server.stop()
    server.stop()
    assert not server.running and not os.path.exists(os.path.dirname(server.socket)) and server.ending() == "ended with code 0"


@pytest.mark.parametrize("model, options, said", [("/nowhere/m.gguf", {}, "/nowhere/m.gguf"), ("", {"memory": "20M"}, "is too small"), ("", {"odd": 1}, "odd")])
def test_what_is_wrong_is_said_here(demo, model, options, said):
    with pytest.raises(MoeoffError, match=said):
        ServerProcess(model or demo, **({"memory": "150M"} | options))


def test_ends_with_a_parent_that_is_killed(demo):
    with subprocess.Popen([sys.executable, "-c", PARENT, demo], stdout=subprocess.PIPE, text=True) as parent:
        pid, socket = parent.stdout.readline().split()
        assert os.path.exists(socket)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert not os.path.exists(os.path.dirname(socket))


def test_a_server_that_is_killed_is_noticed(demo):
    server = ServerProcess(demo, memory="150M", n_threads=1)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert not server.running and server.ending() == "been ended by SIGKILL"
    server.stop()
