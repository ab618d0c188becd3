"""`moeoff tune`: a real tuning of the demo model, one that is interrupted everywhere, and choices that follow from what was measured."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import moeoff
from helpers.files import DEMO, PROSE
from moeoff.bench.job import Job, Measurement, Sample
from moeoff.companion.settings import Settings, settings_path
from moeoff.engine import llama_options
from moeoff.engine.config import Config
from moeoff.errors import MoeoffError, OptionError
from moeoff.gguf.layout import Layout
from moeoff.tune import Request, look, tune
from moeoff.tune.journal import Journal
from moeoff.tune.plan import Rates, steps, work
from moeoff.tune.trials import Candidate, Trials
from moeoff.tune.writer import SHAPES, ParallelLlama, Writer, sequences_within

MEMORY = 2 << 30  # of the process that runs the tests
RATES = Rates(1.0, 100.0, 10.0, 50.0, 0.4, {"4": 1e9}, 50.0, 0.4)


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(shutil.copy(DEMO, tmp_path / "model.gguf"))


def machine(faster: dict[str, float], runs: list[Job] | None = None):
    """A machine on which options make runs so many times as fast: a stand-in for the trials' processes alone."""

    def run(job: Job) -> Measurement:
        if runs is not None:
            runs.append(job)
        factor = 1.0
        for name, value in job.options.items():
            factor *= faster.get(f"{name}={value}", 1.0)
        done = Measurement(job, {"resident_share": 0.5}, {"peak_rss_bytes": 100 << 20})
        done.samples = [
            Sample(i, t.n_tokens, t.n_tokens / (100 * factor), bytes_read=10**6, stall_seconds=0.3 * t.n_tokens / 100) for i, t in enumerate(job.tests)
        ]
        return done

    return run


@pytest.mark.slow
def test_tuning_and_what_uses_it(moeoff_command, grown, tmp_path):
    """As a user does it: one command, then a chat's first line names what was found."""
    model = str(shutil.copy(grown, tmp_path / "model.gguf"))
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = moeoff_command("tune", model, "--memory", "130M", "--minutes", "0.5", "--json", env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["path"] == settings_path(model) and os.path.exists(model.replace(".gguf", ".profile.npz"))
    assert "in all" in done.stderr and "check: done" in done.stderr
    tuning = found["tuning"]
    assert tuning["memory"] == 130 << 20 and tuning["measured"]["defaults"]["gen_tps"] > 0
    assert set(tuning["choices"]) >= {"strategy", "n_lanes"} or tuning["measured"]["ratio"] < 1
    assert not os.listdir(tmp_path / "cache" / "moeoff" / "tune")
    run = moeoff_command("run", "-m", model, "-p", "2 + 3 =", "-n", "2", "--memory", "130M", env=env)
    assert run.returncode == 0 and f"tuned {tuning['date']} for 130 MiB" in run.stderr


@pytest.mark.parametrize("calls", [2, 12, 40])
def test_interrupted_and_resumed(model, calls):
    request = Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False)
    run = machine({"strategy=score": 1.2, "n_lanes=8": 1.1})
    expected = tune(request, run=run)
    os.unlink(expected.path)
    os.unlink(model.replace(".gguf", ".profile.npz"))
    left = calls

    def interrupt(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    interrupted = 0
    for _ in range(50):
        left = calls
        try:
            found = tune(request, run=run, progress=interrupt)
            break
        except KeyboardInterrupt:
            interrupted += 1
            assert not os.path.exists(expected.path)  # nothing half-written
            calls = 2 * calls  # a step that is longer than this would begin again for ever
    assert interrupted
    assert found.path == expected.path and found.tuning.choices == expected.tuning.choices
    assert {k: v for k, v in found.tuning.measured.items() if k != "disk_bytes_per_second"} == {
        k: v for k, v in expected.tuning.measured.items() if k != "disk_bytes_per_second"
    }


def test_what_is_faster_is_chosen_and_why(model):
    found = tune(Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False), run=machine({"strategy=score": 1.3, "n_lanes=8": 1.01}))
    choices = found.tuning.choices
    assert choices["strategy"].value == "score" and choices["strategy"].reason == "30% faster than auto"
    assert choices["n_lanes"].value == 4 and "8 +1%" in choices["n_lanes"].reason  # not plainly
    assert found.tuning.measured["ratio"] == pytest.approx(1.3)
    assert Settings.find(Layout.read(model)).tunings == (found.tuning,)


