"""scripts/faults/kill.py in short."""

from __future__ import annotations

import subprocess
import sys

import pytest

from helpers.files import ROOT


@pytest.mark.parametrize("kills", [16, pytest.param(160, marks=pytest.mark.slow)])
def test_kills(kills):
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "faults" / "kill.py"), "--kills", str(kills)], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
