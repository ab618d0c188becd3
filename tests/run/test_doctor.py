"""`moeoff doctor`: every line is ok, a warning or a problem with the way out, and
problems decide the exit code.
"""

import fcntl
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

from helpers.models import rewritten
from helpers.processes import run_python, soft_limit
from moeoff.cli import doctor
from moeoff.experts.profile import profile_path
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp import native
from moeoff.system import disk as disk_probe


def findings(done) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_this_machine(moeoff_command, demo):
    done = moeoff_command("doctor", "-m", demo, "--json")
    by_name = findings(done)
    assert done.returncode == 0 and done.stderr == "", done.stdout
    assert set(by_name) >= {
        "fork",
        "interface",
        "cpu features",
        "row kernels",
        "openmp",
        "cgroup",
        "memory",
        "open files",
        "model",
        "micro-batch",
        "strategy",
        "file system",
        "direct reads",
        "disk rate",
        "I/O threads",
    }
    assert "+moeoff." in by_name["fork"]["text"]
    assert "GOMP_SPINCOUNT=10000, threads bound" in by_name["openmp"]["text"]
    assert all(finding["way_out"] for finding in by_name.values() if finding["state"] != "ok")
    if native.row_kernel(type_from_name("Q4_K")) == 1:
        assert "Q4_K" in by_name["row kernels"]["text"]


def test_text_and_a_folder(invoke, tmp_path):
    done = invoke("doctor", "-m", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "disk rate" in done.stdout
    assert "I/O threads" in done.stdout
    assert str(tmp_path) in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["missing.gguf", __file__])
def test_a_problem_is_the_exit_code(invoke, path):
    done = invoke("doctor", "-m", path)
    assert done.returncode == 1 and "problem" in done.stdout and "->" in done.stdout


def test_what_a_check_fails_over_is_a_finding_of_its_name(invoke, demo, tmp_path):
    damaged = rewritten(demo, tmp_path / "model.gguf", {"qwen2moe.block_count": 11})
    done = invoke("doctor", "-m", damaged, "--json")
    assert done.returncode == 1
    found = findings(done)["model"]
    assert found["state"] == "problem" and "llama.cpp cannot load it" in found["text"]


def test_the_disk_is_looked_at_where_the_model_cannot_be_opened(demo, tmp_path):
    model = shutil.copy(demo, tmp_path / "model.gguf")
    Path(profile_path(model)).write_bytes(b"something else")
    found = list(doctor.check_model(model))
    problems = [finding.text for finding in found if finding.state == doctor.PROBLEM]
    assert len(problems) == 1 and "is no profile" in problems[0]
    assert {"file system", "direct reads", "disk rate"} <= {finding.name for finding in found}


def test_warnings(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with soft_limit(resource.RLIMIT_NOFILE, doctor.FEW_FILES - 1):
        found = [*doctor.check_openmp(), *doctor.check_files()]
    assert [finding.state for finding in found] == ["warning", "warning"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_tmpfs():
    states = {finding.name: finding for finding in doctor.check_disk("/dev/shm", seconds=0.05)}
    assert states["file system"].state == doctor.WARNING
    assert "saves nothing" in states["file system"].text


@pytest.mark.parametrize(
    "states, attention, state, text",
    [
        ({}, 0, doctor.OK, "this build has no others"),
        ({"Q4_K": 1, "MXFP4": 1, "F32": 0}, 1, doctor.OK, "Q4_K, MXFP4: four rows"),
        ({"Q4_K": 1, "MXFP4": -1}, 1, doctor.WARNING, "MXFP4: not bit-identical"),
        ({"Q4_K": 1}, -1, doctor.WARNING, "attention: not bit-identical"),
    ],
)
def test_row_kernels(states, attention, state, text):
    numbers = {type_from_name(name): value for name, value in states.items()}
    kernels = doctor.row_kernels(numbers, attention)
    assert kernels.state == state and text in kernels.text


def test_row_kernels_that_are_off(moeoff_command, demo, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("MOEOFF_ROW_KERNELS", "off")
        kernels = doctor.row_kernels({}, 0)
    assert kernels.state == "warning"
    assert "off (MOEOFF_ROW_KERNELS is set)" in kernels.text
    assert kernels.way_out == "unset MOEOFF_ROW_KERNELS"
    show = (
        "from moeoff.llamacpp import native; print({native.row_kernel(number) for number in"
        " range(64)})"
    )
    assert run_python(show, MOEOFF_ROW_KERNELS="off") == "{0}\n"
    done = moeoff_command("doctor", "-m", demo, env=os.environ | {"MOEOFF_ROW_KERNELS": "no"})
    assert done.returncode == 1
    assert "MOEOFF_ROW_KERNELS: expected on or off" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "built, flags, level, state, text",
    [
        ("SSE3 AVX2", "avx2", None, doctor.OK, "AVX2, SSE3"),
        ("SSE3", "avx2", None, doctor.WARNING, "built without AVX2"),
        ("SSE3", "avx2", "low", doctor.OK, "level low of the wheel; a build on this machine"),
        ("AVX2", "sse3", None, doctor.PROBLEM, "built with AVX2, which this CPU lacks"),
        ("", "", None, doctor.OK, "none"),
    ],
)
def test_cpu_features(built, flags, level, state, text):
    found = doctor.cpu_features(set(built.split()), flags.split(), level)
    assert found.state == state and text in found.text


def test_a_model_that_does_not_fit(demo):
    assert next(doctor.check_model(demo, free=1 << 20)).state == doctor.PROBLEM
    found = {finding.name: finding.state for finding in doctor.check_memory(free=1 << 20)}
    assert found["memory"] == doctor.WARNING


def test_file_system(tmp_path):
    assert disk_probe.file_system("/proc/self/status") == "proc"
    assert disk_probe.file_system(tmp_path) not in ("", "unknown")


def test_reads_around_the_cache(tmp_path, monkeypatch):
    """On macOS they are a property of the descriptor: F_NOCACHE, for which any command
    stands in that this kernel takes. One that it does not take is a disk with buffered
    reads only.
    """
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(sys, "platform", "darwin")
    rate = disk_probe.probe(path, 5000, seconds=0.1)
    assert not rate.direct_io and rate.bytes_per_second > 0 and rate.block_bytes == 8192
    assert not disk_probe.direct_io(path)
    # also where a busy machine leaves the threads no time at all
    assert disk_probe.probe(path, 5000, seconds=0).bytes_per_second > 0
    monkeypatch.setattr(fcntl, "F_NOCACHE", fcntl.F_SETFD, raising=False)
    assert disk_probe.direct_io(path)
    assert disk_probe.probe(path, 1 << 16, seconds=0.05).direct_io
    (tmp_path / "empty").touch()
    with pytest.raises(disk_probe.ModelError, match="empty"):
        disk_probe.probe(tmp_path / "empty", 4096)


@pytest.mark.parametrize("rate", [1e9, 1.6e9])
def test_what_the_disk_gains_from_more_threads_is_told(rate):
    with_few, with_more = (disk_probe.DiskRate(n, 4096, True, 1.0) for n in (1e9, rate))
    threads = {f.name: f for f in doctor.disk_rates(with_few, with_more)}["I/O threads"]
    assert (
        threads.text == f"4 to 16, tuned while a model runs; 16 read {rate / 1e9:.1f}x as fast now"
    )
