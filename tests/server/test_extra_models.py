"""Models that a server loads in addition: what drafts, a draft model or the model's own
next-token layers, changes no text; pictures, through a small random projector, change
it as in llama-server.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import shutil
from unittest import mock

import httpx
import numpy as np
import pytest
from PIL import Image

import moeoff
from companions import N_PATCHES, write_projector
from helpers import servers
from helpers.files import PROSE, flip_bit
from helpers.models import rewritten
from helpers.processes import own_process, run_python
from helpers.servers import Service, needed, said_of_each, stock_server
from moeoff.budget.dry_load import dry_load
from moeoff.experts.convert import convert
from moeoff.experts.profile import Profile, profile_path
from moeoff.experts.sidecar import Sidecar
from moeoff.gguf.model_index import ModelIndex
from moeoff.options import Config
from moeoff.policies.score import ARRAY_NAMES
from moeoff.routing.trace import Trace

DRAFTS = {"n_ctx": 256, "parallel": 1, "n_threads": 2, "expert_memory": 8 << 20}
PROMPTS = ["one two three", "The heron stood in the", "4 + 4 ="]
PICTURES = {"n_ctx": 512, "parallel": 1, "n_threads": 2, "expert_memory": 4 << 20}


# drafts


def complete(url: str, prompt: str, **more) -> dict:
    return servers.complete(url, prompt, **{"n_predict": 64, "cache_prompt": False} | more)


def texts(url: str) -> tuple[list[str], int, int]:
    """Return the answers to all prompts, the number of tokens drafted, and of those
    accepted.
    """
    answers = [complete(url, prompt) for prompt in PROMPTS]
    drafted, accepted = (
        sum(answer["timings"].get(name, 0) for answer in answers)
        for name in ("draft_n", "draft_n_accepted")
    )
    return [answer["content"] for answer in answers], drafted, accepted


def test_the_models_own_layers(nextn, tmp_path):
    """Their experts are read like all others, and a trace has their gate."""
    trace = tmp_path / "t"
    with Service(nextn, **DRAFTS) as server:
        expected, drafted, _ = texts(server.url)
        assert drafted == 0
    with Service(
        nextn, spec_type="draft-mtp", strategy="score", trace=str(trace), **DRAFTS
    ) as server:
        answers, drafted, accepted = texts(server.url)
        assert "moeoff_draft_length" in server.metrics()
        server.stop()
    assert answers == expected and 0 < accepted < drafted
    recorded = Trace.read(trace)
    n_layers = ModelIndex.read(nextn).n_layer - 1  # the first is dense
    assert recorded.model.n_gates == n_layers
    assert {event.gate for event in recorded.events} == set(range(n_layers))
    # a draft that is checked is decoded, not read
    assert any(event.decode and len(event.ids) > 1 for event in recorded.events)


@pytest.mark.slow
def test_a_profile_of_the_model_without_these_layers(nextn, tmp_path):
    """As calibration measures it: what it says of gates has none for theirs, and is
    left out.
    """
    model = shutil.copy(nextn, tmp_path / "nextn.gguf")
    model_index = ModelIndex.read(model)
    weights = {
        name: np.zeros((1, model_index.n_layer - 2, model_index.n_expert), np.float32)
        for name in ARRAY_NAMES
    }
    Profile.write(profile_path(model), model_index, {"score": weights})
    with Service(str(model), spec_type="draft-mtp", strategy="score", **DRAFTS) as server:
        assert texts(server.url)[1] > 0


@pytest.mark.slow  # links llama-server
def test_they_say_what_stock_says(nextn, demo):
    for model, arguments, options in ((nextn, ["--spec-type", "draft-mtp"], {"spec_type": "draft-mtp"}),
                                      (demo, ["-md", demo, "--spec-type", "draft-simple"], {"draft": demo})):  # fmt: skip
        with stock_server(model, "-c", "256", *arguments) as url:
            expected, drafted, accepted = texts(url)
            assert drafted > 0 < accepted
        with Service(model, **DRAFTS | options) as server:
            assert texts(server.url)[0] == expected


@pytest.mark.slow
def test_several_at_a_time(nextn):
    """Each with drafts of its own; in a batch with others kernels round differently, so
    the texts are not compared.
    """
    with Service(nextn, spec_type="draft-mtp", **DRAFTS | {"parallel": 4, "n_ctx": 1024}) as server:
        body = {"prompt": PROMPTS * 4, "n_predict": 64, "temperature": 0, "ignore_eos": True}
        answers = server.post("/completion", body).raise_for_status().json()
    assert len(answers) == 12 and all(answer["tokens_predicted"] == 64 for answer in answers)
    assert sum(answer["timings"].get("draft_n", 0) for answer in answers) > 0


@own_process
def test_what_a_drafted_token_chose_is_read_meanwhile(demo):
    """The engine is told each token before its draft is checked."""
    options = {"draft": demo, "port": 0, "expert_memory": "4M", "n_ctx": 512, "parallel": 1}
    with moeoff.Server(demo, **options) as server:
        expected, engine = [], server.engine
        told = mock.patch.object(
            engine,
            "expect",
            side_effect=lambda n, expect=engine.expect: expected.append(n) or expect(n),
        )
        with told:
            written = complete(server.url, PROMPTS[0], return_tokens=True)["tokens"]
        assert len(expected) > 4 and set(expected) <= set(written)


@pytest.mark.slow
def test_a_read_error_in_the_models_own_layers(nextn, tmp_path):
    """Ends an answer with the file; once the file is whole again, the next one is
    right.
    """
    model = shutil.copy(nextn, tmp_path / "nextn.gguf")
    sidecar = str(convert(model, tiers="Q4_0", output=tmp_path / "nextn.experts.gguf").path)
    layer = ModelIndex.read(model).n_layer - 1
    places = [
        part.offset
        for (name, _, _), part in Sidecar(sidecar).slices.items()
        if name.startswith(f"blk.{layer}.")
    ]
    options = DRAFTS | {
        "experts": sidecar,
        "tier": "Q4_0",
        "verify_reads": True,
        "spec_type": "draft-mtp",
        "expert_memory": 2 << 20,
    }
    with Service(str(model), **options) as server:
        expected = complete(server.url, PROMPTS[0])["content"]
        for at in places:
            flip_bit(sidecar, at)
        answer = server.post(
            "/completion",
            {"prompt": "Four score and seven years", "n_predict": 32, "temperature": 0},
        )
        assert answer.status_code == 500
        assert "nextn.experts.gguf" in answer.json()["error"]["message"]
        for at in places:
            flip_bit(sidecar, at)
        assert complete(server.url, PROMPTS[0])["content"] == expected


@pytest.mark.parametrize("drafts", [False, True])
def test_what_is_planned_is_what_is_taken(nextn, drafts):
    """Without drafts llama.cpp leaves the layers in the file; with them it loads them,
    and has a second context.
    """
    code = """
