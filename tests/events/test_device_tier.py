"""Models on a device: with the experts on the CPU, and with some of them in slots of
its memory.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from companions import write_expert_adapter
from helpers.arch_models import ARCHITECTURES, WITHOUT_BLOCK, WITHOUT_MEMORY, write_model
from helpers.device_runs import ENVIRONMENT, device_runs, why_no_device
from helpers.logits import assert_bit_equal
from helpers.models import requantize_experts
from moeoff.experts.convert import convert
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp.native import HIGH, LOW, SKIP

pytestmark = pytest.mark.skipif(bool(why_no_device()), reason=why_no_device())

BATCHES = [40, 1, 2, 9, *[1] * 12]
SINGLE = [1] * 64
ALL = {"vram": "1G", "slots": 32, "batches": BATCHES}


def n_slots(stats: dict) -> int:
    (use,) = stats["device_memory"].values()
    return use["n_slots"]


def test_experts_on_the_cpu_are_stocks(demo, tmp_path):
    """Everything else is on the device: with all experts in memory, and with a few; and
    where every expert could be on the device and none is.
    """
    runs = {
        "stock": {"stock": "CPU"},
        "ours": {},
        "small": {"memory": None, "expert_memory": "3M"},
        "misses": {"vram": "1G", "uploads": 0},
    }
    logits, stats = device_runs(
        demo, tmp_path, {name: {"batches": BATCHES} | run for name, run in runs.items()}
    )
    for name in ("ours", "small", "misses"):
        assert_bit_equal(logits[name], logits["stock"])
    assert stats["small"]["evictions"] > 0
    assert (
        stats["misses"]["device_hits"]
        == stats["misses"]["device_uploads"]
        == 0
        < stats["misses"]["demand_hits"]
    )


def test_experts_on_the_device_are_stocks(demo, tmp_path):
    """Where a device has all that is chosen, in both modes, and with a floor of host
    memory.
    """
    runs = {
        "stock": {"stock": "device", "batches": BATCHES},
        "centric": ALL | {"vram_mode": "centric"},
        "small": ALL | {"vram_mode": "centric", "memory": None, "expert_memory": "96K"},
        "cooperative": ALL | {"uploads": 32, "passes": 40},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    for name in ("centric", "small", "cooperative"):
        assert_bit_equal(logits[name], logits["stock"])
        assert n_slots(stats[name]) == 32
    assert stats["cooperative"]["device_hit_rate"] == 1
    assert (
        stats["small"]["evictions"] > 0
        and stats["small"]["device_uploads"] == stats["centric"]["device_uploads"] > 0
    )


@pytest.mark.parametrize("slots", [4, 8, 16, 32])
def test_single_tokens_with_a_few_slots(demo, tmp_path, slots):
    """Every chosen expert is uploaded before its use, or while the device computes with
    the others:
    as if all had been there.
    """
    ours = ALL | {"batches": SINGLE, "slots": slots}
    small = {"memory": None, "expert_memory": "3M"}
    runs = {
        "stock": {"stock": "device", "batches": SINGLE},
        "centric": ours | {"vram_mode": "centric"},
        "reordered": ours | {"vram_mode": "reordered"},
        "reordered, small": ours | {"vram_mode": "reordered"} | small,
        "predicted": ours | {"vram_mode": "reordered", "strategy": "lru-layer+gate"},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    for name in list(runs)[1:]:
        assert_bit_equal(logits[name], logits["stock"])
        if name != "predicted":
            n_selected = stats[name]["device_uploads"] + stats[name]["device_hits"] // 3
            assert n_selected == stats[name]["expert_uses"]
        assert stats[name]["device_experts"] <= slots * 12


def test_slots_by_the_policys_quotas(demo, tmp_path):
    """Fate §4.4: the first two of twelve layers whole, the others with what is left; in
    centric and in waves as if all experts had been there.
    """
    batches = [40, *[1] * 24]
    ours = {"vram": "1G", "capacity": 140, "batches": SINGLE, "strategy": "fate"}
    runs = {
        "stock": {"stock": "device", "batches": batches},
        "single": {"stock": "device", "batches": SINGLE},
        "centric": ours | {"vram_mode": "centric"},
        "waves": ours | {"vram_mode": "waves", "batches": batches},
        "lru": ours | {"vram_mode": "centric", "strategy": "lru"},
        "cooperative": ours | {"vram_mode": "cooperative", "capacity": 40},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    assert_bit_equal(logits["waves"], logits["stock"])
    expected = {"centric": (7, 32), "waves": (7, 32), "lru": (11, 12), "cooperative": (0, 32)}
    for name, (fewest, most) in expected.items():
        (use,) = stats[name]["device_memory"].values()
        assert (use["n_slots"], use["most_slots"]) == (fewest, most), name
        if name in ("centric", "lru"):
            assert_bit_equal(logits[name], logits["single"])
    assert 0 < stats["cooperative"]["device_experts"] <= 40
    assert stats["cooperative"]["device_hits"] > 0


def test_in_waves(demo, tmp_path):
    """A batch that needs more experts than there are slots: as if all had been there.
    In waves, and at once on one stage or on two in turn.
    """
    batches = [40, 1, 9, 1, 40, 30]
    waves = {"vram": "1G", "vram_mode": "waves", "batches": batches}
    small = {"memory": None, "expert_memory": "3M"}
    runs = {
        "stock": {"stock": "device", "batches": batches},
        "four": waves | {"slots": 8},
        "two": waves | {"slots": 16} | small,
        "stage": waves | {"slots": 8, "stage": (32, 1)} | small,
        "half": waves | {"slots": 4, "stage": (16, 1)},
        "stages": waves | {"slots": 8, "stage": (32, 2)},
        "small stages": waves | {"slots": 16, "stage": (32, 2)} | small,
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    for name, run in list(runs.items())[1:]:
        assert_bit_equal(logits[name], logits["stock"])
        assert (
            stats[name]["device_experts"] <= 12 * run["slots"]
            and stats[name]["device_uploads"] > 12 * run["slots"]
        )
        assert stats[name]["device_upload_seconds"] >= stats[name]["device_wait_seconds"] > 0
        # with little host memory nothing of the next layer is there
        assert (stats[name]["device_ahead_used"] > 0) == (name == "stages")


@pytest.fixture(scope="module")
def two_precisions(demo, tmp_path_factory) -> tuple[str, str]:
    """The demo model (Q8_0) with a sidecar in Q4_0; and it with the experts of every
    second layer in that type.
    """
    folder = tmp_path_factory.mktemp("precisions")
    model, mixed = folder / "two.gguf", folder / "mixed.gguf"
    shutil.copy(demo, model)
    convert(model, tiers="Q4_0")
    requantize_experts(demo, mixed, type_from_name("Q4_0"), only=r"blk\.\d?[02468]\.")
    return str(model), str(mixed)


def in_layers(batches: list[int], of_layer: Callable[[int], list[int]]) -> list[int]:
    """Versions for the uses of a batch's experts, four of each token: those of a layer
    repeated.
    """
    return [
        v
        for n in batches
        for layer in range(12)
        for v in np.resize(of_layer(layer), 4 * n).tolist()
    ]


def test_low_versions_in_slots_of_their_own(two_precisions, tmp_path):
    """Layer by layer in high and in low precision: as stock computes a model that has
    these types, in waves and one by one.
    """
    model, mixed = two_precisions
    ours = {"vram": "1G", "slots": 8, "precision": {"low_tier": "Q4_0"}}
    batches = {"waves": [40, 1, 9, 1], "centric": SINGLE[:12], "reordered": SINGLE[:12]}
    runs = {
        mode: (
            ours
            | {
                "vram_mode": mode,
                "batches": b,
                "versions": in_layers(b, lambda layer: [HIGH if layer % 2 else LOW]),
            }
        )
        for mode, b in batches.items()
    }
    logits, stats = device_runs(
        model, tmp_path, runs | {"staged": runs["waves"] | {"stage": (32, 2)}}
    )
    stock, _ = device_runs(
        mixed, tmp_path, {mode: {"stock": "device", "batches": b} for mode, b in batches.items()}
    )
    assert_bit_equal(logits["staged"], stock["waves"])
    for mode, b in batches.items():
        assert_bit_equal(logits[mode], stock[mode])
        assert (
            stats[mode]["served_low"] == 6 * 4 * sum(b)
            and 0
            < stats[mode]["device_hits"]
            < stats[mode]["demand_hits"] + stats[mode]["demand_misses"]
        )
        assert 0 < stats[mode]["device_uploads"]


def test_a_token_in_both_precisions(two_precisions, tmp_path):
    """High, low and left out within a token: the same bits however many slots there
    are, and near the CPU's with the same decisions.
    """
    mixture = [HIGH, LOW, LOW, HIGH, SKIP, HIGH, LOW]
    runs = {}
    for name, batches in (("single", SINGLE[:8]), ("batch", [9, 1])):
        same = {
            "vram": "1G",
            "batches": batches,
            "precision": {"low_tier": "Q4_0"},
            "versions": in_layers(batches, lambda layer: [*mixture[layer % 5 :], LOW]),
        }
        runs |= {
            f"{name} {mode} {slots}": same | {"vram_mode": mode, "slots": slots}
            for mode, slots in (("waves", 6), ("waves", 32), ("cpu", 32))
        }
        runs[f"{name} staged 6"] = runs[f"{name} waves 6"] | {"stage": (32, 2)}
        runs[f"{name} cooperative 8"] = same | {"vram_mode": "cooperative", "slots": 8, "passes": 2}
        runs |= {
            f"{name} stock {where}": {"stock": where, "batches": batches}
            for where in ("CPU", "device")
        }
    few = runs["single waves 6"] | {"slots": 4}
    runs |= {f"single {mode} 4": few | {"vram_mode": mode} for mode in ("centric", "reordered")}
    logits, stats = device_runs(two_precisions[0], tmp_path, runs)
    for mode in ("centric", "reordered"):
        assert_bit_equal(logits[f"single {mode} 4"], logits["single waves 32"])
    for name in ("single", "batch"):
        assert_bit_equal(logits[f"{name} waves 6"], logits[f"{name} waves 32"])
        assert_bit_equal(logits[f"{name} staged 6"], logits[f"{name} waves 32"])
        cpu = logits[f"{name} cpu 32"]
        usual = np.abs(logits[f"{name} stock CPU"] - logits[f"{name} stock device"]).mean()
        for ours in ("waves 6", "cooperative 8"):
            s = stats[f"{name} {ours}"]
            assert s["served_low"] > 0 < s["skipped"] and s["device_hits"] > 0
            assert 0 < np.abs(logits[f"{name} {ours}"] - cpu).mean() < 3 * usual


@pytest.mark.parametrize(
    "strategy, precision",
    [
        ("hobbit", {"t1": 0.4, "t2": 0.8}),
        ("fate", {"prefill_low_fraction": 0.5, "mispredicted_low": True}),
    ],
)
def test_a_lossy_run_comes_back_from_its_trace(two_precisions, tmp_path, strategy, precision):
    """With the same decisions a lossy run has the same bits, whatever the memory and
    the slots.
    """
    ours = {
        "vram": "1G",
        "vram_mode": "waves",
        "batches": [9, *[1] * 16],
        "precision": precision | {"low_tier": "Q4_0"},
        "strategy": strategy,
        "memory": None,
    }
    trace = str(tmp_path / "trace")
    logits, stats = device_runs(
        two_precisions[0],
        tmp_path,
        {"run": ours | {"expert_memory": "2M", "slots": 6, "trace": trace}},
    )
    again, replayed = device_runs(
        two_precisions[0],
        tmp_path,
        {"run": ours | {"expert_memory": "12M", "slots": 20, "replay": trace}},
    )
    assert_bit_equal(again["run"], logits["run"])
    assert (replayed["run"]["served_low"], replayed["run"]["skipped"]) == (
        stats["run"]["served_low"],
        stats["run"]["skipped"],
    )
    assert stats["run"]["served_low"] > 0 and stats["run"]["device_hits"] > 0


def test_two_contexts(demo, tmp_path):
    """The model's own has the slots; another computes on the CPU, as stock does, and
    neither disturbs the other.
    """
    batches = [9, 1, 2, *[1] * 8]
    centric = {"vram": "1G", "slots": 8, "vram_mode": "centric", "batches": [1] * 20}
    runs = {
        "device": {"stock": "device", "batches": [1] * 20},
        "own": centric | {"second": True},
        "CPU": {"stock": "CPU", "batches": batches},
        "other": {"vram": "1G", "slots": 32, "uploads": 8, "batches": batches, "second": "other"},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    assert_bit_equal(logits["own"], logits["device"])
    assert_bit_equal(logits["other"], logits["CPU"])
    assert stats["other"]["device_hits"] > 0


def test_two_devices(demo, tmp_path):
    """Each with half of the layers and with slots of its own, by quotas or for every
    expert.
    """
    batches = [40, *[1] * 24]
    ours = {"vram": "1G", "strategy": "fate", "batches": batches}
    runs = {where: {"stock": where, "batches": batches} for where in ("device", "CPU")}
    runs |= {mode: ours | {"vram_mode": mode, "capacity": 140} for mode in ("cooperative", "waves")}
    runs |= {mode: ours | {"vram_mode": mode, "slots": 32} for mode in ("centric", "reordered")}
    runs["none"] = {"vram": "1G", "uploads": 0, "batches": batches}
    logits, stats = device_runs(demo, tmp_path, runs, n_devices=2)
    for name in ("waves", "centric", "reordered"):
        assert_bit_equal(logits[name], logits["device"])
    assert_bit_equal(logits["none"], logits["CPU"])
    for name in ("cooperative", "waves", "centric", "reordered"):
        assert len(stats[name]["device_memory"]) == 2 and stats[name]["device_hits"] > 0
    first, second = stats["waves"]["device_memory"].values()  # the first has the shallow layers
    assert first["most_slots"] == 32 > second["most_slots"]
    assert first["n_slots"] < 32 and second["n_slots"] >= second["most_slots"] - 1


def test_adapters_of_experts(demo, tmp_path):
    """A LoRA adapter of every matrix of the experts: right where the device computes
    with all of them, refused where it does with some.
    """
    base = {
        "batches": [9, 1, 2, *[1] * 8],
        "lora_path": write_expert_adapter(demo, tmp_path / "adapter.gguf"),
    }
    runs = {
        "plain": {"stock": "device", "batches": base["batches"]},
        "device": base | {"stock": "device"},
        "all": base | {"vram": "1G", "slots": 32, "vram_mode": "centric"},
    }
    logits, _ = device_runs(demo, tmp_path, runs)
    assert np.abs(logits["plain"] - logits["device"]).max() > 0.1
    assert_bit_equal(logits["all"], logits["device"])
    one_side = "no adapters (LoRA); give centric or cpu"
    for mode, precision, why in (
        ("cooperative", {}, one_side),
        ("auto", {}, one_side),
        (
            "centric",
            {"prefill_low_fraction": 0.5, "low_tier": "Q4_0"},
            "no adapters (LoRA) with experts in low precision; give cpu",
        ),
    ):
        _, refused = device_runs(
            demo,
            tmp_path,
            {"run": base | {"vram": "1G", "vram_mode": mode, "precision": precision}},
        )
        assert refused["run"]["error"] == f"vram_mode {mode}: {why}"


def test_a_device_that_gives_less_than_it_said(demo, tmp_path):
    """One sentence with the numbers, and a smaller bound that then fits."""
    batches = {"batches": [1] * 6}
    _, refused = device_runs(demo, tmp_path, {"run": batches | {"vram": "1G", "room": 12}})
    error, needed = refused["run"]["error"], refused["run"]["needed"]
    assert re.search(
        r"^1\.00 GiB on \w+: \w+ has no room for 123456 bytes of experts of layer 3; [\d.]+ MiB are"
        r" llama.cpp's there: give vram=\d+$",
        error,
    )
    assert 0 < needed < 1 << 30
    logits, stats = device_runs(
        demo,
        tmp_path,
        {
            "stock": batches | {"stock": "CPU"},
            "ours": batches | {"vram": needed, "room": 12, "uploads": 0},
        },
    )
    assert_bit_equal(logits["ours"], logits["stock"])
    assert 4 <= n_slots(stats["ours"]) <= 12


def test_auto_tries_all_ways(demo, tmp_path):
    """In blocks of two tokens: after 64 all ways have been compared. The tokens are
    right whatever is kept; `test_comparison.py` has what is kept when.
    """
    batches = [1] * 66
    runs = {
        "CPU": {"stock": "CPU", "batches": batches},
        "ours": ALL | {"vram_mode": "auto", "slots": 8, "batches": batches, "block": 2},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    np.testing.assert_array_equal(logits["ours"][:64].argmax(1), logits["CPU"][:64].argmax(1))
    s = stats["ours"]
    assert (
        s["device_mode"] in ("cooperative", "centric", "cpu")
        and s["device_gain"] is not None
        and s["device_experts"] > 0
    )


@pytest.mark.parametrize("mode", ["cooperative", "centric", "waves"])
def test_what_is_predicted_is_uploaded(demo, tmp_path, mode):
    """Predicted experts are uploaded before their router selects, by another thread
    than the one that computes. Host memory holds all experts, and the predictor is not
    compared.
    """
    batches = [1] * 96
    ours = {
        "vram": "1G",
        "vram_mode": mode,
        "slots": 8,
        "batches": batches,
        "strategy": "hobbit",
        "count": True,
    }
    runs = {
        "stock": {"stock": "CPU" if mode == "cooperative" else "device", "batches": batches},
        "predicted": ours,
        "only": ours | {"uploads": 0},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    if mode == "cooperative":
        np.testing.assert_array_equal(
            logits["predicted"][:64].argmax(1), logits["stock"][:64].argmax(1)
        )
    else:
        assert_bit_equal(logits["predicted"], logits["stock"])
        assert_bit_equal(logits["only"], logits["stock"])
    assert (
        stats["predicted"]["device_ahead"]
        >= stats["predicted"]["device_ahead_used"]
        > 0
        == stats["only"]["device_ahead"]
    )
    # what host memory alone has when its router selects comes late, but to the CPU
    rates = {name: stats[name]["fetch_rate"] for name in ("predicted", "only")}
    assert rates["only"] == 1 if mode == "cooperative" else 0 < rates["only"] < 1
    assert stats["only"]["good_pred"] == stats["only"]["prediction_accuracy"] * rates["only"]
    elsewhere = {
        name: sum(count.get("elsewhere", 0) for count in stats[name]["counts"])
        for name in ("predicted", "only")
    }
    assert elsewhere["predicted"] >= stats["predicted"]["device_ahead"] > 0 == elsewhere["only"]


@pytest.mark.parametrize("slots", [4, 8, 16, 32])
def test_a_part_on_the_device(demo, tmp_path, slots):
    """As far from stock as stock on one device is from stock on another."""
    runs = {
        "CPU": {"stock": "CPU", "batches": BATCHES},
        "device": {"stock": "device", "batches": BATCHES},
        "ours": ALL | {"slots": slots},
        # small batches on the device, others on the CPU
        "centric": ALL | {"slots": slots, "vram_mode": "centric"},
        "scarce": ALL | {"slots": slots, "memory": None, "expert_memory": "3M"},
    }
    logits, stats = device_runs(demo, tmp_path, runs)
    usual = np.abs(logits["CPU"] - logits["device"]).max()
    assert usual > 0

    def n_same(of):
        return (of.argmax(1) == logits["CPU"].argmax(1)).sum()

    for name in ("ours", "centric", "scarce"):
        assert len(logits[name]) == 64
        assert np.abs(logits[name] - logits["CPU"]).max() <= 3 * usual
        assert n_same(logits[name]) >= n_same(logits["device"]) - 1  # of near ties
        s = stats[name]
        assert (
            0 < s["device_hits"] < s["demand_hits"] + s["demand_misses"]
            and s["device_experts"] <= 12 * slots
        )
        assert s["device_bytes"] > 0 and n_slots(s) == slots


# biases, a fused matrix, weights before the experts, two blocks in a layer, selection
# by groups, shared experts
QUICK = ("qwen3moe", "gpt-oss", "llama4", "grovemoe", "deepseek2", "qwen2moe", "mistral4")
ARCHITECTURES_ON_DEVICES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in ARCHITECTURES
    if name not in WITHOUT_BLOCK | WITHOUT_MEMORY
]


@pytest.mark.parametrize("architecture", ARCHITECTURES_ON_DEVICES)
def test_architectures(architecture, writer, folder):
    """Random models of 8 experts, 2 used: every expert on the device, 3 of them, 3 in
    turn, 3 and a stage, and none.
    """
    path = write_model(writer, folder, architecture, "F32")
    batches = [9, 1, 2, *[1] * 6]
    runs = {
        "device": {"stock": "device", "batches": batches},
        "CPU": {"stock": "CPU", "batches": batches},
        "all": {"vram": "1G", "slots": 8, "vram_mode": "centric", "batches": batches},
        "none": {"vram": "1G", "uploads": 0, "batches": batches},
        "single": {"stock": "device", "batches": [1] * 12},
        "few": {"vram": "1G", "slots": 3, "vram_mode": "centric", "batches": [1] * 12},
        "reordered": {"vram": "1G", "slots": 3, "vram_mode": "reordered", "batches": [1] * 12},
        "waves": {"vram": "1G", "slots": 3, "vram_mode": "waves", "batches": batches},
        "staged": {
            "vram": "1G",
            "slots": 3,
            "vram_mode": "waves",
            "batches": batches,
            "stage": (8, 2),
        },
    }
    logits, stats = device_runs(str(path), folder, runs)
    # with experts on the CPU alone, the second of its two routers is computed there,
    # too
    if architecture == "grovemoe":
        np.testing.assert_allclose(logits["none"], logits["CPU"], atol=1e-6)
    else:
        assert_bit_equal(logits["none"], logits["CPU"])
    if architecture == "mistral4":  # its last product has a precision of its own: no slots
        assert_bit_equal(logits["all"], logits["CPU"])
        return
    assert_bit_equal(logits["all"], logits["device"])
    assert_bit_equal(logits["few"], logits["single"])
    assert_bit_equal(logits["reordered"], logits["single"])
    assert_bit_equal(logits["waves"], logits["device"])
    assert_bit_equal(logits["staged"], logits["device"])
    assert all(
        stats[name]["device_uploads"] > 0 for name in ("all", "few", "reordered", "waves", "staged")
    )


REFUSED = [
    (
        ["--vram", "1M"],
        (
            r"1\.00 MiB on \w+ is too small: llama\.cpp takes [\d.]+ MiB there, and one expert of"
            r" each layer .*: give --vram \d+M"
        ),
    ),
    (["--vram", "9000G"], r"is more than \w+ has: .* free: give --vram \d+M"),
    (["--vram", "0%"], "a share of the device's memory lies between 0% and 100%"),
    (
        ["--vram", "1G", "--vram-mode", "fast"],
        "expected one of cooperative, centric, reordered, waves, cpu, auto, got 'fast'",
    ),
    (
        ["--vram", "1G", "--max-loss", "1%", "--deterministic"],
        "a repeatable run needs --vram-mode centric, reordered or waves",
    ),
    (["--vram", "1G", "-ngl", "0"], "--vram has no effect while no layer goes to the GPU"),
    (["--vram", "1G", "-ngl", "1"], "no layer with experts is computed on a device"),
]


@pytest.mark.parametrize(
    "options, words", REFUSED, ids=[" ".join(options) for options, _ in REFUSED]
)
def test_refused(demo, tmp_path, options, words):

    done = run_command(
        ["run", "-m", demo, "-p", "x", "-n", "1", "-fa", "off", "-ngl", "99", *options], tmp_path
    )
    assert done.returncode == 1 and re.search(words, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) <= 4  # ggml-vulkan tells of its devices in three


def run_command(arguments: list[str], folder) -> subprocess.CompletedProcess:
    command = os.path.join(os.path.dirname(sys.executable), "moeoff")
    env = os.environ | ENVIRONMENT | {"XDG_CACHE_HOME": str(folder)}
    return subprocess.run(
        [command, *arguments],
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def test_what_is_said_of_it(demo, tmp_path):
    done = run_command(
        [
            "run",
            "-m",
            demo,
            "-p",
            "x",
            "-n",
            "4",
            "-fa",
            "off",
            "-ngl",
            "99",
            "--vram",
            "80%",
            "--stats-json",
            str(tmp_path / "s.json"),
        ],
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "on the GPU" in done.stderr
        and json.loads((tmp_path / "s.json").read_text())["device_memory"]
    )
    doctor = run_command(["doctor"], tmp_path)
    assert re.search(r"ok +gpu +\w+\d, .* free of .*; --vram auto uses .*", doctor.stdout)
    inspect = run_command(["inspect", demo, "--probe", "off"], tmp_path)
    assert re.search(
        r"\w+\d +.* free of .* fits at most 100% of the experts",
        re.sub(r"\s+", " ", inspect.stdout),
    )


def test_a_device_that_is_found_is_used(demo, tmp_path):
    """Without a word about it: all of the demo model's experts have room; and none with
    --vram-mode cpu.
    """
    for options, slots in (([], 32), (["--vram-mode", "cpu"], None)):
        file = tmp_path / f"{slots}.json"
        done = run_command(
            [
                "run",
                "-m",
                demo,
                "-p",
                "x",
                "-n",
                "4",
                "-fa",
                "off",
                *options,
                "--stats-json",
                str(file),
            ],
            tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert [
            use["n_slots"] for use in json.loads(file.read_text())["device_memory"].values()
        ] == ([slots] if slots else [])


def test_a_build_without_a_device(demo, tmp_path, monkeypatch):
    """A software driver that is not named is none; the build is not what is to blame."""
    monkeypatch.setitem(ENVIRONMENT, "GGML_VK_VISIBLE_DEVICES", "")
    doctor = run_command(["doctor"], tmp_path)
    if re.search(r"ok +gpu", doctor.stdout):
        pytest.skip("this machine has a GPU")
    assert (
        re.search(r"gpu +this build has \w+, but no driver offers a device", doctor.stdout)
        and "GGML_VK_VISIBLE_DEVICES=0" in doctor.stdout
    )
    failed = run_command(
        ["run", "-m", demo, "-p", "x", "-n", "1", "-ngl", "99", "--vram", "1G"], tmp_path
    )
    assert (
        failed.returncode == 1
        and "no driver offers a device" in failed.stderr
        and "rebuild" not in failed.stderr
    )


SERVE = """
import json, sys, urllib.request
import moeoff
with moeoff.Server(sys.argv[1], port=0, vram="1G", n_gpu_layers=99, flash_attn=False, memory="6G", n_threads=2, parallel=2) as server:
    body = json.dumps({"prompt": "How many apples?", "n_predict": 12, "temperature": 0}).encode()
    for _ in range(3):
        with urllib.request.urlopen(urllib.request.Request(server.url + "/completion", body, {"Content-Type": "application/json"})) as reply:
            answer = json.load(reply)
    with urllib.request.urlopen(server.url + "/metrics") as reply:
        print(json.dumps({"moeoff": answer["moeoff"], "metrics": reply.read().decode()}))
