"""scripts/faults/disk.py: slow, full, read-only, refused direct reads, a model that is cut."""

from __future__ import annotations

import shutil
import subprocess
import sys

import disk
import pytest

from helpers.files import ROOT


@pytest.mark.skipif(shutil.which("cc") is None, reason="no cc on this machine")
@pytest.mark.parametrize("case", disk.CASES)
def test_case(case):
    command = [sys.executable, str(ROOT / "scripts" / "faults" / "disk.py"), "--only", case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