import json, sys
import moeoff
with moeoff.Server(sys.argv[1], port=0, n_ctx=1024, parallel=2, memory="600M", **json.loads(sys.argv[2])) as server:
    print(json.dumps(server.stats().memory))
"""
    memory, model_index = (
        json.loads(
            run_python(code, nextn, json.dumps({"spec_type": "draft-mtp"} if drafts else {}))
        ),
        ModelIndex.read(nextn),
    )
    plan = dry_load(
        model_index,
        1024,
        Config.make(nextn, n_ctx=1024, flash_attn=True).keywords,
        n_sequences=2,
        nextn=drafts,
    )
    assert plan.weights == pytest.approx(
        memory["weights"] + memory["token_embedding"], abs=64 << 10
    )
    assert plan.compute == pytest.approx(memory["compute_buffers"], abs=2 << 20)
    assert plan.arena_full == memory["experts"]
    assert drafts == (plan.arena_full > model_index.without_nextn().expert_bytes * 1.3)
    # the second context's is not told apart from the process
    assert drafts == (plan.state > memory["state"])


def test_the_context_leaves_room_for_their_own(nextn):
    code = (
        "import sys, moeoff; print(*(moeoff.Server(sys.argv[1], port=0, memory='160M',"
        " spec_type=kind).engine.planned.n_ctx for kind in (None, 'draft-mtp')))"
    )
    without, with_ = map(int, run_python(code, nextn).split())
    assert with_ < without


def test_a_draft_model_counts_before_the_port_is_open(demo, grown):
    # its file, and its cache
    assert needed(demo, draft=grown, n_ctx=2048) > needed(demo, n_ctx=2048) + 100


def test_drafts_that_cannot_be_made(demo, nextn, tmp_path):
    """Is said; a server that drafts nothing would be no answer."""
    damaged = rewritten(
        demo, tmp_path / "damaged.gguf", {"qwen2moe.attention.layer_norm_rms_epsilon": math.nan}
    )
    cases = [
        (f"-md {damaged}", "expected a small positive number"),  # llama.cpp would end the process
        # its next-token layers belong to another model
        (f"-md {nextn}", "drafts cannot be made: "),
        (
            f"-md {demo} --spec-type draft-eagle3",
            "drafts cannot be made: draft model is not eagle3",
        ),
        ("--spec-type draft-simple", "drafts cannot be made: draft-simple requires"),
        ("--spec-type draft-mtp", "no next-token layers"),
    ]
    lines = said_of_each(demo, *(args for args, _ in cases))
    assert len(lines) == len(cases) and all(
        text in line for (_, text), line in zip(cases, lines)
    ), lines


# pictures


@pytest.fixture(scope="module")
def projector(demo, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_projector(path, ModelIndex.read(demo).hparams["embedding_length"])
    return str(path)


def picture(seed: int, width: int = 90, height: int = 70) -> str:
    """A data: URL of noise."""
    data, pixels = (
        io.BytesIO(),
        np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8),
    )
    Image.fromarray(pixels).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def question(url: str, text: str = "What is this?") -> dict:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {
        "model": "x",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 24,
    }


def ask(url: str, body: dict) -> tuple[str, dict]:
    """The text, and all of the answer."""
    answer = (
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    )
    return answer["choices"][0]["message"]["content"], answer


def refusal(url: str, body: dict, status: int) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == status
    return answer.json()["error"]["message"]


def test_an_answer_depends_on_the_picture_and_not_on_the_memory(demo, projector, tmp_path):
    trace = tmp_path / "t"
    with Service(demo, mmproj=projector, trace=str(trace), **PICTURES) as server:
        few = [ask(server.url, question(picture(seed)))[0] for seed in (0, 1, 0)]
        _, answer = ask(server.url, question(picture(2)))
        server.stop()
    with Service(demo, mmproj=projector, **PICTURES | {"expert_memory": 1 << 30}) as server:
        assert [ask(server.url, question(picture(seed)))[0] for seed in (0, 1, 0)] == few
    assert few[0] == few[2] != few[1]
    assert answer["usage"]["prompt_tokens"] > N_PATCHES and answer["moeoff"]["misses"] > 0
    pictures = [
        event
        for event in Trace.read(trace).events
        if event.gate == 0 and len(event.ids) == N_PATCHES
    ]
    # each is read once, as a prompt is: the first is kept
    assert len(pictures) == 3 and not any(event.decode for event in pictures)


def test_run_shows_pictures_to_the_model(invoke, demo, projector, tmp_path):
    def answer(*more: str) -> dict:
        return json.loads(
            invoke(
                "run",
                demo,
                "-p",
                "What is this?",
                *"-n 24 --temp 0 --json --mmproj".split(),
                projector,
                *more,
            ).stdout
        )

    for seed in (0, 1):
        (tmp_path / f"{seed}.png").write_bytes(base64.b64decode(picture(seed).partition(",")[2]))
    seen = [answer("--image", str(tmp_path / f"{seed}.png")) for seed in (0, 1)]
    assert answer()["usage"]["prompt_tokens"] + N_PATCHES <= seen[0]["usage"]["prompt_tokens"]
    assert seen[0]["text"] != seen[1]["text"]
    (tmp_path / "notes.txt").write_text("no picture")
    assert (
        "expected the name of an image"
        in invoke("run", demo, "-p", "x", "--image", str(tmp_path / "notes.txt")).stderr
    )


@pytest.mark.slow  # links llama-server
def test_it_says_what_stock_says(demo, projector):
    bodies = [
        question(picture(seed), text)
        for seed, text in ((0, "What is this?"), (1, "What is this?"), (2, "Count the colours."))
    ]
    with stock_server(demo, "--mmproj", projector, "-c", "512") as url:
        expected = [ask(url, body)[0] for body in bodies]
    with Service(demo, mmproj=projector, **PICTURES) as server:
        assert [ask(server.url, body)[0] for body in bodies] == expected


@pytest.mark.slow
def test_a_read_error_while_a_picture_is_computed(demo, projector, tmp_path):
    """Is that request's, with the file's name, and the next one's answer is right."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    before = os.path.getsize(model)
    with Service(str(model), mmproj=projector, **PICTURES) as server:
        expected = ask(server.url, question(picture(0)))[0]
        with open(model, "ab") as file:
            file.write(b"x")
        # what comes before the picture is in the context
        assert "model.gguf: the file was changed" in refusal(server.url, question(picture(1)), 500)
        os.truncate(model, before)
        os.replace(shutil.copy(demo, tmp_path / "new.gguf"), model)
        assert ask(server.url, question(picture(0)))[0] == expected


