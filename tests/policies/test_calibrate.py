"""moeoff calibrate on the demo model: what it writes, what it keeps, what it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import moeoff
from helpers.files import CALIBRATION_TEXTS, COMMAND
from helpers.gate_events import random_recording
from helpers.terminal import start_with_bars
from moeoff.budget.loss_contract import LossContract
from moeoff.cli.calibrate import calibrate as command
from moeoff.errors import ModelError, OptionError
from moeoff.experts.profile import Profile, profile_path
from moeoff.gguf.model_index import ModelIndex
from moeoff.measure import profile_fit as module
from moeoff.measure.precision_search import SearchResult
from moeoff.measure.profile_fit import calibrate, cap_hidden, fit
from moeoff.policies import (
    POLICIES,
    PREDICTORS,
    FitOptions,
    Policy,
    Predictor,
    get_policy,
    get_predictor,
)
from moeoff.policies.base import Section
from moeoff.policies.fate import CrossLayerGate
from moeoff.policies.strategy import profile_sections
from moeoff.routing.router import SOFTMAX, Router

TOKENS = 5200  # of whose last tenth 512 and more are there to compare on


def test_profile(calibrated):
    model, result, _ = calibrated
    profile = Profile.find(ModelIndex.read(model))
    assert profile.path == result.path == profile_path(model)
    expected = {
        section.name for predictor in PREDICTORS.values() for section in predictor.sections[:1]
    }
    assert set(result.sections) >= expected | {"popularity", "score", "thresholds"}
    assert set(profile.sections) == set(result.sections) | {"precision"}
    assert np.array_equal(profile.section("precision")["bits"], np.arange(3))
    assert (
        profile.info.items()
        >= {
            "tokens": result.n_tokens,
            "texts": ["prose.txt", "code.txt"],
        }.items()
    )
    assert abs(result.n_tokens - 1024) < 300
    counts = profile.section("popularity")["counts"]
    assert counts.shape == (12, 32) and (counts.sum(axis=1) == 4 * result.n_tokens).all()
    assert result.recall > 0.6 and 2 <= result.shallow <= 4


def test_what_does_not_help_is_left_out():
    """A policy's fit is written where it reads less on text that it has not seen, and
    nowhere else.
    """

    class MyPolicy(Policy):
        def fit(recording, options, progress):
            order = np.tile(np.arange(recording.router.n_experts), (recording.model.n_gates, 1))
            return {"order": order if MyPolicy.good else 0 * order}

        name, defaults, compared, good, sections = (
            "mine",
            {"order": None},
            True,
            True,
            (Section("mine", fit),),
        )

        def start(self):
            if self.options["order"] is not None:
                self.priorities[:] = self.options["order"]

    recording, warnings = random_recording(TOKENS, n_experts=16), []
    # in turn, of which LRU has none when it comes back
    recording.ids[:] = (2 * np.arange(TOKENS)[:, None, None] + np.arange(2)) % 16
    try:
        moeoff.register(MyPolicy)
        assert (
            "mine" in fit(recording, FitOptions(), only=["mine"], warn=warnings.append)
            and not warnings
        )
        MyPolicy.good = False
        assert fit(recording, FitOptions(), only=["mine"], warn=warnings.append) == {}
        assert warnings == [
            "mine: on text that it was not fitted to it keeps no more than the defaults, and is"
            " left out"
        ]
    finally:
        POLICIES.pop("mine", None)


def test_what_foresees_no_more_is_left_out():
    """A predictor's fit, too. The text's end is of another kind: what followed what in
    its beginning does not there, and the predictor learns more of it while it runs.
    """
    recording, warnings, names = random_recording(TOKENS, n_experts=16), [], ["first", "path"]
    steps = np.arange(TOKENS)[:, None] * 4 + np.arange(4)  # gate after gate
    recording.tokens[:] = np.arange(TOKENS) % 16
    follows = (3 * steps % 16)[..., None] + 8 * np.arange(2)
    recording.ids[:] = follows % 16
    sections = fit(recording, FitOptions(), only=names, warn=warnings.append)
    assert set(sections) >= {"path"} and not [line for line in warnings if line.startswith("path")]
    end = TOKENS * 9 // 10
    recording.ids[end:] = (5 * steps[end:] % 16)[..., None] + np.arange(2)
    recording.ids %= 16
    warnings.clear()
    assert fit(recording, FitOptions(), only=names, warn=warnings.append) == {}
    assert warnings == [
        f"{name}: on text that it was not fitted to no more is predicted with it, and it is"
        " left out"
        for name in ("path", "first")
    ]
    assert set(fit(recording, FitOptions(), only=names, compare=False)) == set(names)


class TestFitsOfUsers:
    """A registered predictor's fit is called like moeoff's own, or refused."""

    @pytest.fixture(autouse=True)
    def forget(self):
        yield
        PREDICTORS.pop("mine", None)

    class MyPredictor(Predictor):
        def fit(recording, options, progress):
            progress(1, 1)
            return {"seed": np.array([options.seed]), "used": recording.used().sum(axis=0)}

        name, sections = "mine", (Section("mine", fit),)

    def test_is_fitted(self):
        moeoff.register(self.MyPredictor)
        recording, stages = random_recording(), []
        sections = fit(
            recording,
            FitOptions(7, 16),
            lambda stage, n, total: stages.append((stage, n, total)),
            only=["gate", "mine"],
        )
        assert set(sections) == {"gate", "mine"} < set(profile_sections())
        assert sections["mine"]["seed"] == [7] and any(
            re.fullmatch(r"fitting mine \(\d+ of \d+\)", stage) for stage, *_ in stages
        )
        mine = get_predictor("mine")(recording.router, sections["mine"])
        assert np.array_equal(mine.arrays["used"], recording.popularity())

    @pytest.mark.parametrize("section", ["path", "score", "popularity"])
    def test_needs_a_section_of_its_own(self, section, demo):
        moeoff.register(
            type(
                "Other",
                (self.MyPredictor,),
                {"sections": (replace(self.MyPredictor.sections[0], name=section),)},
            )
        )
        with pytest.raises(OptionError, match=f"^mine: .*'{section}'"):
            calibrate(
                demo, text=CALIBRATION_TEXTS, progress=lambda *_: pytest.fail("the work has begun")
            )

    def test_may_share_the_fit_of_its_base(self):
        moeoff.register(type("Other", (CrossLayerGate,), {"name": "mine"}))
        assert profile_sections()["gate"] is CrossLayerGate.sections[0]

    def test_get_what_was_read_in_time(self, demo, tmp_path, monkeypatch):
        """8 sequences take time of the fits; fewer are kept for the next attempt."""
        model, fitted, ends = shutil.copy(demo, tmp_path / "model.gguf"), [], []

        class Noted(Predictor):
            def fit(recording, options, progress):
                fitted.append(recording)
                ends.append(options.until)
                return {"counts": recording.popularity()}

            name, sections = "mine", (Section("mine", fit),)

        moeoff.register(Noted)
        how = {"text": CALIBRATION_TEXTS, "tokens": 12 * 256, "only": {"mine"}}
        for reading, n_sequences in ((module._READING, 12), (0, 8)):
            monkeypatch.setattr(module, "_READING", reading)
            before = time.monotonic()
            assert calibrate(model, minutes=60, **how).n_tokens <= 256 * n_sequences
            assert before <= ends[-1] - 60 * 60 <= time.monotonic()
        words = r"read [0-7] of at least 8 sequences in 0\.001 minutes: give more, or the same"
        with pytest.raises(OptionError, match=words + " command again"):
            calibrate(model, minutes=1e-3, **how)
        whole, part = fitted
        assert part.n_tokens < whole.n_tokens and part.starts.sum() == 8
        for name in ("tokens", "starts", "ids", "weights", "inputs", "probs", "input_tokens"):
            n = len(getattr(part, name))
            assert np.array_equal(getattr(part, name), getattr(whole, name)[:n]), name


def test_a_users_policy_takes_its_sections(calibrated):
    model, _, _ = calibrated

    class Popularity(Policy):
        name, defaults, sections = "popular", {"counts": None}, get_policy("edgemoe").sections

        def start(self):
            if self.options["counts"] is not None:
                self.priorities[:] = self.options["counts"]

    counts = Profile.find(ModelIndex.read(model)).section("popularity")["counts"]
    try:
        moeoff.register(Popularity)
        for profile, expected in (("auto", counts), (False, np.zeros_like(counts))):
            with moeoff.Llama(
                model,
                expert_memory="4M",
                strategy="popular",
                profile=profile,
                n_ctx=64,
                n_threads=2,
            ) as llm:
                assert np.array_equal(llm.engine.buffer.priorities, expected)
                assert (
                    profile is False
                    or "popularity" in llm.engine.profile.sections
                    and "score" not in llm.engine.profile.sections
                )
    finally:
        POLICIES.pop("popular", None)


def test_hidden_units_cost_their_share(demo):
    model_index = ModelIndex.read(demo)
    router = Router.read(model_index, list(range(12)), SOFTMAX)
    # of a model this small even the least is more than the share
    assert cap_hidden(model_index, router) == 2 * 32
    big = replace(
        model_index,
        experts={
            n: replace(s, shape=(s.shape[0] * 100, *s.shape[1:]))
            for n, s in model_index.experts.items()
        },
    )
    units = cap_hidden(big, router)
    active = 100 * sum(np.prod(s.shape) for s in model_index.experts.values()) * 4 / 32
    assert units == 256 and units * 11 * (128 + 32) <= module.HIDDEN_SHARE * active * 1.1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"text": ["/nowhere.txt"]}, "/nowhere.txt: cannot be read: No such file or directory"),
        ({"tokens": 100}, "100 tokens are too few"),
        ({"text": ["empty.txt"]}, "expected text, got none to calibrate on"),
        ({"text": ["short.txt"]}, "too few to calibrate on: give more"),
    ],
)
def test_refuses(demo, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    model = shutil.copy(demo, tmp_path / "model.gguf")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("three words only")
    with pytest.raises(OptionError, match=message):
        calibrate(model, **{"text": CALIBRATION_TEXTS, "tokens": 1024} | change)
    assert not os.path.exists(profile_path(model))


def test_the_fits_learn_from_as_many_tokens_as_there_is_room_for():
    recording, names = (
        random_recording(40_000, n_gates=8, n_experts=32, n_embd=64),
        ("popularity", "first", "gate", "path", "pairs"),
    )
    room = module._FIXED + (8 << 20)
    tracemalloc.start()
    try:
        sections = fit(recording, FitOptions(room=room), only=names)
        assert tracemalloc.get_traced_memory()[1] < room
    finally:
        tracemalloc.stop()
    assert set(sections) == {"popularity", "first", "gate", "path", "pairs"}
    assert 256 < sections["popularity"]["n_tokens"][0] < 10_000
    assert fit(recording, FitOptions(), only=("popularity",))["popularity"]["n_tokens"][0] == 40_000
    assert (
        fit(recording, FitOptions(room=1 << 20), only=("popularity",))["popularity"]["n_tokens"][0]
        == 256
    )
    part, whole = recording.part(0, 100), recording.take(np.arange(40_000) < 100)
    assert all(
        np.array_equal(getattr(part, name), getattr(whole, name))
        for name in ("tokens", "starts", "ids", "weights", "inputs", "probs", "input_tokens")
    )
    assert get_predictor("learned").fit(recording, FitOptions(hidden=1 << 16, room=room)) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_little_text_warns_of_nothing(demo, tmp_path):
    """Some experts are never chosen, and a layer's inputs may all be the same."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    result = calibrate(
        model,
        text=CALIBRATION_TEXTS[:1],
        tokens=512,
        n_threads=1,
        hidden=16,
        only=set(profile_sections()) - {"score", "hobbit"},
    )
    assert "learned" in result.sections and result.recall > 0.3


