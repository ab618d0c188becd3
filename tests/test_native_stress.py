"""The expert store under the sanitizers, in short; `make native-stress-tsan native-stress-asan` runs it longer."""

import shutil
import subprocess

import pytest

from helpers.files import ROOT

SCRIPT = ROOT / "scripts" / "build" / "native_stress.sh"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_store_is_clean(sanitizer):
    done = subprocess.run(["bash", str(SCRIPT), sanitizer, "6"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.endswith("clean\n")
