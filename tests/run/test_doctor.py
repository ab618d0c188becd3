"""`moeoff doctor`: every line is ok, a warning or a problem with the way out, and
problems decide the exit code.
"""

import fcntl
import json
import os
import resource
import sys

import pytest

import moeoff
from helpers.processes import run_python
from moeoff.cli import doctor
from moeoff.system import disk as disk_probe


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 0.05)


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


def test_text_and_a_folder(invoke, tmp_path, monkeypatch):
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


def test_what_a_check_fails_over_is_a_finding_of_its_name(invoke, demo, monkeypatch):
    def refused(*_args: object, **_options: object) -> None:
        raise moeoff.ModelError("llama.cpp cannot load it")

    monkeypatch.setattr("moeoff.budget.dry_load.dry_load", refused)
    done = invoke("doctor", "-m", demo, "--json")
    assert done.returncode == 1
    assert findings(done)["model"] == {
        "name": "model",
        "state": "problem",
        "text": "llama.cpp cannot load it",
        "way_out": "",
    }


def test_the_disk_is_looked_at_where_the_usual_budget_is_too_small(invoke, demo, monkeypatch):
    def refused(*_args: object, **_options: object) -> None:
        raise moeoff.BudgetError("80 % of what is available is too small")

    monkeypatch.setattr("moeoff.server.private.PrivateServer", refused)
    done = invoke("doctor", "-m", demo, "--json")
    assert done.returncode == 1
    assert findings(done)["model"]["text"] == "80 % of what is available is too small"
    assert {"file system", "direct reads", "disk rate"} <= set(findings(done))


def test_warnings(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (100, 100))
    assert [
        finding.state for check in (doctor.check_openmp, doctor.check_files) for finding in check()
    ] == ["warning", "warning"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_tmpfs(monkeypatch):
    states = {finding.name: finding for finding in doctor.check_disk("/dev/shm")}
    assert states["file system"].state == doctor.WARNING
    assert "saves nothing" in states["file system"].text


def test_row_kernels(monkeypatch):
    from moeoff.gguf.quantize import type_from_name
    from moeoff.llamacpp import native

    for states, attention, state, text in (
        ({}, 0, doctor.OK, "this build has no others"),
        ({"Q4_K": 1, "MXFP4": 1}, 1, doctor.OK, "Q4_K, MXFP4: four rows"),
        ({"Q4_K": 1, "MXFP4": -1}, 1, doctor.WARNING, "MXFP4: not bit-identical"),
        ({"Q4_K": 1}, -1, doctor.WARNING, "attention: not bit-identical"),
    ):
        numbers = {type_from_name(name): value for name, value in states.items()}
        monkeypatch.setattr(
            native, "row_kernel", lambda number, numbers=numbers: numbers.get(number, 0)
        )
        monkeypatch.setattr(native, "attention_kernels", lambda answer=attention: answer)
        kernels = {finding.name: finding for finding in doctor.check_cpu()}["row kernels"]
        assert kernels.state == state and text in kernels.text


def test_row_kernels_that_are_off(moeoff_command, demo, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("MOEOFF_ROW_KERNELS", "off")
        (kernels,) = doctor._row_kernels()
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


def test_cpu_features(monkeypatch):
    from llama_cpp import llama_cpp as binding

    monkeypatch.setattr(
        binding, "llama_print_system_info", lambda: b"CPU : SSE3 = 1 | AVX_NONE = 1 | OPENMP = 1 | "
    )
    findings_of_cpu = {finding.name: finding for finding in doctor.check_cpu()}
    with open("/proc/cpuinfo") as file:
        has_avx2 = " avx2 " in file.read()
    assert findings_of_cpu["cpu features"].state == (doctor.WARNING if has_avx2 else doctor.OK)


def test_a_model_that_does_not_fit(monkeypatch, demo):
    monkeypatch.setattr(doctor, "available", lambda: 1 << 20)
    assert next(doctor.check_model(demo)).state == doctor.PROBLEM
    assert next(f for f in doctor.check_memory() if f.name == "memory").state == doctor.WARNING


def test_file_system(tmp_path):
    assert disk_probe.file_system("/proc/self/status") == "proc"
    assert disk_probe.file_system(tmp_path) not in ("", "unknown")


def test_probe_without_direct_reads(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    monkeypatch.setattr(disk_probe, "_open_direct", lambda path: None)
    rate = disk_probe.probe(path, 5000, seconds=0.1)
    assert not rate.direct_io and rate.bytes_per_second > 0 and rate.block_bytes == 8192
    assert not disk_probe.direct_io(path)
    # also where a busy machine leaves the threads no time at all
    assert disk_probe.probe(path, 5000, seconds=0).bytes_per_second > 0
    (tmp_path / "empty").touch()
    with pytest.raises(disk_probe.ModelError, match="empty"):
        disk_probe.probe(tmp_path / "empty", 4096)


def test_reads_around_the_cache_are_a_property_of_the_descriptor(tmp_path, monkeypatch):
    """On macOS: F_NOCACHE, for which any command stands in that this kernel takes; one
    that it does not take is a disk with buffered reads only.
    """
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not disk_probe.direct_io(path)
    monkeypatch.setattr(fcntl, "F_NOCACHE", fcntl.F_SETFD, raising=False)
    assert disk_probe.direct_io(path)
    assert disk_probe.probe(path, 1 << 16, seconds=0.05).direct_io


@pytest.mark.parametrize("rate", [1e9, 1.6e9])
def test_what_the_disk_gains_from_more_threads_is_told(demo, monkeypatch, rate):
    monkeypatch.setattr(
        doctor,
        "probe",
        lambda path, block_bytes, seconds, n_threads: disk_probe.DiskRate(
            rate if n_threads == 16 else 1e9, block_bytes, True, seconds
        ),
    )
    threads = {finding.name: finding for finding in doctor.check_disk(demo)}["I/O threads"]
    assert (
        threads.text == f"4 to 16, tuned while a model runs; 16 read {rate / 1e9:.1f}x as fast now"
    )