def test_another_models_profile_is_in_the_way(demo, tmp_path):
    """Said before the work, and left alone."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    Path(profile_path(model)).write_bytes(b"something else")
    with pytest.raises(ModelError, match="is no profile: name another file, or move it away"):
        calibrate(
            model,
            text=CALIBRATION_TEXTS,
            tokens=1 << 20,
            progress=lambda *_: pytest.fail("the work has begun"),
        )
    assert Path(profile_path(model)).read_bytes() == b"something else"


@pytest.fixture
def called(calibrated, monkeypatch) -> list[tuple[str, dict]]:
    """Return the library functions that the command calls, in order, with options."""
    _, result, _ = calibrated
    calls, nothing = [], LossContract(0, 0, 8, 8, 256, ())
    for name, returned in (
        ("profile_fit.calibrate", result),
        ("precision_search.search_precision", SearchResult(result.path, nothing, 0.01, ())),
    ):

        def noted(*args, name=name, returned=returned, **options):
            calls.append((name.partition(".")[2], options | {"args": args}))
            return returned

        monkeypatch.setattr(f"moeoff.measure.{name}", noted)
    return calls


def test_command(calibrated, called):
    """Options reach the library function, and its result is shown."""
    model, result, _ = calibrated
    shown = CliRunner().invoke(
        command,
        ["-m", model, "--text", "a.txt", "--text", "b.txt", "--tokens", "1024", "--seed", "7"],
    )
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(f"{result.path}: {', '.join(result.sections)}; ")
    assert "are predicted to" in shown.stderr
    ((_, options),) = called
    typed = {"model": model, "text": ("a.txt", "b.txt"), "tokens": 1024, "seed": 7, "minutes": 60}
    assert options.items() >= typed.items()
    twice = CliRunner().invoke(command, [model, "-m", model])
    assert twice.exit_code == 1 and "give MODEL or -m, not both" in twice.stderr


def test_command_says_what_is_wrong_with_a_text(demo, invoke):
    refused = invoke("calibrate", demo, "--text", "/nowhere.txt")
    assert (
        refused.returncode == 1
        and refused.stderr == "Error: /nowhere.txt: cannot be read: No such file or directory\n"
    )


@pytest.mark.parametrize("minutes, total", [(["--minutes", "10"], 10), ([], 60)])
@pytest.mark.parametrize("loss", [["--max-loss", "1%"], []])
def test_command_fits_and_searches_in_the_same_minutes(calibrated, called, loss, minutes, total):
    model, _, _ = calibrated
    typed = ["-m", model, "--tokens", "1024", "--seed", "7", "--memory", "1G", *loss, *minutes]
    shown = CliRunner().invoke(command, typed)
    assert shown.exit_code == 0, shown.output
    name, fit = called.pop(0)
    assert name == "calibrate" and fit["renew"] is (not loss) and fit["seed"] == 7
    assert fit["minutes"] == (total / 2 if loss else total)
    if loss:
        assert "leaves the model lossless" in shown.stdout
        name, search = called.pop(0)
        assert name == "search_precision" and search["args"][2] == 0.01 and "seed" not in search
        assert search["tokens"] == 1024 and search["memory"] == 1 << 30
        assert total - 1 < search["minutes"] < total
    assert not called


@pytest.mark.parametrize(
    "typed",
    [
        ["--max-loss", "one"],
        ["--max-loss", "1%", "--tier", "Q4_0"],
        ["--max-loss", "1%", "--experts", "/none"],
    ],
)
def test_what_is_wrong_with_a_search_is_said_before_the_fit(calibrated, called, typed):
    model, _, _ = calibrated
    assert CliRunner().invoke(command, ["-m", model, *typed]).exit_code == 1 and not called


def test_a_model_is_not_fitted_twice(demo, tmp_path):
    """Unless that is asked for, or something else would be learned."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    how = {"text": CALIBRATION_TEXTS[:1], "tokens": 512, "only": {"popularity"}, "n_threads": 1}
    first = calibrate(model, renew=False, **how)
    assert first.sections == ("popularity",)
    again = calibrate(model, renew=False, **how)
    assert (again.sections, again.n_tokens, again.path) == ((), first.n_tokens, first.path)
    assert (
        calibrate(model, **how).sections
        and calibrate(model, renew=False, **how | {"tokens": 768}).sections
    )


