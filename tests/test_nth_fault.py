"""scripts/faults/nth_fault.py in short: the first faults of each kind, while a model is loaded, computes, is closed, converted, calibrated."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from helpers.files import ROOT

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no cc on this machine")
QUICK = ("load", "convert")


@pytest.mark.parametrize(
    "scenario", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ("close", "decode", "decode-verified", "prefetch", "resize", "calibrate"))]
)
def test_faults(scenario):
    command = [sys.executable, str(ROOT / "scripts" / "faults" / "nth_fault.py"), "--scenario", scenario, "--most", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_fault_that_is_not_mended_is_found():
    """A flag of the native code that hides a failed read would look like this: without --verify-reads, wrong bytes are not told."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts" / "faults")!r})
import nth_fault
from faults import Call, Kind
nth_fault.SCENARIOS["decode"] = nth_fault.kept_open([(Call.READ, Kind.WRONG, 0)], strategy="lru")
nth_fault.run("decode", (), 1, 1, 0, 1)
"""
    command = [sys.executable, "-c", "import faults, os, sys; os.execve(sys.executable, [sys.executable, '-c', sys.argv[1]], faults.environment())", code]
    done = subprocess.run(command, cwd=ROOT / "scripts" / "faults", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and '"problem": "' in done.stdout and '"problem": ""' not in done.stdout, done.stdout + done.stderr