def test_with_experts_on_a_gpu(model, moeoff_command, monkeypatch):
    """Every run has them there, and what is found is for runs that have."""
    monkeypatch.setattr(llama_options, "supports_gpu", lambda: True)
    runs: list[Job] = []
    request = Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False, n_gpu_layers=99, vram="80%")
    found = tune(request, run=machine({"strategy=score": 1.3}, runs))
    assert runs and all((r.options["n_gpu_layers"], r.options["vram"], r.options["vram_mode"]) == (99, "80%", "auto") for r in runs)
    assert found.tuning.devices == "-ngl 99 --vram 80%" == Config.make(model, n_gpu_layers=99, vram="80%").devices
    assert found.tuning.choices["strategy"].value == "score"
    with moeoff.Llama(model, memory=MEMORY, n_ctx=256) as llm:
        assert llm.strategy.name == "auto" and "tuned with -ngl 99 --vram 80%, not without a GPU" in llm.settings_summary
    with pytest.raises(OptionError, match="vram has no effect while no layer goes to the GPU"):
        tune(Request(model, memory=MEMORY, vram="80%"), run=machine({}))


def test_never_slower_than_the_defaults(model):
    """The profile makes everything slower here: whatever the trials found among themselves, the defaults stay."""
    profile = model.replace(".gguf", ".profile.npz")
    slow = {f"profile={profile}": 0.5}
    found = tune(Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False), run=machine(slow))
    assert found.tuning.choices["profile"].value is False
    with moeoff.Llama(model, memory=MEMORY, n_ctx=256) as llm:
        assert llm.profile is None


def test_what_wins_the_trials_and_not_the_last_check_is_not_kept(model):
    """`score` is faster as long as strategies are tried, and slower from then on: a neighbour, say, has gone."""
    runs: list[Job] = []
    fast, slow = machine({"strategy=score": 1.3}), machine({"strategy=score": 0.9})

    def run(job: Job) -> Measurement:
        runs.append(job)
        checking = job.options.get("profile") is False and "strategy" not in job.options and len(runs) > 2
        run.slow = getattr(run, "slow", False) or checking
        return (slow if run.slow else fast)(job)

    found = tune(Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False), run=run)
    assert found.outcomes["strategy"][1].better and found.tuning.measured["ratio"] < 1
    assert "strategy" not in found.tuning.choices and any("the defaults are kept" in note for note in found.notes)


def test_a_base_that_does_not_run_is_an_error_and_a_candidate_is_not(tmp_path):
    def run(job: Job) -> Measurement:
        return Measurement(job, error="no luck") if job.options.get("strategy") == "lru" else machine({})(job)

    good, bad = Candidate("auto", {"strategy": "auto"}), Candidate("lru", {"strategy": "lru"})
    _, failed = Trials(run, Journal(tmp_path / "j", {}), "m", {}, 8, 8).compare("x", [good, bad], 2)
    assert failed.error == "no luck" and failed.ratio == 0 and not failed.better
    journal = Journal(tmp_path / "k", {})
    with pytest.raises(MoeoffError, match="no luck"):
        Trials(run, journal, "m", {}, 8, 8).compare("x", [bad, good], 2)
    assert not journal.has("x/lru/0")  # the next start tries it again


def test_dry_run_leaves_nothing(model, tmp_path):
    told = []
    found = tune(Request(model, memory=MEMORY, minutes=0.5), dry_run=True, run=machine({}), announce=lambda todo, resumed: told.append((todo, resumed)))
    assert found.path == "" and found.tuning is None and told == [(found.steps, False)]
    assert [step.name for step in found.steps][:2] == ["text", "profile"] and sum(step.seconds for step in found.steps) > 0
    assert sorted(os.listdir(tmp_path)) == ["cache", "model.gguf"]


def test_everything_fits(model):
    """Nothing to choose between: no strategy evicts anything."""
    runs: list[Job] = []

    def resident(job: Job) -> Measurement:
        done = machine({}, runs)(job)
        done.opened["resident_share"] = 1.0
        return done

    found = tune(Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5, companion=False), run=resident)
    assert len(runs) == 2 and found.tuning.choices == {}


def test_lower_precision_within_a_bound(model):
    request = Request(model, memory=MEMORY, text=(str(PROSE),), minutes=5, max_loss=0.05)
    found = tune(request, run=machine({"type_k=q8_0": 1.2, "max_loss=0.05": 1.1}))
    assert os.path.exists(model.replace(".gguf", ".experts.gguf"))
    assert found.tuning.choices["type_k"].value == "q8_0" and "at most" in found.tuning.choices["type_k"].reason
    left = found.outcomes["precision"][1].candidate.options["max_loss"]
    assert left <= 0.05  # what the KV cache loses is not lost twice


def test_no_room_beside_the_model(model, monkeypatch):
    folder, access = os.path.dirname(model), os.access
    monkeypatch.setattr(look.os, "access", lambda path, mode: os.fspath(path) != folder and access(path, mode))
    found = tune(Request(model, memory=MEMORY, text=(str(PROSE),), minutes=0.5), run=machine({"profile=False": 0.7}))
    assert sorted(os.listdir(os.path.dirname(model))) == ["cache", "model.gguf"]
    assert any("nothing can be written beside the model: the settings are in" in note for note in found.notes)
    assert any(note.startswith("no companion in lower precision") for note in found.notes)
    with moeoff.Llama(model, memory=MEMORY, n_ctx=256) as llm:
        assert llm.settings_summary.startswith("tuned") and llm.profile is not None


