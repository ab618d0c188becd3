"""The server under mixed clients for ten minutes: `scripts/bench/soak.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.files import ROOT


@pytest.mark.slow
@pytest.mark.cgroup
def test_ten_minutes(demo):
    command = [sys.executable, "soak.py", "-m", demo, "--minutes", "10", "--memory", "150M"]
    done = subprocess.run(command, cwd=ROOT / "scripts" / "bench", capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
