"""Everything that goes wrong is one sentence on stderr, an exit code, and no traceback,
whatever the command.

The table: what is given, which words the sentence has. `--debug` shows where it came
from.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import subprocess

import numpy as np
import pytest

import moeoff
from helpers.models import rewritten, split_model, with_template
from helpers.refusals import has_words, parse_options, refusals
from helpers.waiting import wait_until
from moeoff.engine.engine import Engine
from moeoff.experts.convert import convert
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.quantize import type_from_name
from moeoff.routing.router import Router

COMMANDS = {
    "run": lambda model, *args: ("run", "-m", model, "-p", "x", "-n", "2", *args),
    "serve": lambda model, *args: ("serve", "-m", model, "--port", "0", *args),
    "inspect": lambda model, *args: ("inspect", model, "--probe", "off", *args),
}


@pytest.fixture(scope="module")
def files(demo, tmp_path_factory):
    """Path of each kind of bad file by name."""
    folder = tmp_path_factory.mktemp("files")
    with open(demo, "rb") as file:
        good = file.read()

    def write(name: str, data: bytes) -> str:
        path = folder / f"{name}.gguf"
        path.write_bytes(data)
        return str(path)

    rewritten(demo, folder / "dense.gguf", arrays=dict.fromkeys(ModelIndex.read(demo).experts))
    parts = split_model(demo, folder, 2)
    lonely = tmp_path_factory.mktemp("lonely") / parts[0].name
    shutil.copy(parts[0], lonely)
    renamed = folder / "renamed.gguf"
    shutil.copy(parts[0], renamed)
    return {
        "missing": str(folder / "missing.gguf"),
        "directory": str(folder),
        "empty": write("empty", b""),
        "truncated": write("truncated", good[: len(good) // 2]),
        "header only": write("header", good[:1000]),
        "not a GGUF": write("text", b"# a README\n" * 100),
        "corrupt header": write("corrupt", good[:16] + b"\xff" * 64 + good[80:]),
        "version": write("version", good[:4] + struct.pack("<I", 99) + good[8:]),
        "dense": str(folder / "dense.gguf"),
        "second part": str(parts[1]),
        "part missing": str(lonely),
        "part renamed": str(renamed),
        "good": demo,
    }


def check(done: subprocess.CompletedProcess, words: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    assert has_words(done.stderr, words) and "Traceback" not in done.stderr
    assert sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize("kind, code, words", refusals("files"))
def test_files(invoke, files, kind, code, words):
    """Every command reads the header in the same way, before all else."""
    for command in COMMANDS if kind in ("missing", "truncated") else ("inspect",):
        check(invoke(*COMMANDS[command](files[kind])), words, int(code))


def test_a_chat_template_that_cannot_be_read(invoke, demo, tmp_path):
    check(
        invoke(*COMMANDS["run"](with_template(demo, tmp_path / "patched.gguf", "{% if"))),
        "its chat template cannot be read",
    )


def test_a_context_as_long_as_the_model_was_trained_with(invoke, demo, tmp_path):
    path = patched(demo, tmp_path / "patched.gguf", {"context_length": 5000})
    for asked, n_ctx in (None, 4096), (0, 5120), (64, 256):  # llama.cpp's steps
        done = invoke(
            *COMMANDS["inspect"](path, *([] if asked is None else ["-c", str(asked)]), "--json")
        )
        assert json.loads(done.stdout)["ctx_size"] == n_ctx
        with contextlib.closing(
            moeoff.Server(path, expert_memory="1M", parallel=1, n_ctx=asked).engine
        ) as engine:
            assert engine.planned.n_ctx == n_ctx
    with moeoff.Llama(path, n_ctx=0, expert_memory="1M") as llm:
        assert llm.n_ctx() == 5120


def patched(demo, out, values=(), types=()) -> str:
    """The demo model with other hyperparameters (None: without), and some tensors
    stored in other types.
    """
    metadata = {
        f"qwen2moe.{key}": np.array(value, np.uint32) if isinstance(value, list) else value
        for key, value in dict(values).items()
    }
    return rewritten(
        demo, out, metadata, {name: type_from_name(kind) for name, kind in dict(types).items()}
    )


@pytest.mark.parametrize("given, code, words", refusals("hyperparameters"))
def test_values_that_llama_cpp_would_end_over(invoke, demo, tmp_path, given, code, words):
    """llama.cpp asserts them of a header and ends the process, or computes with them."""
    values = parse_options(given)
    path = patched(demo, tmp_path / "patched.gguf", values)
    command = "inspect" if values == {"block_count": 0} else "run"
    done = invoke(*COMMANDS[command](path))
    check(done, words, int(code))
    assert done.stderr.startswith(f"Error: {path}: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name, kind", [("blk.3.ffn_gate_inp.weight", "F64"), ("blk.3.attn_q.weight", "F64"), ("output_norm.weight", "F64"),
                                         ("blk.3.attn_norm.weight", "F16"), ("blk.3.attn_q.bias", "Q8_0"), ("output_norm.weight", "Q8_0")])  # fmt: skip
def test_types_that_llama_cpp_cannot_compute_with(invoke, demo, tmp_path, name, kind):
    """Over some it would end the process while it computes."""
    path = patched(demo, tmp_path / "patched.gguf", types={name: kind})
    for command in ("run", "inspect"):
        check(
            invoke(*COMMANDS[command](path)),
            f"{path}: llama.cpp cannot compute: {name!r} is stored as {kind}",
        )


def test_a_router_that_cannot_be_converted(demo, tmp_path):
    path = patched(demo, tmp_path / "patched.gguf", types={"blk.3.ffn_gate_inp.weight": "F64"})
    with pytest.raises(moeoff.ModelError, match="does not convert F64"):
        Router.read(ModelIndex.read(path), [3], gating=1)


def test_a_message_is_short_whatever_a_file_says():
    text = str(moeoff.ModelError("a" + "\x08" * 4000 + "z"))
    assert len(text) < 1600 and text.isprintable() and text[0] + text[-1] == "az"


def test_impossible_context(moeoff_command, demo):
    def limit() -> None:  # else the kernel ends it, and perhaps others, for memory
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    check(
        moeoff_command(*COMMANDS["run"](demo, "-c", "2000000000"), preexec_fn=limit),
        "for the KV cache at 2000000000 tokens",
    )


def test_debug_shows_where_it_came_from(moeoff_command, files):
    done = moeoff_command(*COMMANDS["run"](files["missing"], "--debug"))
    assert done.returncode == 1 and "Traceback" in done.stderr and "ModelError" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable(invoke, demo, tmp_path):
    path = tmp_path / "secret.gguf"
    shutil.copy(demo, path)
    path.chmod(0)
    check(invoke(*COMMANDS["inspect"](str(path))), "cannot be read: Permission denied")


@pytest.mark.parametrize("keeps_mtime", [False, True])
def test_changed_file(demo, tmp_path, keeps_mtime):
    path = tmp_path / "model.gguf"
    shutil.copy(demo, path)
    model_index = ModelIndex.read(path)
    model_index.check_unchanged()
    os.replace(shutil.copy(demo, tmp_path / "new.gguf"), path)
    model_index.check_unchanged()  # replaced: a process that has the old one open keeps it
    model_index, mtime = ModelIndex.read(path), os.stat(path).st_mtime_ns
    for harmless in (
        lambda: path.chmod(0o600),
        lambda: os.link(path, tmp_path / "link"),
        lambda: path.chmod(0o644),
        (tmp_path / "link").unlink,
    ):
        harmless()
        model_index.check_unchanged()
    # the clock of a file system may be coarse
    wait_until(lambda: (path.touch(), os.stat(path).st_mtime_ns != mtime)[1])
    with open(path, "r+b") as file:
        file.seek(random.Random(1).randrange(1 << 20))
        file.write(b"changed")
    os.utime(path, ns=(mtime, mtime if keeps_mtime else 1))
    with pytest.raises(moeoff.ModelError, match="changed while the model was in use"):
        model_index.check_unchanged()
    path.unlink()
    model_index.check_unchanged()


@pytest.mark.parametrize("which", ["model", "sidecar"])
def test_file_changed_while_running(demo, tmp_path, which):
    path = tmp_path / "model.gguf"
    shutil.copy(demo, path)
    changed = convert(path, tiers="original").path if which == "sidecar" else path
    with moeoff.Llama(str(path), expert_memory="1M", n_ctx=128) as llm:
        assert llm.create_completion("Once", max_tokens=2)["choices"]
        os.utime(changed, ns=(1, 1))
        with pytest.raises(moeoff.ModelError, match="changed while the model was in use"):
            llm.create_completion("Once more", max_tokens=2)


@pytest.mark.parametrize("which", ["model", "sidecar"])
def test_file_replaced_while_it_is_loaded(demo, tmp_path, monkeypatch, which):
    """By another one of the same layout: its experts do not belong to the dense weights
    that have been read.
    """
    model, other, attach = tmp_path / "model.gguf", tmp_path / "other.gguf", Engine.attach
    shutil.copy(demo, model)
    replaced = convert(model, tiers="original").path if which == "sidecar" else model
    shutil.copy(replaced, other)

    def attach_another(self: Engine, ctx: int) -> None:
        os.replace(other, replaced)
        attach(self, ctx)

    monkeypatch.setattr(Engine, "attach", attach_another)
    with pytest.raises(
        moeoff.ModelError,
        match=f"{os.path.basename(replaced)}: the file was changed or replaced while it was loaded",
    ):
        moeoff.Llama(str(model), expert_memory="1M", n_ctx=128)
    monkeypatch.undo()
    with moeoff.Llama(str(model), expert_memory="1M", n_ctx=128) as llm:
        assert llm.create_completion("Once", max_tokens=2)["choices"]
