"""llama-server's command lines and variables, as `moeoff serve` takes them; and what
llama-server logged where it ends.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import moeoff
from companions import write_control_vector, write_expert_adapter
from helpers.refusals import refusals, refused
from helpers.servers import Command, said_of_each
from moeoff import OptionError
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp.llama import supports_gpu
from moeoff.llamacpp.llama_cpp_options import options_of
from moeoff.option import table_of
from moeoff.options import Config, ServerOptions
from moeoff.server.arguments import (
    _FOLDER,
    _WRITTEN,
    CommandLine,
    check_files,
    file_kinds,
    of_environment,
)
from moeoff.server.library import aliases
from moeoff.system.files import TEXT


def test_what_moeoff_has_an_option_for_becomes_it_and_the_rest_is_passed_on():
    line = CommandLine.read(
        "-c 0 -fa auto --embeddings --jinja --temp 0.6 -n 5 --pooling mean -np 2 -ngl auto"
        " --gpu-layers 0 --lora x.gguf --lora-scaled y --log-file l --cache-ram 100 --cors-origins"
        " https://a,https://b --cors c --no-context-shift --swa-full --top_k 3"
        " --override-kv=a=int:5 -tb 3".split()
    )
    assert (
        line.passed_on
        == "--jinja --temp 0.6 -n 5 --lora x.gguf --lora-scaled y --log-file l --top-k 3"
        " --override-kv a=int:5".split()
    )
    assert not Path("l").exists() and line.left_out == []
    assert line.options == {"n_ctx": 0, "flash_attn": True, "embedding": True, "pooling": "mean", "parallel": 2, "n_gpu_layers": 0, "cache_ram": 100 << 20,
                            "cors": ["https://a", "https://b", "c"], "context_shift": False, "swa_full": True, "n_threads_batch": 3}  # fmt: skip
    Config.make(
        "m",
        **{
            name: value
            for name, value in line.options.items()
            if name in Config.__dataclass_fields__
        },
    )
    ServerOptions.make(
        **{
            name: value
            for name, value in line.options.items()
            if name in ServerOptions.__dataclass_fields__
        }
    )


def test_what_has_no_effect_is_said_once_and_what_is_so_anyway_is_not():
    line = CommandLine.read(
        "-ncmoe 30 --no-mmap --metrics -cb -fit off --offline --threads-http 4 --no-warmup -cmoed".split()
    )
    assert line.options == {} and line.passed_on == []
    assert [sentence.partition(" has no effect: ")[0] for sentence in line.left_out] == [
        "-ncmoe",
        "--offline",
        "--threads-http",
    ]


OWN = {"-m": True, "--model": True, "--debug": False}


@pytest.mark.parametrize("given, code, words", refusals("CommandLine"))
def test_what_cannot_be_is_refused(given, code, words):
    with refused(code, words):
        CommandLine.read(given.split(), own=OWN)


@pytest.mark.skipif(supports_gpu(), reason="this machine has a GPU")
def test_layers_for_a_gpu_that_is_not_there_are_left_out_as_llama_server_does():
    for value in ("all", "99"):
        line = CommandLine.read(f"-ngl {value} -ts 3,1 -c 512".split())
        assert line.options == {"n_ctx": 512} and len(line.left_out) == 1
        assert line.left_out[0].startswith(
            "--n-gpu-layers and --tensor-split have no effect: this build "
        )
    assert CommandLine.read(["-ngl", "auto"]) == CommandLine.read(["-ngl", "0"])
    assert CommandLine.read(["-ngl", "0"]).left_out == []
    asked = CommandLine.read("-ngl 99 --vram 1G".split())  # for what only a GPU has
    with pytest.raises(OptionError, match="n_gpu_layers: this build "):
        Config.make("m", **asked.options)


def test_variables():
    parts = of_environment({"LLAMA_ARG_CTX_SIZE": "0", "LLAMA_ARG_JINJA": "1", "LLAMA_ARG_MODEL": "m", "LLAMA_ARG_NOPE": "1",
                            "LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_NO_CONTEXT_SHIFT": "1", "LLAMA_ARG_UI": "0", "LLAMA_ARG_SWA_FULL": "1", "HOME": "/"})  # fmt: skip
    assert sorted(word for words in parts for word in words) == sorted(
        "--ctx-size 0 --jinja --model m --parallel 2 --no-context-shift --no-ui --swa-full".split()
    )


@pytest.mark.parametrize("line, alone, own, passed_on", [
    ("-np 2 -m a --temp 1 -- --model=b --debug -c 0", "", "-m a --model=b --debug", "--temp 1"),
    ("--memory 6G m.gguf", "m.gguf", "", ""),
    ("m.gguf --port 1", "m.gguf", "", ""),
    ("--jinja m.gguf --embedding --kv-unified off --swa-full n", "m.gguf n", "", "--jinja"),
    ("--temp=0.6 m --top_k 3 -ncmoe 4 --control-vector-layer-range 1 2", "m", "", "--temp 0.6 --top-k 3 --control-vector-layer-range 1 2"),
    ("--no-context-shift m -- --top-k -1", "m", "", "--top-k -1"),
    ("--api-key -m m", "m", "", ""),
])  # fmt: skip
def test_a_command_line_is_the_model_the_commands_own_options_and_others(
    line, alone, own, passed_on
):
    read = CommandLine.read(line.split(), own=OWN)
    assert (read.alone, read.own, read.passed_on) == (alone.split(), own.split(), passed_on.split())


@pytest.mark.parametrize("variables, args, text", [
    ({}, "--memory 10M DEMO", "DEMO"),  # the model is opened: a budget of 10M is too small for it
    ({"LLAMA_ARG_MODEL": "/nowhere/a.gguf"}, "--memory 10M DEMO", "DEMO"),
    ({"LLAMA_ARG_MODEL": "/nowhere/a.gguf"}, "DEMO --memory 10M", "DEMO"),
    ({"LLAMA_ARG_HF_REPO": "no/where"}, "--memory 10M -m DEMO", "DEMO"),
    ({"LLAMA_ARG_MODEL": "/nowhere/a.gguf", "LLAMA_ARG_CTX_SIZE": "x"}, "-c 512 --memory 10M", "a whole number"),
    ({"LLAMA_ARG_MODEL": "/nowhere/a.gguf"}, "--memory 10M", "/nowhere/a.gguf"),
])  # fmt: skip
def test_the_model_is_found_wherever_it_stands_and_before_a_variables(
    demo, invoke, monkeypatch, variables, args, text
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = invoke("serve", *args.replace("DEMO", demo).split())
    line = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 1 and text.replace("DEMO", "expert") in line and "not both" not in line
    ), done.stderr


def test_no_llama_cpp_option_hides_one_of_ours():
    lines = [
        line
        for kind in (Config, ServerOptions)
        for line in table_of(kind).values()
        if "serve" in line.commands
    ]
    ours = {
        alias for line in lines for name in (*line.flags, line.server) for alias in aliases(name)
    }
    assert {alias for name in options_of("serve") for alias in aliases(name)} & ours == set()


def test_a_command_line_of_llama_servers_serves(demo, monkeypatch):
    """With what is its own, without `--`, and one of its variables; the default of a
    question is what it says.
    """
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "2")
    monkeypatch.setenv("LLAMA_ARG_MODEL", demo)
    args = "-c 512 -fa on --mlock --jinja --temp 0 -n 5 --warm off".split()
    with Command(*args) as server:
        answers = [server.post("/completion", {"prompt": "The heron"}).json() for _ in range(2)]
        slots = server.get("/props").json()["total_slots"]
        text = server.stop()
    assert "--mlock has no effect" in text and slots == 2
    assert answers[0]["content"] == answers[1]["content"] and answers[0]["tokens_predicted"] == 5


def test_what_llama_server_ends_for_is_the_error(demo, tmp_path):
    """Also where its log goes to a file of the user's."""
    page = "--path /nowhere", "static assets path not found: /nowhere"
    cases = [
        ("--lora /nowhere.gguf", "/nowhere.gguf: cannot be read: No such file"),
        page,
        (f"{page[0]} --log-file {tmp_path / 'log'}", page[1]),
        ("--grammar (((", "failed to parse grammar"),
    ]
    for line, (_, text) in zip(said_of_each(demo, *(args for args, _ in cases)), cases):
        assert text in line and "ended by itself" not in line


