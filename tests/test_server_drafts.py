"""Drafts by a model, and by the model's own next-token layers, with experts on disk: `moeoff.Server` writes what it writes without them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import httpx
import numpy as np
import pytest

from helpers.damage import flip_bit
from helpers.served import SCRIPT, Served
from helpers.stock_server import stock_server
from moeoff.budget.footprint import Footprint
from moeoff.cache.score import NAMES
from moeoff.companion.convert import convert
from moeoff.companion.file import Companion
from moeoff.companion.profile import Profile, profile_path
from moeoff.engine.config import Config
from moeoff.gguf.layout import Layout
from moeoff.simulate import Trace

OPTIONS = {"n_ctx": 256, "parallel": 1, "n_threads": 2, "expert_memory": 8 << 20}
PROMPTS = ["one two three", "The heron stood in the", "4 + 4 ="]


def complete(url: str, prompt: str) -> dict:
    body = {"prompt": prompt, "n_predict": 64, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return httpx.post(f"{url}/completion", json=body, timeout=60).raise_for_status().json()


def texts(url: str) -> tuple[list[str], int, int]:
    """Of all prompts; how many tokens were drafted, and of these accepted."""
    answers = [complete(url, prompt) for prompt in PROMPTS]
    drafted, accepted = (sum(answer["timings"].get(name, 0) for answer in answers) for name in ("draft_n", "draft_n_accepted"))
    return [answer["content"] for answer in answers], drafted, accepted


def test_the_models_own_layers(nextn, tmp_path):
    """Their experts are read like all others, and a trace has their gate."""
    trace = tmp_path / "t"
    with Served(nextn, **OPTIONS) as it:
        expected, drafted, _ = texts(it.url)
        assert drafted == 0
    with Served(nextn, spec_type="draft-mtp", strategy="score", trace=str(trace), **OPTIONS) as it:
        found, drafted, accepted = texts(it.url)
        it.process.terminate()
        assert it.process.wait(20) == 0
    assert found == expected and 0 < accepted < drafted
    recorded = Trace.read(trace)
    n_layers = Layout.read(nextn).n_layer - 1  # the first is dense
    assert recorded.model.n_gates == n_layers and {event.gate for event in recorded.events} == set(range(n_layers))
    assert any(event.decode and len(event.ids) > 1 for event in recorded.events)  # a draft that is checked is decoded, not read


def test_a_profile_of_the_model_without_these_layers(nextn, tmp_path):
    """As calibration measures it: what it says of gates has none for theirs, and is left out."""
    model = shutil.copy(nextn, tmp_path / "nextn.gguf")
    layout = Layout.read(model)
    weights = {name: np.zeros((1, layout.n_layer - 2, layout.n_expert), np.float32) for name in NAMES}
    Profile.write(profile_path(model), layout, {"score": weights})
    with Served(str(model), spec_type="draft-mtp", strategy="score", **OPTIONS) as it:
        assert texts(it.url)[1] > 0


@pytest.mark.slow  # links llama-server
def test_they_say_what_stock_says(nextn, demo):
    for model, arguments, options in ((nextn, ["--spec-type", "draft-mtp"], {"spec_type": "draft-mtp"}),
                                      (demo, ["-md", demo, "--spec-type", "draft-simple"], {"draft": demo})):  # fmt: skip
        with stock_server(model, "-c", "256", *arguments) as url:
            expected, drafted, accepted = texts(url)
            assert drafted > 0 < accepted
        with Served(model, **OPTIONS | options) as it:
            assert texts(it.url)[0] == expected


def test_several_at_a_time(nextn):
    """Each with drafts of its own; in a batch with others kernels round differently, so the texts are not compared."""
    with Served(nextn, spec_type="draft-mtp", **OPTIONS | {"parallel": 4, "n_ctx": 1024}) as it:
        body = {"prompt": PROMPTS * 4, "n_predict": 64, "temperature": 0, "ignore_eos": True}
        answers = httpx.post(f"{it.url}/completion", json=body, timeout=60).raise_for_status().json()
    assert len(answers) == 12 and all(answer["tokens_predicted"] == 64 for answer in answers)
    assert sum(answer["timings"].get("draft_n", 0) for answer in answers) > 0


def test_a_draft_model(demo, tmp_path):
    """The model itself, which guesses right, and one whose vocabulary is another's."""
    with Served(demo, **OPTIONS) as it:
        expected = texts(it.url)[0]
    with Served(demo, draft=demo, **OPTIONS) as it:
        found, drafted, accepted = texts(it.url)
        assert "moeoff_drafts_on" in httpx.get(f"{it.url}/metrics").text
    assert found == expected and 0.5 * drafted < accepted <= drafted


