"""The build with CUDA as far as it can be tested without a GPU, and the trial on a GPU,
its steps faked.
"""

import json
import os
import subprocess
import sys

import pytest

import cuda
import gpu_trial
from fork import ForkError
from helpers.files import ROOT

TRIAL = ROOT / "scripts" / "bench" / "gpu_trial.sh"


def test_only_compute_capabilities_are_taken(tmp_path):
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real;120a-real" in cuda.settings(tmp_path, ["90", "120a"])
    for wrong in ("sm_90", "9.0", ""):
        with pytest.raises(ForkError, match="compute capability"):
            cuda.settings(tmp_path, [wrong])


def run_trial(folder, *arguments: str, limit: float = 600) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", str(TRIAL), "-o", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def result(folder, step: str) -> dict:
    return json.loads((folder / f"{step}.json").read_text())


def test_a_trial_without_a_device_ends_with_a_sentence(tmp_path):
    from moeoff.llamacpp.devices import devices

    if devices():
        pytest.skip("there is a device")
    done = run_trial(tmp_path, "--small")
    assert done.returncode == 1 and "check: RuntimeError: no device: this build has " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"] and result(
        tmp_path, "check"
    )["result"] is None
    assert "no step 'nothing'" in run_trial(tmp_path, "nothing").stderr


@pytest.mark.slow
def test_a_faked_trial_runs_to_its_end(tmp_path):
    done = run_trial(tmp_path, "--fake", limit=900)
    assert done.returncode == 0, done.stdout + done.stderr
    trial = gpu_trial.Trial(tmp_path, small=True, fake=True)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(gpu_trial.steps(trial))
    assert result(tmp_path, "bits")["result"]["same"]
    (left_out,) = [
        path
        for path in tmp_path.glob("*.json")
        if "left_out" in (json.loads(path.read_text())["result"] or {})
    ]
    assert left_out.stem.endswith("promoe")
    rows = result(tmp_path, "demo-25-short-cooperative")["result"]["rows"]
    assert [row["test"] for row in rows] == ["pp64", "tg8 @ d16"] and all(
        row["avg_ts"] > 0 for row in rows
    )
    assert rows[0]["arena"] < result(tmp_path, "demo-experts-on-cpu")["result"]["rows"][0]["arena"]
    again = run_trial(tmp_path, "--fake")
    assert again.returncode == 0 and not again.stdout
    data = tmp_path / "tables.data"
    table = run_trial(tmp_path, "--table", "--json", str(data)).stdout
    results = json.loads(data.read_text())
    assert [one["name"] for one in results["tables"]] == [
        "rows",
        "prompts",
        "transfers",
        "bits",
        "failed",
    ]
    assert (
        results["commit"] == result(tmp_path, "check")["result"]["commit"]
        and results["command"].split()[2] == "check"
    )
    n_rows = 1 + 1 + len(gpu_trial.SHARES) + len(gpu_trial.VRAM_MODES) + len(gpu_trial.PRESETS) - 1
    assert table.count("(fake)") == 2 * n_rows and "| demo-25-short-promoe |" in table
