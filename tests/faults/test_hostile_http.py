"""scripts/faults/hostile_http.py in short, and pages of other origins."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.files import ROOT

FOLDER = ROOT / "scripts" / "faults"


@pytest.mark.parametrize("args", [("--only", "path tricks", "--only", "without the key", "--only", "other origins", "--only", "huge bodies"),
                                  pytest.param((), marks=pytest.mark.slow)])  # fmt: skip
def test_hostile_clients(args):
    done = subprocess.run([sys.executable, str(FOLDER / "hostile_http.py"), *args], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_allowed_origins(demo):
    """The one that asks is named, and no other."""
    import httpx

    from helpers.servers import Served

    with Served(demo, expert_memory="4M", n_ctx=256, parallel=1, cors=("https://a.example", "https://b.example")) as server:
        for origin, allowed in (("https://a.example", True), ("https://b.example", True), ("https://c.example", False), ("https://a.exampl", False)):
            found = httpx.get(f"{server.url}/health", headers={"Origin": origin}, timeout=300).headers.get("access-control-allow-origin")
            assert found == (origin if allowed else None)
