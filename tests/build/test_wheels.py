"""Wheels for other machines, the container's recipe, what compiles elsewhere, and the
CPU backend of a wheel that is loaded. What builds is slow.
"""

import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv

import pytest
import yaml

import clean_install
import wheels
from fork import ForkError
from helpers.files import ROOT
from moeoff.errors import OptionError
from moeoff.system import machine

CC = os.environ.get("CC", "cc")
COMPOSE = ROOT / "scripts" / "build" / "container" / "compose.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"


def test_the_last_stage_of_the_container_is_what_is_tested():
    steps = clean_install.stage(clean_install.CONTAINER.read_text())
    assert ("COPY", "--from=build /wheels /wheels") in steps and (
        "ENTRYPOINT",
        '["moeoff"]',
    ) in steps
    assert any(
        name == "RUN" and "pip install" in rest and "--find-links /wheels moeoff" in rest
        for name, rest in steps
    )
    assert "g++" not in "".join(rest for _, rest in steps)
    place = clean_install.Place(ROOT)
    with pytest.raises(clean_install.Failure, match="does not know: ADD"):
        place.follow("ADD", "x y")


def test_the_compose_file_is_yaml_with_one_limit():
    service = yaml.safe_load(COMPOSE.read_text())["services"]["moeoff"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert not any("--memory" in word for word in service["command"]), (
        "80 % of the limit is taken by itself"
    )
    assert set(yaml.safe_load(WORKFLOW.read_text())["jobs"]) == {"build", "try", "attach"}


def test_a_library_with_wide_registers_is_refused(tmp_path):
    if not shutil.which("objdump") or os.uname().machine != "x86_64":
        pytest.skip("needs objdump on x86-64")
    library = tmp_path / "lib.so"
    text = (
        "float sum(const float * x) { float s = 0; for (int i = 0; i < 4096; i++) s += x[i]; return"
        " s; }"
    )
    for flags, wide in (([], False), (["-mavx2", "-ffast-math"], True)):
        subprocess.run(
            ["cc", "-O3", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", str(library)],
            input=text,
            text=True,
            check=True,
        )
        if wide:
            with pytest.raises(ForkError, match="instructions that not every CPU has"):
                wheels.check_portable(library, "x86_64", "")
        else:
            wheels.check_portable(library, "x86_64", "")


@pytest.mark.slow
def test_the_native_core_compiles_for_other_systems(tmp_path):
    """With the headers that zig ships; nothing is linked."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("zig is not installed (pip install ziglang)")
    compiler = [
        sys.executable,
        "-m",
        "ziglang",
        "c++",
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-c",
        "-o",
        str(tmp_path / "out.o"),
    ]
    for target in (
        "aarch64-macos",
        "x86_64-macos",
        "aarch64-linux-gnu.2.28",
        "x86_64-linux-gnu.2.28",
    ):
        for source in sorted((ROOT / "llamacpp_patches" / "src" / "core").glob("*.cpp")):
            done = subprocess.run(
                [*compiler, "-target", target, str(source)], capture_output=True, text=True
            )
            assert done.returncode == 0, f"{source.name} for {target}: {done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build what is not in the cache: minutes for each level the first time."""
    folder = tmp_path_factory.mktemp("wheels") / "dist"
    build = [sys.executable, "scripts/build/wheels.py", "-o", str(folder)]
    made = subprocess.run(
        build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert [
        re.search(r"(moeoff|llama_cpp_python)-.*-py3-none-(any|manylinux\w+)\.whl$", path)
        is not None
        for path in made
    ] == [True, True]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pip_installs_the_wheels_of_a_page(dist, tmp_path):
    """Into a fresh environment, where the command answers; requirements come from the
    package index.
    """
    venv.create(tmp_path / "env", with_pip=True)
    commands = tmp_path / "env" / "bin"
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(dist))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{page.server_port}/"
        subprocess.run(
            [commands / "pip", "install", "--quiet", "--find-links", url, "moeoff"], check=True
        )
        page.shutdown()
    typed = [
        commands / "moeoff",
        "run",
        "--temp",
        "0",
        "-p",
        "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "XDG_CACHE_HOME": str(tmp_path)
    }
    done = subprocess.run(
        typed, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0 and "50 oranges" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wheels_install_and_answer_in_a_clean_place(dist):
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    done = subprocess.run(
        [sys.executable, "scripts/build/clean_install.py", str(dist)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["seconds"] <= 60 and answer["best"] in answer["levels"]


# --- the backend that is loaded, with real libraries: stand-ins for the backends, and
# the real question to the CPU ---


def compiled(path, text, *flags):
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [CC, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *flags],
        input=text,
        text=True,
        check=True,
    )


@pytest.fixture
def folder(tmp_path):
    """As a wheel's: the lowest level beside the library that is linked to it, a better
    one in a folder.
    """
    if not shutil.which(CC):
        pytest.skip("no C compiler")
    lowest, better = list(wheels.LEVELS[os.uname().machine])[:2]
    subprocess.run(
        [CC, "-shared", "-fPIC", "-o", str(tmp_path / "libmoeoff-level.so"), str(wheels.SOURCE)],
        check=True,
    )
    for level, place in ((lowest, tmp_path), (better, tmp_path / better)):
        compiled(
            place / "libggml-cpu.so",
            f'const char * level(void) {{ return "{level}"; }}',
            "-Wl,-soname,libggml-cpu.so",
        )
    text = "const char * level(void); const char * which(void) { return level(); }"
    compiled(tmp_path / "libllama.so", text, f"-L{tmp_path}", "-lggml-cpu", "-Wl,-rpath,$ORIGIN")
    (tmp_path / "level").write_text(f"{lowest}\n")
    return tmp_path, lowest, better


def answer(folder, **environment):
    """In a process of its own: the level that was chosen, and the one that the library
    which is linked to the backend then finds.
    """
    code = (
        "import ctypes, sys; from pathlib import Path; from moeoff.system import machine; folder ="
        " Path(sys.argv[1]); print(machine.load_from(folder));which = ctypes.CDLL(str(folder /"
        " 'libllama.so')).which; which.restype = ctypes.c_char_p; print(which().decode())"
    )
    env = {
        name: value for name, value in os.environ.items() if name != machine.ENVIRONMENT
    } | environment
    return subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    ).stdout.split()


def test_the_best_level_is_loaded_and_serves_who_is_linked_to_the_backend(folder):
    place, lowest, better = folder
    best = next(level for level in machine.supported(place) if level in (lowest, better))
    assert answer(place) == [best, best]
    assert answer(place, MOEOFF_CPU_LEVEL=lowest) == [lowest, lowest]


def test_what_the_cpu_cannot_run_is_refused(folder, monkeypatch):
    place, lowest, _ = folder
    monkeypatch.setenv(machine.ENVIRONMENT, "sparc")
    with pytest.raises(
        OptionError, match=f"MOEOFF_CPU_LEVEL=sparc: this machine can run .*{lowest}"
    ):
        machine.load_from(place)
    monkeypatch.delenv(machine.ENVIRONMENT)
    compiled(
        place / "old" / "libmoeoff-level.so", 'const char * moeoff_cpu_levels(void) { return ""; }'
    )
    (place / "old" / "level").write_text(lowest)
    with pytest.raises(OptionError, match="lowest level in the installed wheel"):
        machine.load_from(place / "old")


def test_a_fork_built_here_has_nothing_to_choose(tmp_path):
    assert machine.load_from(tmp_path) is None


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not os.path.exists("/proc/cpuinfo"), reason="flags of x86"
)
def test_the_cpu_is_asked_rightly(folder):
    with open("/proc/cpuinfo") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    able = machine.supported(folder[0])
    assert ("avx2" in able) == ({"avx2", "fma", "bmi2"} <= flags)
    assert ("avx512" in able) == ({"avx512f", "avx512vbmi", "avx512_vnni"} <= flags)
    assert able == [level for level in reversed(wheels.LEVELS["x86_64"]) if level in able]


@pytest.mark.skipif(
    os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64"), reason="needs qemu-user"
)
def test_an_old_cpu_gets_the_lowest(folder):
    """A processor without AVX, as qemu shows it to the same library."""
    place, lowest, _ = folder
    text = (
        "#include <stdio.h>\nconst char * moeoff_cpu_levels(void);\nint main(void) {"
        f' puts(moeoff_cpu_levels()); return 0; }}\n#include "{wheels.SOURCE}"\n'
    )
    subprocess.run(
        [CC, "-x", "c", "-", "-o", str(place / "ask")], input=text, text=True, check=True
    )
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", "Nehalem", str(place / "ask")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [lowest]