@pytest.mark.slow
def test_the_budget_holds_with_a_picture(grown, tmp_path):
    """The experts lend the memory of a request and its pixels; a picture that takes
    more is refused, and the next one is answered.
    """
    write_projector(
        tmp_path / "mmproj.gguf", ModelIndex.read(grown).hparams["embedding_length"], side=256
    )
    budget, options = 240, {"n_ctx": 1280, "parallel": 1, "flash_attn": False, "n_threads": 2}
    arguments = ["--override-kv", "qwen2moe.context_length=int:2048"]
    with Service(
        grown, mmproj=str(tmp_path / "mmproj.gguf"), memory=f"{budget}M", args=arguments, **options
    ) as server:
        server.complete(PROSE.read_text()[:3000], 8)  # experts take what there is for them
        assert ask(server.url, question(picture(0, 1000, 800)))[1]["usage"]["prompt_tokens"] > 1024
        assert server.peak <= budget << 20
        huge = io.BytesIO()
        Image.new("RGB", (9000, 9000)).save(huge, "PNG")
        assert "GiB to read" in refusal(
            server.url,
            question("data:image/png;base64," + base64.b64encode(huge.getvalue()).decode()),
            400,
        )
        assert ask(server.url, question(picture(1)))[0]
        assert server.peak <= budget << 20


