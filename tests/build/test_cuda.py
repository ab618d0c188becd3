"""The build with CUDA as far as it can be tested without a GPU, and the trial on a GPU,
its steps faked.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuda
import gpu_trial
from fork import ForkError
from helpers.files import ROOT

TRIAL = ROOT / "scripts" / "bench" / "gpu_trial.sh"
HARNESS = """
#include "small_cublas.cu"
#include <cstdio>
#include <cstdlib>
#include <vector>

// A block of threads, one thread after the other between the places where they wait for each other.
int main(int, char ** argv) {
    const int64_t m = atoi(argv[1]), n = atoi(argv[2]), k = atoi(argv[3]);
    const bool ta = atoi(argv[4]), tb = atoi(argv[5]);
    const int64_t lda = (ta ? k : m) + 3, ldb = (tb ? n : k) + 1, ldc = m + 2;
    std::vector<float> a(lda * (ta ? m : k)), b(ldb * (tb ? k : n)), c(ldc * n);
    for (auto * v : {&a, &b, &c}) {
        if (fread(v->data(), sizeof(float), v->size(), stdin) != v->size()) return 1;
    }
    const product p = { m, n, k, a.data(), lda, F32, ta, b.data(), ldb, F32, tb, c.data(), ldc, F32, 0.5f, (float) atof(argv[6]) };
    for (int64_t row = 0; row < m; row += TILE) {
        for (int64_t column = 0; column < n; column += TILE) {
            tiles shared;
            static float sum[THREADS][4][4];
            for (auto & s : sum) for (auto & r : s) for (float & x : r) x = 0;
            for (int64_t depth = 0; depth < k; depth += DEPTH) {
                for (int t = 0; t < THREADS; t++) load_tiles(p, shared, t, row, column, depth);
                for (int t = 0; t < THREADS; t++) add_tiles(shared, t, sum[t]);
            }
            for (int t = 0; t < THREADS; t++) store_tile(p, t, row, column, sum[t]);
        }
    }
    fwrite(c.data(), sizeof(float), c.size(), stdout);
}
"""


def test_the_product_that_stands_in_for_cublas(tmp_path):
    """Its arithmetic on the CPU: all four ways to turn the matrices, sizes that fill no
    tile, what lies between columns stays.
    """
    (tmp_path / "main.cpp").write_text(HARNESS)
    program = tmp_path / "main"
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=address,undefined",
    ]
    subprocess.run(
        [*command, f"-I{ROOT / 'scripts/bench'}", str(tmp_path / "main.cpp"), "-o", str(program)],
        check=True,
    )
    rng = np.random.default_rng(1)
    for m, n, k in ((1, 1, 1), (64, 64, 16), (70, 130, 33)):
        for ta, tb, beta in ((0, 0, 0.0), (1, 0, 0.0), (0, 1, 1.0), (1, 1, -2.0)):
            # numpy's rows are cuBLAS's columns
            a = rng.standard_normal((m if ta else k, (k if ta else m) + 3), dtype=np.float32)
            b = rng.standard_normal((k if tb else n, (n if tb else k) + 1), dtype=np.float32)
            c = rng.standard_normal((n, m + 2), dtype=np.float32)
            arguments = [str(value) for value in (m, n, k, ta, tb, beta)]
            done = subprocess.run(
                [str(program), *arguments],
                input=a.tobytes() + b.tobytes() + c.tobytes(),
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr.decode()
            got = np.frombuffer(done.stdout, np.float32).reshape(c.shape)
            op_a, op_b = (a[:, :k] if ta else a[:, :m].T), (b[:, :n] if tb else b[:, :k].T)
            np.testing.assert_allclose(
                got[:, :m].T,
                0.5 * (op_a.astype(np.float64) @ op_b) + beta * c[:, :m].T,
                rtol=1e-4,
                atol=1e-4,
            )
            np.testing.assert_array_equal(got[:, m:], c[:, m:])


def test_only_compute_capabilities_are_taken(tmp_path):
    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real;120a-real" in cuda.settings(tmp_path, ["90", "120a"])
    for wrong in ("sm_90", "9.0", ""):
        with pytest.raises(ForkError, match="compute capability"):
            cuda.settings(tmp_path, [wrong])


def test_what_the_archive_leaves_out():
    """Libraries of all Pythons have .abi3 in their names; the repository's tests help
    to compare bits.
    """
    files = (
        "site/psutil/_psutil_linux.abi3.so",
        "numpy-cp310/numpy/linalg/linalg.py",
        "tree/tests/helpers/device_runs.py",
        "gpu_trial.sh",
    )
    left_out = (
        "numpy-cp310/numpy/tests/test_x.py",
        "numpy-cp310/numpy/_core/lib/libnpymath.a",
        "site/yaml/x.pyi",
        "site/bin/tqdm",
    )
    assert all(gpu_trial.is_packed(Path(path)) for path in files) and not any(
        gpu_trial.is_packed(Path(path)) for path in left_out
    )


def test_the_trials_models_are_written_as_their_scripts_are_called():
    for script, *arguments in gpu_trial.MODELS.values():
        importlib.import_module(Path(script).stem).main.make_context(
            script, [*arguments, "--overwrite", "-o", "model.gguf"]
        )


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


def test_a_faked_trial_goes_on_where_it_was(tmp_path):
    """The time for one step each time: as on a machine that is lent for some minutes."""
    done = run_trial(tmp_path, "--fake", "--minutes", "0.01")
    assert (
        done.returncode == 75
        and done.stdout.startswith("check: done")
        and "steps are left" in done.stdout
    )
    assert result(tmp_path, "check")["fake"] and result(tmp_path, "check")["result"]["doctor"]
    done = run_trial(tmp_path, "--fake", "--minutes", "0.01")
    assert done.returncode == 75 and done.stdout.startswith("transfers: done")
    (rates,) = result(tmp_path, "transfers")["result"].values()
    assert rates and min(rates.values()) > 0


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
