"""Pictures in a chat with `moeoff.Server`, through a small random projector: what is said depends on them, and on nothing that moeoff does."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from helpers.files import PROSE
from helpers.served import SCRIPT, Served
from helpers.small_models import N_PATCHES, write_projector
from helpers.stock_server import stock_server
from moeoff.gguf.layout import Layout
from moeoff.simulate import Trace

OPTIONS = {"n_ctx": 512, "parallel": 1, "n_threads": 2, "expert_memory": 4 << 20}


@pytest.fixture(scope="module")
def projector(demo, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    write_projector(path, Layout.read(demo).hparams["embedding_length"])
    return str(path)


def picture(seed: int, width: int = 90, height: int = 70) -> str:
    """A data: URL of noise."""
    data, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def question(url: str, text: str = "What is this?") -> dict:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return {"model": "x", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}


def ask(url: str, body: dict) -> tuple[str, dict]:
    """The text, and all of the answer."""
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    return answer["choices"][0]["message"]["content"], answer


def peak(process: subprocess.Popen) -> int:
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def test_an_answer_depends_on_the_picture_and_not_on_the_memory(demo, projector, tmp_path):
    trace = tmp_path / "t"
    with Served(demo, mmproj=projector, trace=str(trace), **OPTIONS) as it:
        few = [ask(it.url, question(picture(seed)))[0] for seed in (0, 1, 0)]
        _, answer = ask(it.url, question(picture(2)))
        it.process.terminate()
        assert it.process.wait(20) == 0
    with Served(demo, mmproj=projector, **OPTIONS | {"expert_memory": 1 << 30}) as it:
        assert [ask(it.url, question(picture(seed)))[0] for seed in (0, 1, 0)] == few
    assert few[0] == few[2] != few[1]
    assert answer["usage"]["prompt_tokens"] > N_PATCHES and answer["moeoff"]["misses"] > 0
    pictures = [event for event in Trace.read(trace).events if event.gate == 0 and len(event.ids) == N_PATCHES]
    assert len(pictures) == 4 and not any(event.decode for event in pictures)  # each is read, as a prompt is


@pytest.mark.slow  # links llama-server
def test_it_says_what_stock_says(demo, projector):
    bodies = [question(picture(seed), text) for seed, text in ((0, "What is this?"), (1, "What is this?"), (2, "Count the colours."))]
    with stock_server(demo, "--mmproj", projector, "-c", "512") as url:
        expected = [ask(url, body)[0] for body in bodies]
    with Served(demo, mmproj=projector, **OPTIONS) as it:
        assert [ask(it.url, body)[0] for body in bodies] == expected


def test_a_read_error_while_a_picture_is_computed(demo, projector, tmp_path):
    """Is that request's, with the file's name, and the next one's answer is right."""
    model = shutil.copy(demo, tmp_path / "model.gguf")
    before = os.stat(model)
    with Served(str(model), mmproj=projector, **OPTIONS) as it:
        expected = ask(it.url, question(picture(0)))[0]
        with open(model, "ab") as file:
            file.write(b"x")
        with pytest.raises(openai.InternalServerError, match=r"model\.gguf: the file was changed"):
            it.client.chat.completions.create(**question(picture(1)))  # what comes before the picture is in the context
        os.truncate(model, before.st_size)
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert ask(it.url, question(picture(0)))[0] == expected


@pytest.mark.slow
def test_the_budget_holds_with_a_picture(grown, tmp_path):
    """What its request and its pixels take, the experts lend; a picture that takes more is refused, and the next one is answered."""
    write_projector(tmp_path / "mmproj.gguf", Layout.read(grown).hparams["embedding_length"], side=256)
    budget, options = 240, {"n_ctx": 1280, "parallel": 1, "flash_attn": False, "n_threads": 2}
    arguments = ["--override-kv", "qwen2moe.context_length=int:2048"]
    with Served(grown, mmproj=str(tmp_path / "mmproj.gguf"), memory=f"{budget}M", args=arguments, **options) as it:
        it.complete(PROSE.read_text()[:3000], 8)  # experts take what there is for them
        assert ask(it.url, question(picture(0, 1000, 800)))[1]["usage"]["prompt_tokens"] > 1024
        assert peak(it.process) <= budget << 20
        huge = io.BytesIO()
        Image.new("RGB", (9000, 9000)).save(huge, "PNG")
        with pytest.raises(openai.BadRequestError, match="GiB to read"):
            it.client.chat.completions.create(**question("data:image/png;base64," + base64.b64encode(huge.getvalue()).decode()))
        assert ask(it.url, question(picture(1)))[0]
        assert peak(it.process) <= budget << 20


def needed(model: str, **options) -> int:
    """The budget that a server says it needs, in MiB."""
    command = [sys.executable, "-c", SCRIPT, model, json.dumps({"memory": "10M", **options})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""  # no port was opened
    return int(done.stderr.split("this model needs ")[1].split(" MiB")[0])


def test_a_projector_counts_before_the_port_is_open(demo, tmp_path):
    """Its file is the least: here two heads' attention of 2,304 patches to each other takes 40 MiB."""
    write_projector(tmp_path / "mmproj.gguf", Layout.read(demo).hparams["embedding_length"], side=384)
    options = {"n_ctx": 512, "flash_attn": False}
    assert needed(demo, mmproj=str(tmp_path / "mmproj.gguf"), **options) > needed(demo, **options) + 40


def test_projectors_that_cannot_be_used(demo, nextn, projector, tmp_path, moeoff_command):
    """One sentence, which names the file; nothing is loaded."""
    data = open(projector, "rb").read()
    width = Layout.read(demo).hparams["embedding_length"]
    write_projector(tmp_path / "wide.gguf", 2 * width)
    for name, content in (("cut.gguf", data[:-300]), ("head.gguf", data[:3000]), ("junk.gguf", b"no projector")):
        (tmp_path / name).write_bytes(content)
    cases = {
        "missing.gguf": "No such file",
        "cut.gguf": "truncated",
        "head.gguf": "truncated",
        "junk.gguf": "not a GGUF file",
        "wide.gguf": f"{2 * width} numbers, expected {width}",
    }
    for name, said in cases.items():
        done = moeoff_command("serve", "-m", demo, "--port", "0", "--mmproj", str(tmp_path / name))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        assert name in done.stderr and said in done.stderr
    for model, path, said in ((demo, demo, "no projector"), (nextn, projector, "converted for text alone")):
        done = moeoff_command("serve", "-m", model, "--port", "0", "--mmproj", path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1) and said in done.stderr