def test_a_projector_counts_before_the_port_is_open(demo, tmp_path):
    """A projector takes more than its file: here two heads' attention of 2,304 patches
    to each other takes 40 MiB.
    """
    write_projector(
        tmp_path / "mmproj.gguf", ModelIndex.read(demo).hparams["embedding_length"], side=384
    )
    options = {"n_ctx": 512, "flash_attn": False}
    assert (
        needed(demo, mmproj=str(tmp_path / "mmproj.gguf"), **options) > needed(demo, **options) + 40
    )


def test_projectors_that_cannot_be_used(demo, nextn, projector, tmp_path, invoke, moeoff_command):
    """One sentence, which names the file; nothing is loaded."""
    data = open(projector, "rb").read()
    width = ModelIndex.read(demo).hparams["embedding_length"]
    write_projector(tmp_path / "wide.gguf", 2 * width)
    (tmp_path / "cut.gguf").write_bytes(data[:-300])
    # a null pointer, which llama.cpp computes with
    (tmp_path / "lacks.gguf").write_bytes(data.replace(b"mm.2.bias", b"mm.2.none"))
    cases = {
        "lacks.gguf": "lacks a tensor, or is damaged",
        "cut.gguf": "truncated",
        "wide.gguf": f"expected embeddings of width {width}",
    }
    for name, text in cases.items():
        done = invoke("serve", "-m", demo, "--port", "0", "--mmproj", str(tmp_path / name))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert name in done.stderr and text in done.stderr
    for model, path, text in (
        (demo, demo, "expected a projector"),
        (nextn, projector, "converted without"),
    ):
        done = invoke("serve", "-m", model, "--port", "0", "--mmproj", path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and text in done.stderr
