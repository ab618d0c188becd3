"""`moeoff doctor`: every line is ok, a warning or a problem with the way out, and problems decide the exit code."""

import json
import os
import resource

import pytest

from moeoff.budget import disk_probe
from moeoff.cli import doctor


def findings(done) -> dict[str, dict]:
    return {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_this_machine(moeoff_command, demo):
    done = moeoff_command("doctor", "-m", demo, "--json")
    found = findings(done)
    assert done.returncode == 0 and done.stderr == "", done.stdout
    assert set(found) >= {"fork", "interface", "cpu features", "openmp", "cgroup", "memory", "open files", "model", "file system", "direct reads", "disk rate"}
    assert "+moeoff." in found["fork"]["text"] and "GOMP_SPINCOUNT=10000, threads bound" in found["openmp"]["text"]
    assert all(finding["way_out"] for finding in found.values() if finding["state"] != "ok")


def test_text_and_a_folder(moeoff_command, tmp_path):
    done = moeoff_command("doctor", "-m", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "disk rate" in done.stdout and str(tmp_path) in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["missing.gguf", __file__])
def test_a_problem_is_the_exit_code(moeoff_command, path):
    done = moeoff_command("doctor", "-m", path)
    assert done.returncode == 1 and "problem" in done.stdout and "->" in done.stdout and "Traceback" not in done.stderr


def test_warnings(moeoff_command, demo):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    done = moeoff_command("doctor", "-m", demo, "--json", env=os.environ | {"OMP_WAIT_POLICY": "active"}, preexec_fn=limit)
    found = findings(done)
    assert done.returncode == 0
    assert found["open files"]["state"] == found["openmp"]["state"] == "warning"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_tmpfs():
    states = {finding.name: finding for finding in doctor.check_disk("/dev/shm")}
    assert states["file system"].state == doctor.WARNING and "saves nothing" in states["file system"].text


def test_cpu_features(monkeypatch):
    from llama_cpp import llama_cpp as binding

    monkeypatch.setattr(binding, "llama_print_system_info", lambda: b"CPU : SSE3 = 1 | AVX_NONE = 1 | OPENMP = 1 | ")
    found = {finding.name: finding for finding in doctor.check_cpu()}
    with open("/proc/cpuinfo") as file:
        has_avx2 = " avx2 " in file.read()
    assert found["cpu features"].state == (doctor.WARNING if has_avx2 else doctor.OK)


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
    (tmp_path / "empty").touch()
    with pytest.raises(disk_probe.ModelError, match="empty"):
        disk_probe.probe(tmp_path / "empty", 4096)
