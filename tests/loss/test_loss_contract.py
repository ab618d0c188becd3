"""The quality contract: measured on this very model, kept at any budget, refused for
any other.
"""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest

import moeoff
from helpers.models import requantize_experts
from helpers.processes import own_process
from moeoff import ModelError, OptionError
from moeoff.budget import plan as memory_plan
from moeoff.budget.dry_load import dry_load
from moeoff.budget.loss_contract import SECTION, Candidate, LossContract
from moeoff.cli.options import sentence
from moeoff.experts.convert import convert
from moeoff.experts.profile import Profile, profile_path
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.quantize import type_from_name
from moeoff.measure import precision_search
from moeoff.measure.perplexity import Reference, Window, evaluate, open_model, read_windows
from moeoff.measure.precision_search import (
    OPENING,
    DivergenceModel,
    RuleEvaluator,
    SearchResult,
    keep_on_own_text,
    score,
    search_precision,
    write_freely,
)
from moeoff.measure.recorded_routing import RecordedRouting
from moeoff.measure.statistics import Estimate, one_sided, upper_loss
from moeoff.options import parse_loss
from moeoff.precision import Precision
from moeoff.system.memory import MIB, Budget

OPTIONS = {"n_threads": 1, "expert_memory": 1 << 26}
TOKENS = 2048  # 8 windows of the demo model's 256, the fewest that make an interval
BOUND = 0.05
SOME = 11 << 20  # of expert memory, more than half of them
WHOLE_OWN_TEXT_LOSS = RuleEvaluator.own_text_loss


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """A search of fewer steps, which writes no text of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RESIDENT_SHARES": (0.25, 0.5),
            "STEP": 1.3,
            "QUANTILES": (0.2, 0.5),
            "SAMPLE_WINDOWS": 2,
            "OWN_TOKENS": 512,
            "MOST_OWN_TOKENS": 512,
        }.items():
            patch.setattr(precision_search, name, value)
        patch.setattr(RuleEvaluator, "own_text_loss", lambda *_: Estimate(0.0, None, None))
        yield


@pytest.fixture(scope="module")
def measured(demo, text, tmp_path_factory) -> tuple[str, SearchResult]:
    """A copy of the demo model with a sidecar and a contract, alone in its folder; and
    what was found.
    """
    model = shutil.copy(demo, tmp_path_factory.mktemp("model") / "model.gguf")
    convert(model, tiers="Q4_0,Q2_0")
    return str(model), search_precision(model, [text], BOUND, tokens=TOKENS, **OPTIONS)


@pytest.fixture(scope="module")
def tau_alone(measured, tmp_path_factory) -> tuple[str, LossContract]:
    """The same model without its sidecar, and a contract that has what was measured
    without.
    """
    model = str(shutil.copy(measured[0], tmp_path_factory.mktemp("alone") / "model.gguf"))
    contract = replace(
        measured[1].contract,
        sidecar=0,
        candidates=tuple(c for c in measured[1].contract.candidates if c.tier == "original"),
    )
    Profile.write(profile_path(model), ModelIndex.read(model), {SECTION: contract.to_section()})
    return model, contract


def test_parse_loss():
    assert (
        parse_loss("1%"),
        parse_loss("0.5 %".replace(" ", "")),
        parse_loss("0.02"),
        parse_loss(0.03),
    ) == pytest.approx((0.01, 0.005, 0.02, 0.03))
    for bad in ("", "x", "0", "-1%", "100%", "nan", 0.0, 1):
        with pytest.raises(OptionError, match="expected an increase of perplexity"):
            parse_loss(bad)


# --- choosing ---


def of_tau(tau, resident, upper, cost, tier="original", size=1.0) -> Candidate:
    return Candidate(tier, tau, resident, upper / 2, upper, 0.0, cost, 0.1, size)


def whole(upper, cost) -> Candidate:
    return Candidate(f"Q{cost}", 0.0, 0.0, upper / 2, upper, 0.0, cost, size=cost)


def contract_of(*candidates: Candidate) -> LossContract:
    return LossContract(7, 8, 10, 100, 64, candidates)


def test_what_held_with_fewer_resident_holds_with_more():
    c = [
        of_tau(0.1, 0.25, 0.004, 0.7),
        of_tau(0.12, 0.25, 0.02, 0.6),
        of_tau(0.2, 0.5, 0.005, 0.5),
        of_tau(0.22, 0.5, 0.012, 0.4),
    ]
    contract = contract_of(*c)
    assert contract.choose(0.01, 0.2) is None  # not measured with so little
    assert [contract.choose(0.01, share) for share in (0.25, 0.49, 0.5, 0.8)] == [
        c[0],
        c[0],
        c[2],
        c[2],
    ]
    assert (
        contract.choose(0.03, 0.3) is c[1]
        and contract.choose(0.03, 0.6) is c[3]
        and contract.choose(0.001, 0.6) is None
    )
    assert contract.choose(0.01, 0.97) is None  # nothing is to be gained
    chosen = contract.select(0.01, 0.3)
    assert (chosen.tier, chosen.precision, chosen.estimated_loss) == (
        "original",
        Precision(tau=0.1, resident=0.25),
        0.002,
    )
    assert (
        contract.select(0.0005).precision.lossless
        and contract.select(0.01, 0.5, lambda c: not c.tau).precision.lossless
    )
    assert LossContract.from_section(contract.to_section()) == contract
    version = contract.to_section()["version"]
    for other in (version + 1, version.astype(float), version[None]):
        with pytest.raises(LookupError):
            LossContract.from_section(contract.to_section() | {"version": other})
    assert contract_of(replace(c[0], upper_loss=math.inf)).choose(0.5, 0.5) is None


def test_memory_decides_what_reads_the_least():
    tier, rule = whole(0.004, 0.5), of_tau(0.1, 0.1, 0.004, 0.3)
    contract = contract_of(rule, tier, whole(0.02, 0.2))
    # though twice as many fit in the tier
    assert contract.choose(0.01, 0.0) is tier and contract.choose(0.01, 0.1) is rule
    assert contract.choose(0.01, 0.4) is tier  # nearly all fit
    assert contract.choose(0.05, 0.1).cost == 0.2
    selected = contract.select(0.01, 0.4)
    assert selected.tier == tier.tier and selected.precision.lossless


def test_tau_inside_a_tier():
    tier, both = whole(0.004, 0.5), of_tau(0.1, 0.5, 0.006, 0.3, "Q0.5", 0.5)
    contract = contract_of(tier, both, of_tau(0.1, 0.5, 0.006, 0.9))
    assert (
        contract.choose(0.01, 0.3) is both
        and contract.select(0.01, 0.3).tier == "Q0.5"
        and contract.select(0.01, 0.3).precision.tau == 0.1
    )
    # in the tier that is 40 %, and it was measured with 50
    assert contract.choose(0.01, 0.2) is tier
    assert (
        contract.select(0.005, 0.3).precision.lossless
        and contract.select(0.005, 0.3).tier == "Q0.5"
    )


# --- searching ---


def test_bounds_hold_together():
    """One-sided, for as many sequences as a search makes."""
    interval = Estimate(0.0, -0.0065, 0.0065)
    assert upper_loss(Estimate(0.0, None, None), 1) == math.inf
    for at_once in (1, 4):
        ratio = math.log1p(upper_loss(interval, 10_000, at_once)) / math.log1p(0.0065)
        assert ratio == pytest.approx(
            NormalDist().inv_cdf(1 - 0.05 / at_once) / NormalDist().inv_cdf(0.975), rel=1e-3
        )


def test_how_far_a_search_goes_depends_on_the_divergence_alone():
    """KL of 2 τ³ (1 - s)²: τ whose loss should be well within the bound; what is
    measured corrects how the divergence and the bound grow.
    """
    limit, measured = math.log1p(0.01), [(tau, 2 * tau**3) for tau in (0.02, 0.05, 0.1)]

    def candidate(tau, share, factor, loss=0.0):
        kl = factor * 2 * tau**3 * (1 - share) ** 2
        return replace(
            of_tau(tau, share, math.expm1(math.log1p(loss) + 0.06 * kl**0.5), 0.5), loss=loss, kl=kl
        )

    growth = DivergenceModel(measured, limit, 10, 500, 4)
    first = growth.tau(0.5)
    bound = 2 * first**3 * 0.25 / precision_search.START
    assert bound + precision_search._SPREAD * one_sided(10, 4) * math.sqrt(
        2 * bound / 5000
    ) == pytest.approx(limit)
    others = [DivergenceModel(measured, limit, 10, 500, 4) for _ in range(2)]
    for other, loss in zip(others, (0.0, 0.009)):
        other.learn(candidate(first, 0.5, 1 / 8, loss))
    assert others[0].tau(0.75) == pytest.approx(others[1].tau(0.75))
    growth.learn(candidate(first, 0.5, 1.0))
    # an eighth of the divergence: twice the τ
    assert (
        others[0].tau(0.5) == pytest.approx(2 * growth.tau(0.5))
        and others[0].tau(0.5) > 1.8 * first
    )
    for unknown in ([], [(0.02, 0.0), (0.05, 1e-3)], [(0.02, 1e-3), (0.05, 9e-4)]):
        assert math.isnan(DivergenceModel(unknown, limit, 10, 500, 4).tau(0.5))
    # noise at the low end
    assert (
        DivergenceModel([(0.02, 1e-3), (0.05, 9e-4), (0.1, 8e-3)], limit, 10, 500, 4).tau(0.5) > 0
    )


def test_searched_tau(measured, text):
    """At each share τ grows by steps while the bound holds, and ends at the first that
    does not; the more is resident, the more may be left out.
    """
    model, result = measured
    rules = {
        share: [c for c in result.measured if c.tier == "original" and c.resident == share]
        for share in precision_search.RESIDENT_SHARES
    }
    boldest = [0.0]
    for of_share in rules.values():
        assert all(c.upper_loss <= BOUND for c in of_share[:-1])
        taus = [c.tau for c in of_share]
        assert (np.diff(np.log(taus)) > math.log(precision_search.STEP) - 1e-9).all()
        assert [c.cost for c in of_share] == sorted((c.cost for c in of_share), reverse=True)
        boldest += [max((c.tau for c in of_share if c.upper_loss <= BOUND), default=boldest[-1])]
    assert 0 < boldest[1] <= boldest[2]
    best = result.contract.choose(BOUND, 0.5, lambda c: c.tier == "original")
    assert best is not None and best.cost < 0.6 and 0.1 < best.skipped < 0.6
    assert [(c.loss, c.upper_loss) for c in result.contract.candidates] == [
        (m.distance.loss.value, upper_loss(m.distance.loss, result.contract.n_windows, 2 * 2 + 2))
        for m in result.measured
    ]
    # and a run of its own finds the same loss
    ctx = result.contract.ctx
    with open_model(
        model, ctx, precision=best.precision, experts=False, deterministic=True, **OPTIONS
    ) as llm:
        windows = read_windows(llm, [text], ctx, result.contract.n_windows)
        llm.engine.quality.use(Precision())
        with Reference.record(
            llm, windows, "simulated", n_prompt=precision_search.PROMPT_TOKENS
        ) as reference:
            llm.engine.quality.use(best.precision)
            quality = evaluate(
                llm, windows, reference, mode="simulated", n_prompt=precision_search.PROMPT_TOKENS
            ).quality()
    assert (quality.loss.value, quality.kl.value) == pytest.approx((best.loss, best.kl), abs=1e-6)


def test_bytes_are_compared_on_the_same_tokens(demo, text):
    """Misses without skipping come from the lossless pass's selections, for every
    share, as a simulated cache in the gate node counts them.
    """
    with open_model(
        demo, 128, precision=Precision(tau=0.1, resident=0.25), deterministic=True, **OPTIONS
    ) as llm:
        evaluator = RuleEvaluator(llm, read_windows(llm, [text], 128, 4), n_prompt=40)
        with evaluator.reference() as reference:
            for share in (0.0, 0.1, 0.25, 0.6):
                llm.engine.quality.use(Precision(tau=1e-9, resident=max(share, 1e-9)))
                llm.reset_stats()
                evaluate(llm, evaluator.windows, mode="simulated", n_prompt=40)
                stats = llm.stats()
                assert (
                    evaluator.routing.misses(share) == stats.simulated_misses and stats.skipped == 0
                )
            assert evaluator.measure(reference, Precision(tau=1e-9, resident=0.25)).cost == 1.0
            some = evaluator.measure(reference, Precision(tau=0.1, resident=0.25))
            assert some.cost == llm.stats().simulated_misses / evaluator.routing.misses(0.25) < 0.9
    assert isinstance(evaluator.routing, RecordedRouting) and len(evaluator.routing.weights) > 1000


def test_all_experts_in_a_tier(measured, text):
    """Where more memory makes that read less: the measured loss is that of the tier,
    and so are the logits.
    """
    model, result = measured
    tiers = {c.tier: c for c in result.contract.candidates if not c.tau}
    assert (
        set(tiers) == {"Q4_0", "Q2_0"}
        and tiers["Q4_0"].upper_loss < BOUND < tiers["Q2_0"].loss
        and tiers["Q4_0"].cost == tiers["Q4_0"].size == pytest.approx(18 / 34)
    )
    # in the smallest tier that keeps the bound, τ as well
    assert {c.tier for c in result.contract.candidates if c.tau} == {"original", "Q4_0"}
    logits = []
    for how in ({"max_loss": BOUND}, {"tier": "Q4_0"}):
        with moeoff.Llama(
            model, n_ctx=64, logits_all=True, **how, **OPTIONS | {"expert_memory": 5 << 20}
        ) as llm:
            llm.eval(llm.tokenize(b"Natalia sold 48 clips"))
            logits.append(np.array(llm.scores[: llm.n_tokens]))
            stats = llm.stats()
            assert (
                stats.tier == "Q4_0"
                and stats.served_low == 0 < stats.expert_uses
                and "all experts in Q4_0" in stats.precision_summary
            )
            assert ("bound 5.00%" in stats.precision_summary) == ("max_loss" in how)
    assert np.array_equal(*logits)  # nothing is left out of a prompt
    # with room for everything nothing is given up
    with moeoff.Llama(model, n_ctx=64, max_loss=BOUND, **OPTIONS) as llm:
        llm.eval([10, 300, 500])
        assert (
            llm.engine.quality.selected.tier == "original"
            and llm.engine.quality.precision.lossless
            and llm.stats().precision_summary == ""
        )


def test_what_loses_more_on_own_text_is_given_up():
    """If it certainly does: the lower end of its interval is above the bound. The
    boldest goes first, in each share, and what would lose too much as well.
    """
    asked = []

    def own_text_loss(c, *_):
        asked.append((c.tau, c.resident))
        return Estimate(0.4, 0.31 if len(asked) == 1 else 0.2, 0.5)

    evaluator = SimpleNamespace(windows=[Window(tuple(range(64)), 0)], own_text_loss=own_text_loss)
    # the last breaks the bound
    by_share = [
        [replace(of_tau(tau, share, tau, 0.5), kl=tau) for tau in (0.05, 0.1, 0.17, 0.2, 0.4)]
        for share in (0.25, 0.5)
    ]
    # of what loses as much as the bound, if loss grows with it
    kl = 0.2 * math.log(1.3) / math.log(1.4)
    assert 0.1 < kl < 0.17
    assert [(c.tau, c.resident) for c in keep_on_own_text(evaluator, by_share, 0.3)] == [
        (0.05, 0.25),
        (0.1, 0.25),
        (0.05, 0.5),
        (0.1, 0.5),
    ]
    assert asked == [(0.2, 0.5), (0.1, 0.5)]


@pytest.mark.parametrize("n_texts", [0, 1, 2, 3])
def test_own_text_ends_at_the_deadline(demo, text, monkeypatch, n_texts):
    """In the middle of a text, which does not count. Fewer texts than wanted must keep
    the bound by their mean; of one nothing is known.
    """
    ticks = itertools.count()
    monkeypatch.setattr(precision_search, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    for name in ("OWN_TOKENS", "MOST_OWN_TOKENS"):
        monkeypatch.setattr(precision_search, name, 3 * (64 - OPENING))
    c = Candidate("original", 0.05, 0.5, 0.0, 0.0, 0.0, 0.0)
    with open_model(demo, 64, precision=c.precision, deterministic=True, **OPTIONS) as llm:
        deadline = n_texts * (64 - OPENING + 1) + 10  # a tick for each token and each text
        evaluator = RuleEvaluator(llm, read_windows(llm, [text], 64, 3), deadline=deadline)
        evaluator.own_text_loss = partial(WHOLE_OWN_TEXT_LOSS, evaluator)
        own = evaluator.own_text_loss(c, 3, 3)
        assert next(ticks) <= deadline + 8
        ticks = itertools.count()
        kept = keep_on_own_text(evaluator, [[c]], own.value + 1e-9 if own else 1.0)
    if n_texts < 2:
        assert own is None and kept == []
    else:
        assert (own.low == own.value) is (n_texts == 2) and kept == [c]


def test_a_search_ends_at_the_deadline():
    """With what was measured by then."""

    def measure(reference, precision):
        if precision.resident == 0.5:
            raise precision_search.OutOfTimeError
        return replace(of_tau(precision.tau, precision.resident, 0.0, 0.5), kl=1e-4)

    routing = SimpleNamespace(weights=np.linspace(0, 1, 100))
    evaluator = SimpleNamespace(
        windows=[Window(tuple(range(64)), 0)] * 8,
        n_prompt=None,
        routing=routing,
        at_once=1,
        seconds=0.0,
        measure=measure,
        divergence=lambda _, tau: tau**2,
    )
    measured = precision_search.search_tau(evaluator, None, BOUND)
    assert [len(candidates) for candidates in measured] == [1, 0]


def test_own_text(demo, text):
    """A rule that leaves out all that is missing writes what the lossless model does
    not follow; one that leaves out nothing loses nothing.
    """
    with open_model(
        demo, 128, precision=Precision(tau=1.0, resident=0.25), deterministic=True, **OPTIONS
    ) as llm:
        windows = read_windows(llm, [text], 128, 4)
        lost = {}
        for name, precision in (
            ("lossless", Precision()),
            ("wild", Precision(tau=1.0, resident=0.25)),
        ):
            for window in windows:
                llm.engine.quality.use(precision)
                text, log_p = write_freely(llm, window.tokens)
                llm.engine.quality.use(Precision())
                lost.setdefault(name, []).append(np.mean(log_p - score(llm, text)))
                assert tuple(text[:OPENING]) == window.tokens[:OPENING]
        own = RuleEvaluator(llm, windows).own_text(
            Candidate("original", 1.0, 0.25, 0.0, 0.0, 0.0, 0.0), 2, 7
        )
    assert own.shape == (128 - OPENING,) and own.mean() > 0.02
    assert abs(np.mean(lost["lossless"])) < 5e-3 and np.mean(lost["wild"]) > 0.02


def test_shares_are_of_what_decoded_tokens_chose(demo, text):
    """With nothing resident and every weight below tau all of that is left out; the
    last layer of a prompt, which nobody wants, is none of it.
    """
    with open_model(
        demo, 128, precision=Precision(tau=1e-9, resident=0.25), deterministic=True, **OPTIONS
    ) as llm:
        evaluator = RuleEvaluator(llm, read_windows(llm, [text], 128, 2))
        with evaluator.reference() as reference:
            assert evaluator.measure(reference, Precision(tau=1.0, resident=1e-9)).skipped == 1.0


# --- running ---


def test_lossless_unless_asked(measured):
    model, _ = measured
    with moeoff.Llama(model, n_ctx=64, **OPTIONS) as llm:
        assert llm.engine.quality.precision.lossless and llm.engine.quality.selected is None
        llm.eval([10, 300, 500])
        assert llm.stats().skipped == 0 and llm.stats().max_loss is None
    # nothing was measured to lose so little
    with moeoff.Llama(model, n_ctx=64, max_loss="0.0001%", **OPTIONS) as llm:
        assert llm.engine.quality.precision.lossless and llm.stats().max_loss == pytest.approx(1e-6)


def test_a_run_says_what_it_leaves_out(tau_alone):
    model, contract = tau_alone
    with moeoff.Llama(model, n_ctx=256, max_loss=BOUND, **OPTIONS | {"expert_memory": SOME}) as llm:
        share = SOME / llm.engine.buffer.arena_full
        assert (
            0.5 < share < 0.75
            and llm.engine.quality.precision == contract.select(BOUND, share).precision
            and llm.engine.quality.precision.tau > 0
        )
        llm("Natalia sold 48 clips", max_tokens=40, temperature=0)
        stats = llm.stats()
    assert stats.skipped > 10 and stats.served_low == 0 and stats.estimated_loss <= BOUND
    assert (
        f"left out below a weight of {stats.tau:.3g}" in stats.precision_summary
        and "bound 5.00%" in stats.precision_summary
    )


def test_refusals(measured, demo, text, tmp_path):
    model, result = measured
    bare = shutil.copy(demo, tmp_path / "bare.gguf")
    with pytest.raises(OptionError, match="needs a measurement of this very model") as refused:
        moeoff.Llama(str(bare), max_loss="1%", **OPTIONS)
    assert f"moeoff calibrate -m {bare} --max-loss 1%" in sentence(refused.value)
    with pytest.raises(OptionError, match="tier Q4_0 needs a sidecar"):
        search_precision(bare, [text], 0.01, tier="Q4_0", **OPTIONS)
    other = tmp_path / "other.gguf"
    requantize_experts(demo, other, type_from_name("Q5_0"))
    convert(other, tiers="Q4_0")
    shutil.copy(result.path, profile_path(other))
    with pytest.raises(ModelError, match="another model"):
        moeoff.Llama(str(other), max_loss="1%", **OPTIONS)
    # the same model, another sidecar
    convert(bare, tiers="Q5_0")
    shutil.copy(result.path, profile_path(bare))
    with pytest.raises(OptionError, match="another sidecar"):
        moeoff.Llama(str(bare), max_loss="1%", **OPTIONS)
    with pytest.raises(OptionError, match="bare.gguf has none now"):
        moeoff.Llama(str(bare), max_loss="1%", experts=False, **OPTIONS)
    contract = result.contract.to_section()
    for version in (1, 2):
        Profile.write(
            profile_path(bare),
            ModelIndex.read(bare),
            {SECTION: contract | {"version": np.array(version)}},
        )
        with pytest.raises(OptionError, match="earlier moeoff"):
            moeoff.Llama(str(bare), max_loss="1%", **OPTIONS)
    with pytest.raises(OptionError, match="give no other"):
        moeoff.Llama(model, max_loss="1%", tier="Q4_0", **OPTIONS)
    with pytest.raises(OptionError, match="at least 8"):
        search_precision(model, [text], 0.01, tokens=600, **OPTIONS)
    # still there
    assert np.array_equal(
        Profile.find(ModelIndex.read(model)).section(SECTION)["tau"],
        result.contract.to_section()["tau"],
    )


def test_the_same_budget_makes_the_same_choice(measured):
    """Whatever else the process holds: what it takes is left out of the choice."""
    model_index = ModelIndex.read(measured[0])
    plan = dry_load(model_index, 64)
    budget = replace(plan, process=memory_plan._PROCESS).fixed + plan.arena_full // 2
    share = plan.default_share(Budget(budget))
    ballast = np.ones(16 << 20, np.uint8)
    assert ballast.all() and dry_load(model_index, 64).default_share(Budget(budget)) == share
    assert 0 < plan.default_share(Budget(budget - (2 << 20))) < share < 1
    assert plan.default_share(Budget(experts=5 << 20)) == pytest.approx((5 << 20) / plan.arena_full)


@own_process
def test_a_moved_budget_keeps_the_bound(tau_alone):
    """A setting that was measured with half of the experts resident is used neither
    with next to none nor where all fit; it comes back with its budget.
    """

    def bounds(process):
        """Return budgets for 0.6 of the experts and for the fewest.

        The process is of this size, or up to a MiB larger: floors are whole MiB.
        """
        whole = replace(plan, process=process)
        memory_plan._PROCESS = process + -(whole.fixed + plan.arena_floor) % MIB
        planned = replace(plan, process=memory_plan._PROCESS)
        return planned.fixed + int(0.6 * plan.arena_full), planned.floor

    def open_with(memory):
        return moeoff.Llama(tau_alone[0], n_ctx=64, max_loss=BOUND, memory=memory, n_threads=1)

    with open_with("1G") as llm:
        plan, process = llm.engine.planned, llm.engine.plan.process
    # libraries may take more than a usual process leaves the demo model's experts
    some, little = bounds(max(process, plan.process) + (8 << 20))
    with open_with(some) as llm:
        first, moved = llm.engine.quality.precision.tau, []
        for memory in (1 << 30, some, little, some):
            llm.set_memory(memory)
            moved.append(llm.engine.quality.precision.tau)
            llm.eval([10, 300, 500])
    assert first > 0 and moved == [0, first, 0, first]
    # a smaller process than was planned would have room for all experts
    memory_plan._LIBRARIES = 0
    with open_with("1G") as llm:
        process = llm.engine.plan.process
    some, little = bounds(process + (5 << 20))
    with open_with(little) as llm:
        assert llm.engine.driver.prefetcher.precision.tau == 0
        llm.set_memory(some)
        assert llm.engine.driver.prefetcher.precision.tau == first
