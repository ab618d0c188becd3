"""Wheels for other machines, the container's recipe, and what compiles elsewhere. What builds is slow."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import clean_install
import cross_check
import wheels
from forktree import ForkError
from helpers.files import ROOT

COMPOSE = ROOT / "scripts" / "build" / "container" / "compose.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"


def test_the_last_stage_of_the_container_is_what_is_tested():
    steps = clean_install.stage(clean_install.CONTAINER.read_text())
    assert ("COPY", "--from=build /wheels /wheels") in steps and ("ENTRYPOINT", '["moeoff"]') in steps
    assert any(name == "RUN" and "pip install" in rest and "--find-links /wheels moeoff" in rest for name, rest in steps)
    assert "g++" not in "".join(rest for _, rest in steps)
    place = clean_install.Place(ROOT)
    with pytest.raises(clean_install.Failed, match="does not know: ADD"):
        place.follow("ADD", "x y")


def test_paths_of_the_recipes_exist():
    text = clean_install.CONTAINER.read_text() + COMPOSE.read_text() + WORKFLOW.read_text()
    named = set(re.findall(r"(?<![\w.])scripts/[\w./-]+\w", text))
    assert len(named) >= 3 and all((ROOT / path).exists() for path in named)


def test_the_compose_file_is_yaml_with_one_limit():
    yaml = pytest.importorskip("yaml", reason="no YAML parser")
    service = yaml.safe_load(COMPOSE.read_text())["services"]["moeoff"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert not any("--memory" in word for word in service["command"]), "80 % of the limit is taken by itself"
    assert set(yaml.safe_load(WORKFLOW.read_text())["jobs"]) == {"build", "try", "attach"}


def test_a_library_with_wide_registers_is_refused(tmp_path):
    if not shutil.which("objdump") or os.uname().machine != "x86_64":
        pytest.skip("needs objdump on x86-64")
    library = tmp_path / "lib.so"
    text = "float sum(const float * x) { float s = 0; for (int i = 0; i < 4096; i++) s += x[i]; return s; }"
    for flags, wide in (([], False), (["-mavx2", "-ffast-math"], True)):
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", str(library)], input=text, text=True, check=True)
        if wide:
            with pytest.raises(ForkError, match="instructions that not every CPU has"):
                wheels.check_portable(library, "x86_64", "")
        else:
            wheels.check_portable(library, "x86_64", "")


@pytest.mark.slow
def test_the_native_core_compiles_for_other_systems():
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("zig is not installed (pip install ziglang)")
    assert {target: found for target in cross_check.TARGETS if (found := cross_check.failures(target))} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wheels_install_and_answer_in_a_clean_place(tmp_path):
    """Builds what is not in the cache: minutes for each level the first time."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    build = [sys.executable, "scripts/build/wheels.py", "-o", str(tmp_path / "dist")]
    made = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert [re.search(r"(moeoff|llama_cpp_python)-.*-py3-none-(any|manylinux\w+)\.whl$", path) is not None for path in made] == [True, True]
    done = subprocess.run([sys.executable, "scripts/build/clean_install.py", str(tmp_path / "dist")], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] <= 60 and found["best"] in found["levels"]