# --- files that its own options name ---


def test_the_log_replaces_no_file_that_is_in_use(demo, tmp_path):
    """llama.cpp opens it for writing before it reads anything."""
    model = tmp_path / "m.gguf"
    shutil.copy(demo, model)
    grammar, key, sidecar = tmp_path / "grammar", tmp_path / "keys", tmp_path / "m.experts.gguf"
    grammar.write_text('root ::= "a"')
    key.write_text("secret")
    sidecar.write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(model)
    whole = model.read_bytes()
    lines = said_of_each(str(model), f"--log-file {model}", f"--log_file={link}", f"--grammar-file {grammar} --log-file {grammar}",
                         f"--api-key-file {key} --log-file {key}", f"--experts none --log-file {sidecar}", f"--slot-save-path {tmp_path}")  # fmt: skip
    assert len(lines) == 6
    assert all("would replace" in line for line in lines[:5])
    assert "clients could write over them" in lines[5]
    assert model.read_bytes() == whole
    assert grammar.read_text() == 'root ::= "a"'
    assert key.read_text() == "secret"
    assert sidecar.read_bytes() == b"x"
    log = tmp_path / "log"
    (tmp_path / "slots").mkdir()
    assert said_of_each(
        str(model),
        f"--experts none --log-file {log} --slot-save-path {tmp_path / 'slots'} --grammar-file"
        f" {grammar}",
    )[0].startswith("went through")
    assert log.exists()


