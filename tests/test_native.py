"""The native parts one by one: runs each TEST of tests/native/test_*.cpp under the address sanitizer."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "llamacpp_patches" / "src" / "core"
FILES = sorted((ROOT / "tests" / "native").glob("test_*.cpp"))
NAMES = [name for file in FILES for name in re.findall(r"^TEST\((\w+)\)", file.read_text(), re.M)]
FLAGS = "-std=c++17 -O1 -g -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all -pthread".split()

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("native") / "unit_tests"
    subprocess.run(["g++", *FLAGS, f"-I{CORE}", *CORE.glob("*.cpp"), *FILES, "-o", out], check=True)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_native(name: str, program: Path) -> None:
    done = subprocess.run([program, name], cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
