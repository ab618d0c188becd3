"""Which CPU backend of a wheel is loaded, with real libraries: stand-ins for the backends, and the real question to the CPU."""

import os
import shutil
import subprocess
import sys

import pytest

import wheels
from moeoff import cpu_level
from moeoff.errors import OptionError

CC = os.environ.get("CC", "cc")
pytestmark = pytest.mark.skipif(not shutil.which(CC), reason="no C compiler")


def compiled(path, text, *flags):
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags], input=text, text=True, check=True)


@pytest.fixture
def folder(tmp_path):
    """As a wheel's: the lowest level beside the library that is linked to it, a better one in a folder."""
    lowest, better = list(wheels.LEVELS[os.uname().machine])[:2]
    subprocess.run([CC, "-shared", "-fPIC", "-o", str(tmp_path / "libmoeoff-level.so"), str(wheels.SOURCE)], check=True)
    for level, place in ((lowest, tmp_path), (better, tmp_path / better)):
        compiled(place / "libggml-cpu.so", f'const char * level(void) {{ return "{level}"; }}', "-Wl,-soname,libggml-cpu.so")
    text = "const char * level(void); const char * which(void) { return level(); }"
    compiled(tmp_path / "libllama.so", text, f"-L{tmp_path}", "-lggml-cpu", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "level").write_text(f"{lowest}\n")
    return tmp_path, lowest, better


def answer(folder, **environment):
    """In a process of its own: the level that was chosen, and the one that the library which is linked to the backend then finds."""
    code = (
        "import ctypes, sys; from pathlib import Path; from moeoff import cpu_level; folder = Path(sys.argv[1]); print(cpu_level.load_from(folder));"
        "which = ctypes.CDLL(str(folder / 'libllama.so')).which; which.restype = ctypes.c_char_p; print(which().decode())"
    )
    given = {name: value for name, value in os.environ.items() if name != cpu_level.ENVIRONMENT} | environment
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, env=given).stdout.split()


def test_the_best_level_is_loaded_and_serves_who_is_linked_to_the_backend(folder):
    place, lowest, better = folder
    best = next(level for level in cpu_level.supported(place) if level in (lowest, better))
    assert answer(place) == [best, best]
    assert answer(place, MOEOFF_CPU_LEVEL=lowest) == [lowest, lowest]


def test_what_the_cpu_cannot_run_is_refused(folder, monkeypatch):
    place, lowest, _ = folder
    monkeypatch.setenv(cpu_level.ENVIRONMENT, "sparc")
    with pytest.raises(OptionError, match=f"MOEOFF_CPU_LEVEL=sparc: this machine can run .*{lowest}"):
        cpu_level.load_from(place)
    monkeypatch.delenv(cpu_level.ENVIRONMENT)
    compiled(place / "old" / "libmoeoff-level.so", 'const char * moeoff_cpu_levels(void) { return ""; }')
    (place / "old" / "level").write_text(lowest)
    with pytest.raises(OptionError, match="cannot run even"):
        cpu_level.load_from(place / "old")


def test_a_fork_built_here_has_nothing_to_choose(tmp_path):
    assert cpu_level.load_from(tmp_path) is None


@pytest.mark.skipif(os.uname().machine != "x86_64" or not os.path.exists("/proc/cpuinfo"), reason="flags of x86")
def test_the_cpu_is_asked_rightly(folder):
    with open("/proc/cpuinfo") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    able = cpu_level.supported(folder[0])
    assert ("avx2" in able) == ({"avx2", "fma", "bmi2"} <= flags)
    assert ("avx512" in able) == ({"avx512f", "avx512vbmi", "avx512_vnni"} <= flags)
    assert able == [level for level in reversed(wheels.LEVELS["x86_64"]) if level in able]


@pytest.mark.skipif(os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64"), reason="needs qemu-user")
def test_an_old_cpu_gets_the_lowest(folder):
    """A processor without AVX, as qemu shows it to the same library."""
    place, lowest, _ = folder
    text = f'#include <stdio.h>\nconst char * moeoff_cpu_levels(void);\nint main(void) {{ puts(moeoff_cpu_levels()); return 0; }}\n#include "{wheels.SOURCE}"\n'
    subprocess.run([CC, "-x", "c", "-", "-o", str(place / "ask")], input=text, text=True, check=True)
    done = subprocess.run(["qemu-x86_64", "-cpu", "Nehalem", str(place / "ask")], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [lowest]
