"""Leaving out on real models, and the simulated cache behind which it repeats: the rule
against NumPy for every kind of router, replayed and priced.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import moeoff
from helpers.arch_models import decode, open_moeoff, tokens, write_model
from helpers.logits import assert_bit_equal, greedy_logits
from moeoff.experts.convert import convert
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure.perplexity import Reference, evaluate, open_model, read_windows
from moeoff.policies.hobbit import HIGH, SKIP
from moeoff.policies.replay import simulate
from moeoff.precision import Precision
from moeoff.routing.router import SOFTMAX_WEIGHT, Router
from moeoff.routing.trace import Trace

PROMPT = [10, 300, 500, 700, 900, 1100, 1300, 1500] * 2
OPTIONS = {"n_ctx": 64, "n_threads": 2, "logits_all": True}
TAU = Precision(tau=0.1, resident=0.5)


def logits(model, n=24, prompt=PROMPT, **options):
    with moeoff.Llama(model, **OPTIONS | {"expert_memory": "3M"} | options) as llm:
        out = greedy_logits(llm, prompt, n)
        return out, llm.stats()


class Cache:
    """The simulated cache of moeoff-version-selector.h once more."""

    def __init__(self, n_experts: int, share: float):
        self.count, self.inside, self.room, self.unit = (
            np.zeros(n_experts, np.float32),
            np.zeros(n_experts, bool),
            int(share * n_experts + 0.5),
            np.float32(1),
        )

    def use(self, ids: np.ndarray, is_read: np.ndarray | bool = True) -> None:
        self.count[ids] += self.unit
        for e in ids[~self.inside[ids] & is_read]:
            if self.inside.sum() >= self.room:
                others = np.setdiff1d(np.flatnonzero(self.inside), ids)
                if not len(others):
                    continue
                self.inside[others[self.count[others].argmin()]] = False
            self.inside[e] = True
        self.unit /= np.float32(0.98)


NORMALIZED = {"qwen3moe", "gpt-oss", "minimax-m2"}  # over the chosen, whatever the file says


@pytest.mark.parametrize(
    "architecture",
    ["qwen3moe", "deepseek2", "glm4moe", "gpt-oss", "minimax-m2", "bailingmoe2", "olmoe"],
)
def test_what_weighs_little_is_left_out_for_every_kind_of_router(architecture, writer, folder):
    """The weight is the factor of the output, in the form that the architecture gives
    it: a share of the chosen or not, scaled, without the selection bias.
    """
    path = write_model(writer, folder, architecture, "F32")
    model_index, text = ModelIndex.read(path), tokens(128)

    def run(precision):
        events = []
        with open_moeoff(
            path,
            precision=precision,
            deterministic=True,
            gate_input=True,
            trace=str(folder / "trace"),
        ) as model:
            layers = {t.gate: t.layer for t in model.engine.buffer.tensors}
            model.set_gate_callback(events.append)
            decode(model, text[:8], 0)
            for i in range(8, 128):
                decode(model, [text[i]], i)
            model.engine.buffer.drain()
            return (
                events,
                Router.read(
                    model_index, [layers[g] for g in sorted(layers)], model.engine.buffer.gating
                ),
                model.stats(),
            )

    lossless, router, _ = run(Precision())
    assert all(event.versions is None for event in lossless)
    tau = float(np.quantile(np.concatenate([event.weights.ravel() for event in lossless]), 0.6))
    events, _, stats = run(Precision(tau=tau, resident=0.25))
    norm = architecture in NORMALIZED or model_index.hparams.get("expert_weights_norm", False)
    scale = model_index.hparams.get("expert_weights_scale") or 1.0
    caches, n_left_out, n_light = {}, 0, 0
    for event in events:
        cache = caches.setdefault(event.gate, Cache(event.logits.shape[1], 0.25))
        probs = (
            router.gated(event.logits) if router.gating != SOFTMAX_WEIGHT else np.exp(event.logits)
        )
        expected = np.take_along_axis(probs, event.ids, axis=1)
        expected = scale * (expected / expected.sum(axis=1, keepdims=True) if norm else expected)
        np.testing.assert_allclose(event.weights, expected, rtol=2e-3)
        for t, ids in enumerate(event.ids):
            is_read = (
                cache.inside[ids] | (event.weights[t] >= np.float32(tau))
                if event.decode
                else np.ones(len(ids), bool)
            )
            if event.versions is not None:
                np.testing.assert_array_equal(event.versions[t], np.where(is_read, HIGH, SKIP))
            assert event.versions is not None or is_read.all()
            n_left_out += int(np.count_nonzero(~is_read))
            n_light += (
                int(np.count_nonzero(event.weights[t] < np.float32(tau))) if event.decode else 0
            )
            cache.use(ids, is_read)
    assert n_light > n_left_out == stats.skipped > 5  # random routers use few experts


def test_deterministic(demo):
    """The same bits at every budget and with other strategies, whatever was asked
    before.
    """
    first, stats = logits(demo, precision=TAU, deterministic=True)
    assert stats.skipped > 20
    own, _ = logits(demo)
    assert (first != own).any()
    for options in (
        {"expert_memory": "1M"},
        {"expert_memory": "1G", "io_threads": 1},
        {"strategy": "lru", "expert_memory": "700K"},
    ):
        assert_bit_equal(logits(demo, precision=TAU, deterministic=True, **options)[0], first)
    alive, _ = logits(demo, precision=TAU)
    assert (alive != first).any()  # what is resident in truth is something else


def test_a_text_does_not_depend_on_the_one_before(demo):
    with moeoff.Llama(
        demo, n_ctx=256, expert_memory="2M", precision=TAU, deterministic=True
    ) as llm:
        first = llm("Natalia sold clips", max_tokens=24, temperature=0)["choices"][0]["text"]
        llm("Something else", max_tokens=10, temperature=0)
        assert (
            llm("Natalia sold clips", max_tokens=24, temperature=0)["choices"][0]["text"] == first
        )
        # after itself, too
        assert (
            llm("Natalia sold clips", max_tokens=24, temperature=0)["choices"][0]["text"] == first
        )
        longer = f"Natalia sold clips{first}"
        assert llm(longer, max_tokens=4, temperature=0)["choices"][0]["text"]


@pytest.mark.parametrize(
    "precision",
    [Precision(0.4, 0.8, low_tier="Q4_0", resident=0.4), Precision(tau=0.12, resident=0.4)],
    ids=["T", "tau"],
)
def test_batches_are_priced_token_by_token(demo, text, precision, tmp_path):
    """ "simulated" computes in batches what a deterministic run computes one by one:
    the same choices, and so the same loss.
    """
    model = shutil.copy(demo, tmp_path)
    if precision.low_tier:
        convert(model, tiers=precision.low_tier)
    with open_model(
        model, 128, precision=precision, deterministic=True, expert_memory=1 << 26, n_threads=2
    ) as llm:
        windows, results = read_windows(llm, [text], 128, 3), {}
        for mode in ("decode", "simulated"):
            llm.engine.quality.use(Precision())
            with Reference.record(llm, windows, mode) as reference:
                llm.engine.quality.use(precision)
                llm.reset_stats()
                scores = evaluate(llm, windows, reference, mode=mode)
            stats = llm.stats()
            results[mode] = scores.nll, (stats.skipped, stats.served_low, stats.simulated_misses)
    one, many = results["decode"], results["simulated"]
    assert one[1][0] > 100 and (one[1][1] > 200) == bool(precision.low_tier)
    # a sum may round otherwise in a batch, and two scores change places
    np.testing.assert_allclose(many[1], one[1], rtol=0.01)
    assert abs(many[0].mean() - one[0].mean()) < 2e-3


def test_replay_of_what_was_left_out(demo, tmp_path):
    """From its trace, whatever is resident; and the simulator leaves out the same in
    the same arena.
    """
    recorded, stats = logits(
        demo,
        n=60,
        precision=Precision(tau=0.1),
        strategy="lru",
        io_threads=1,
        trace=tmp_path / "trace",
    )
    assert stats.skipped > 40
    again, replayed = logits(
        demo,
        n=60,
        precision=Precision(tau=0.1),
        strategy="lru",
        replay=tmp_path / "trace",
        expert_memory="1M",
    )
    assert_bit_equal(again, recorded)
    assert replayed.skipped == stats.skipped
    trace = Trace.read(tmp_path / "trace")
    simulated = simulate(trace, "lru", stats.cache_bytes, tau=0.1)
    assert (simulated.skipped, simulated.bytes_read) == (stats.skipped, stats.bytes_read)
    assert (
        simulate(trace, "lru", stats.cache_bytes, tau=0.05).skipped
        < simulated.skipped
        < simulate(trace, "lru", stats.cache_bytes, tau=0.2).skipped
    )


def test_simulate_command(demo, tmp_path, invoke):
    logits(demo, trace=tmp_path / "trace")
    plain, left_out = (
        invoke("simulate", str(tmp_path / "trace"), "--memory", "30%", *more).stdout
        for more in ((), ("--tau", "0.1"))
    )
    assert left_out != plain and "belady" in left_out and "left out" not in plain
    trace = Trace.read(tmp_path / "trace")
    simulated = simulate(trace, "lru", trace.model.full_bytes * 3 // 10, tau=0.1)
    assert (
        simulated.decoded
        == sum(event.ids.size for event in trace.events if event.decode)
        > simulated.skipped
        > 0
    )
    lru, *_, belady = (
        line for line in left_out.splitlines() if " lru " in line or " belady " in line
    )
    assert lru.endswith(
        f"{simulated.skipped / simulated.decoded:.1%}"
    ) and not belady.rstrip().endswith("0.0%")