"""


def test_a_server_says_it_too(demo, tmp_path):
    env = os.environ | ENVIRONMENT | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SERVE, demo], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert 0 < answer["moeoff"]["device_hits"] <= answer["moeoff"]["hits"]
    assert re.search(r"^moeoff_device_hits_total [1-9]", answer["metrics"], re.MULTILINE)
    assert re.search(r'^moeoff_device_bytes\{device="\w+"\} [1-9]', answer["metrics"], re.MULTILINE)


def test_waits_and_copies(demo, tmp_path):
    """For a decoded token the computing thread waits once per layer, where its router's
    selection is fetched, and for none of the layer's copies, whoever computes the
    experts, and also while experts are uploaded.
    """
    batches = [9, *[1] * 6]
    ours = {"vram": "1G", "batches": batches, "count": True}
    runs = {
        "stock": {"stock": "device", "batches": batches, "count": True},
        "cooperative": ours | {"slots": 8},
        "hits": ours | {"slots": 32, "vram_mode": "centric", "passes": 4},
        "misses": ours | {"slots": 8, "vram_mode": "centric"},
        "reordered": ours | {"slots": 8, "vram_mode": "reordered"},
    }
    _, stats = device_runs(demo, tmp_path, runs)
    stock, *counts = (stats[name]["counts"][-1] for name in runs)
    assert (
        0 < stats["cooperative"]["device_hits"]
        and stats["hits"]["device_hit_rate"] == 1 > stats["misses"]["device_hit_rate"] > 0
    )
    for count in counts:
        # layers; the first one's input comes from the CPU, and the last copy is waited
        # for
        assert count["waits"] <= 12 + stock["waits"] + 2
        assert count["copies"] == stock["copies"]