def test_goes_on_where_it_was_interrupted(demo, tmp_path, monkeypatch):
    """A part that was damaged meanwhile is made again. The profile is that of one go.
    Without a text the default ones are read.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole, parts = (shutil.copy(demo, tmp_path / f"{name}.gguf") for name in ("whole", "parts"))
    how = {"tokens": 1024, "hidden": 16, "n_threads": 2, "only": {"popularity", "first", "gate"}}

    def interrupt(stage: str, n: int, total: int) -> None:
        if stage == "reading text" and n >= 0.8 * total:
            raise KeyboardInterrupt

    warned = []
    expected = calibrate(whole, **how)
    assert not any((tmp_path / "cache" / "moeoff" / "calibrate").iterdir())
    with pytest.raises(KeyboardInterrupt):
        calibrate(parts, progress=interrupt, **how)
    assert not os.path.exists(profile_path(parts))
    (folder,) = (tmp_path / "cache" / "moeoff" / "calibrate").iterdir()
    part = folder / "sequence-1.npz"
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    part.write_bytes(damaged)
    result = calibrate(parts, warn=warned.append, **how)
    assert len(warned) == 1 and "sequence-1.npz: damaged" in warned[0]
    assert result.n_tokens == expected.n_tokens and not folder.exists()
    profiles = [Profile.find(ModelIndex.read(model)) for model in (whole, parts)]
    assert profiles[0].sections == profiles[1].sections == ["first", "gate", "popularity"]
    for info in (profile.info for profile in profiles):
        assert (
            info.items()
            >= {
                "tokens": result.n_tokens,
                "texts": ["calibration.txt", "python-help.txt"],
            }.items()
        )
    for section in profiles[0].sections:
        a, b = (profile.section(section) for profile in profiles)
        assert all(np.array_equal(a[name], b[name]) for name in a), section


def test_ctrl_c_leaves_no_profile(demo, tmp_path):
    model = shutil.copy(demo, tmp_path / "model.gguf")
    big = tmp_path / "text.txt"
    big.write_text(Path(CALIBRATION_TEXTS[1]).read_text() * 40)
    command = [COMMAND, "calibrate", "-m", model, "--text", str(big), "--tokens", "200000"]
    process, shown = start_with_bars(
        command,
        stdout=subprocess.PIPE,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    shown.expect("reading text")
    process.send_signal(signal.SIGINT)
    text = shown.read()
    assert (
        "Traceback" not in text
        and "the same command goes on from here" in text
        and process.wait(300) == 130
    )
    assert sorted(os.listdir(tmp_path)) == ["cache", "model.gguf", "text.txt"]