def test_nobody_is_waited_for(demo, tmp_path):
    """A pipe without a writer in the place of any file that llama-server reads, or
    without a reader where it writes.
    """
    pipe, adapter = tmp_path / "pipe", write_expert_adapter(demo, tmp_path / "a.gguf")
    os.mkfifo(pipe)
    reads = [name for name, kind in file_kinds().items() if kind not in (_WRITTEN, _FOLDER)]
    args = [f"{name} {pipe}{':0.5' if name.endswith('-scaled') else ''}" for name in reads] + [
        f"--lora {adapter},{pipe}"
    ]
    *lines, of_log = said_of_each(demo, *args, f"--log-file {pipe}")
    assert len(lines) == len(args)
    assert all("cannot be read: a pipe, expected a file" in line for line in lines)
    assert "is a pipe, and llama-server would wait for its reader" in of_log


def test_texts_and_tables_are_weighed_before_they_are_read(demo, tmp_path):
    path = tmp_path / "long"
    with open(path, "wb") as file:
        file.truncate(TEXT + 1)
    with pytest.raises(
        OptionError, match=f"--grammar-file {path}: it has 16 MiB, expected at most 16 MiB"
    ):
        check_files(CommandLine.read(["--grammar-file", str(path)]).files, [])
    assert check_files(CommandLine.read(["-lcs", str(path)]).files, []) == 10 * (TEXT + 1)


def test_adapters_and_control_vectors_of_a_server_count(demo, tmp_path):
    """Their weights and what their headers take, before anything is loaded."""
    adapter, vector = write_expert_adapter(demo, tmp_path / "a.gguf"), tmp_path / "vector.gguf"
    write_control_vector(
        vector, "qwen2moe", np.zeros(ModelIndex.read(demo).hparams["embedding_length"])
    )

    def planned(*args: str) -> int:
        return moeoff.Server(demo, port=0, memory="1G", n_ctx=256, args=args).engine.planned.extras

    usual = planned()
    assert planned("--lora", adapter) - usual > 0.9 * os.path.getsize(adapter)
    assert planned("--lora-scaled", f"{adapter}:0.5,{adapter}:0.1") - usual > 1.8 * os.path.getsize(
        adapter
    )
    assert planned("--control-vector", str(vector)) > usual