def test_first_run_fails(model):
    def broken(job: Job) -> Measurement:
        return Measurement(job, error="out of luck")

    with pytest.raises(MoeoffError, match="out of luck"):
        tune(Request(model, memory=MEMORY, text=(str(PROSE),)), run=broken)
    with pytest.raises(OptionError, match="no such text file"):
        tune(Request(model, text=("missing.txt",)))


def test_a_dense_model_is_refused(moeoff_command, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    done = moeoff_command("tune", str(tmp_path / "bad.gguf"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_less_time_is_less_work():
    sizes = {"calibrates": True, "writes": True, "convert_seconds": 60.0, "n_low_tiers": 1, "n_gates": 12, "n_experts": 32, "n_ctx": 4096,
             "strategies": ("score", "lru")}  # fmt: skip
    totals = []
    for minutes in (2, 8, 40):
        planned = work(RATES, minutes, **sizes)
        totals.append(sum(step.seconds for step in steps(planned, RATES, 12, 32)))
        assert planned.n_tokens >= 2048 and planned.strategies
    assert totals[0] < totals[1] < totals[2] <= 40 * 60
    assert work(RATES, 2, **sizes).n_low_tiers == 0 and work(RATES, 40, **sizes).n_low_tiers == 1


def test_a_candidate_must_win_every_round(tmp_path):
    speeds = iter([100, 130, 100, 90])  # the second round runs backwards

    def run(job: Job) -> Measurement:
        tps = next(speeds)
        done = Measurement(job, {}, {"peak_rss_bytes": 1})
        done.samples = [Sample(i, t.n_tokens, t.n_tokens / tps) for i, t in enumerate(job.tests)]
        return done

    first, second = Trials(run, Journal(tmp_path / "j", {}), "m", {}, 8, 8).compare("x", [Candidate("a", {}), Candidate("b", {})], 2)
    assert second.ratios == pytest.approx((1.3, 100 / 90)) and second.better and not first.better
    speeds = iter([100, 130, 100, 110])
    second = Trials(run, Journal(tmp_path / "k", {}), "m", {}, 8, 8).compare("x", [Candidate("a", {}), Candidate("b", {})], 2)[1]
    assert second.ratios == pytest.approx((1.3, 100 / 110)) and not second.better


def test_no_two_rounds_are_on_the_same_text(tmp_path):
    runs: list[Job] = []
    trials = Trials(machine({}, runs), Journal(tmp_path, {}), "model", {}, 64, 64)
    candidates = [Candidate("a", {}), Candidate("b", {"n_lanes": 2})]
    trials.compare("speed", candidates, 2)
    trials.compare("check", candidates, 3, first_piece=2)
    skipped = [job.skip for job in runs]
    assert skipped[::2] == skipped[1::2] and len(set(skipped)) == 5  # both candidates on the same one, each round on its own


def test_journal(tmp_path):
    journal = Journal(tmp_path / "j", {"model": 1})
    assert journal.once("a", lambda: [1, 2]) == [1, 2] and not Journal(tmp_path / "k", {}).resumed
    again = Journal(tmp_path / "j", {"model": 1})
    assert again.resumed and again.once("a", lambda: pytest.fail("measured twice")) == [1, 2]
    assert not Journal(tmp_path / "j", {"model": 2}).resumed
    (tmp_path / "j" / "journal.json").write_text("{")
    assert not Journal(tmp_path / "j", {"model": 1}).resumed


def test_written_text(demo):
    texts = []
    for seed in (0, 1, 0):
        with Writer(demo, memory=MEMORY, settings=False, profile=False, seed=seed) as writer:
            writer.write(1000)
            assert 1000 <= writer.n_written < 1000 + SHAPES[0][0] and writer.rate > 0
            texts.append(writer.text)
    assert texts[0] == texts[2] != texts[1] and len(texts[0].split()) > 200


def test_sequences_side_by_side_are_the_same_as_alone(demo):
    """What a sequence computes does not depend on its neighbours, but for rounding in batches."""
    tokens = [5, 9, 23, 7]
    with moeoff.Llama(demo, memory=MEMORY, n_ctx=64) as llm:
        for i, token in enumerate(tokens):
            llm.decode_batch([token], i, i)
        alone = llm.batch_logits(1)[0].copy()
    with ParallelLlama(demo, 4, memory=MEMORY, n_ctx=4 * 64, settings=False) as llm:
        for i, token in enumerate(tokens):
            llm.decode_sequences([token, 40 + i], [i, i], [3, 0], [True, True])
        assert np.abs(llm.batch_logits(2)[0] - alone).max() < 0.05 * np.abs(alone).max()


def test_many_sequences_where_there_is_memory_for_them(demo):
    assert sequences_within(demo, 8 << 30) == SHAPES[0] and sequences_within(demo, 1 << 20) == SHAPES[-1]