def test_a_read_error_in_the_models_own_layers(nextn, tmp_path):
    """Ends an answer with the file; once the file is whole again, the next one is right."""
    model = shutil.copy(nextn, tmp_path / "nextn.gguf")
    companion = str(convert(model, tiers="Q4_0", output=tmp_path / "nextn.experts.gguf").path)
    layer = Layout.read(model).n_layer - 1
    places = [part.offset for (name, _, _), part in Companion(companion).slices.items() if name.startswith(f"blk.{layer}.")]
    options = OPTIONS | {"experts": companion, "tier": "Q4_0", "verify_reads": True, "spec_type": "draft-mtp", "expert_memory": 2 << 20}
    with Served(str(model), **options) as it:
        expected = complete(it.url, PROMPTS[0])["content"]
        for at in places:
            flip_bit(companion, at)
        answer = httpx.post(f"{it.url}/completion", json={"prompt": "Four score and seven years", "n_predict": 32, "temperature": 0}, timeout=60)
        assert answer.status_code == 500 and "nextn.experts.gguf" in answer.json()["error"]["message"]
        for at in places:
            flip_bit(companion, at)
        assert complete(it.url, PROMPTS[0])["content"] == expected


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_planned_is_what_is_taken(nextn, drafts):
    """Without drafts llama.cpp leaves the layers in the file; with them it loads them, and has a second context."""
    code = """
import json, sys
import moeoff
with moeoff.Server(sys.argv[1], port=0, n_ctx=1024, parallel=2, memory="300M", **json.loads(sys.argv[2])) as server:
    print(json.dumps(server.stats().memory))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, nextn, json.dumps({"spec_type": "draft-mtp"} if drafts else {})], capture_output=True, text=True, timeout=60
    )
    taken, layout = json.loads(done.stdout), Layout.read(nextn)
    size = Footprint.of(layout, 1024, Config.make(nextn, n_ctx=1024, flash_attn=True).keywords, n_sequences=2, nextn=drafts)
    assert size.planned.weights == pytest.approx(taken["weights"] + taken["token_embedding"], abs=64 << 10)
    assert size.planned.compute == pytest.approx(taken["compute_buffers"], abs=2 << 20)
    assert size.arena_full == taken["experts"]
    assert drafts == (size.arena_full > layout.without_nextn().expert_bytes * 1.3)
    assert drafts == (size.planned.state > taken["state"])  # the second context's is not told apart from the process


def refused(*command: str) -> str:
    """The last line that a server says which does not start."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "", done.stderr
    assert "Traceback" not in done.stderr or SCRIPT in command
    return done.stderr.splitlines()[-1]


def test_a_draft_model_counts_before_the_port_is_open(demo, grown):
    def needed(**options) -> int:
        said = refused(sys.executable, "-c", SCRIPT, demo, json.dumps({"memory": "10M", "n_ctx": 2048, **options}))
        return int(said.split("this model needs ")[1].split(" MiB")[0])

    assert needed(draft=grown) > needed() + 100  # its file, and its cache


def test_drafts_that_cannot_be_made(demo, nextn, grown, tmp_path):
    """Is said; a server that drafts nothing would be no answer."""
    cut = tmp_path / "cut.gguf"
    with open(demo, "rb") as file:
        cut.write_bytes(file.read(9_000_000))
    cases = [
        (["-md", "no.gguf"], "no.gguf: cannot be read"),
        (["-md", str(cut)], "cut.gguf: truncated"),
        (["-md", __file__], "not a GGUF file"),
        (["-md", nextn], "drafts cannot be made: "),  # its next-token layers belong to another model
        (["-md", demo, "--spec-type", "draft-eagle3"], "drafts cannot be made: draft model is not eagle3"),
        (["-md", demo, "--spec-type", "draft-dflash"], "drafts cannot be made: "),
        (["--spec-type", "draft-simple"], "drafts cannot be made: draft-simple requires"),
        (["--spec-type", "draft-mtp"], "no next-token layers"),
    ]
    for arguments, said in cases:
        assert said in refused(sys.executable, "-m", "moeoff.cli", "serve", "-m", demo, "--port", "0", "-c", "256", "--no-warm", *arguments)
