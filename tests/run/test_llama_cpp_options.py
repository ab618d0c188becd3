"""Habits of llama.cpp's programs: their most used options are taken, or refused with
the reason.
"""

import os
import re
import types
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from companions import write_control_vector, write_expert_adapter
from helpers.files import PROSE, read_only
from helpers.models import rewritten
from moeoff import OptionError
from moeoff.cli.main import main
from moeoff.engine.engine import Engine
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp.llama_cpp_options import ANYWAY, options_of
from moeoff.options import TABLE
from moeoff.server.arguments import CommandLine
from moeoff.server.library import server_options
from moeoff.system.files import require_new

# llama-cli's own, which llama-server does not have, with a value where they take one
CLI = {"-sys x": "", "-sysf FILE": "", "-st": "", "--simple-io": "", "-mli": "", "-co on": "", "--show-timings": "", "--image PICTURE": "mmproj",
       "--server-base u": "computes in its own process", "--verbose-prompt": "-v shows", "--display-prompt": "-v shows", "-o x": "> FILE", "--video x": "not supported"}  # fmt: skip
# every one that has an effect on one conversation, in a few runs
WORK = [
    "--samplers top_k;temperature --temp 0.5 -s 1 --top-k 9 --top-p 0.9 --min-p 0.1 --top-nsigma 1 --xtc-probability 0.1 --xtc-threshold 0.2 --typical 0.9 "
    "--repeat-last-n 9 --repeat-penalty 1.1 --presence-penalty 0.1 --frequency-penalty 0.1 --dry-multiplier 0.5 --dry-base 1.5 --dry-allowed-length 3 "
    "--dry-penalty-last-n 9 --dry-sequence-breaker x --dynatemp-range 0.1 --dynatemp-exp 1 --adaptive-target 0.5 --adaptive-decay 0.5 -l 5-1 --ignore-eos",
    "--sampler-seq kt --mirostat 2 --mirostat-lr 0.1 --mirostat-ent 4 --jinja -rea off --reasoning-format none --reasoning-budget 0 --reasoning-effort low",
    "-c 512 -b 64 -ub 32 -t 1 -tb 1 -fa on -ctv q8_0 --keep 4 --context-shift --swa-full -ctxcp 2 --rope-scaling linear --rope-scale 2",
    "--chat-template chatml --chat-template-kwargs {} -r never --override-kv general.name=str:x --check-tensors --no-perf --no-warmup -lv 1 --special",
    "--spec-type ngram-simple --spec-draft-n-max 2 -p apples,apples,apples",
    "--grammar-file GRAMMAR", "--json-schema {} --raw", "-jf SCHEMA --raw", "--control-vector VECTOR", "--lora ADAPTER", "--lora-scaled ADAPTER:0.5",
]  # fmt: skip


def test_every_option_of_llama_cli_works_or_says_why():
    """By the table of the pinned llama-server, which has all of llama-cli's but its own
    few.
    """
    own = {
        opt
        for param in main.commands["run"].params
        if param.name not in TABLE
        for opt in param.opts
    }
    theirs = {name for name, option in server_options().items() if option.chats}
    assert len(theirs) > 200 and not own & set(options_of("run"))
    for name in theirs - own:
        option = server_options()[name]
        try:
            CommandLine.read([name, *["1"] * option.n_values], "run")
        except OptionError as error:
            assert re.search(r": .{20,}|`\w+`|-\S+: ", str(error)), error
    for line, why in CLI.items():
        name, _, value = line.partition(" ")
        if name in own:
            continue
        words = [name, *[value] * bool(value)]
        if why:
            with pytest.raises(OptionError, match=re.escape(why)):
                CommandLine.read(words, "run")
        else:
            assert CommandLine.read(words, "run") == CommandLine()


@pytest.fixture(scope="module")
def files(demo, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "g").write_text('root ::= "yes"')
    (folder / "s").write_text("{}")
    write_control_vector(
        folder / "vector.gguf",
        "qwen2moe",
        np.zeros(ModelIndex.read(demo).hparams["embedding_length"]),
    )
    adapter = write_expert_adapter(demo, folder / "adapter.gguf")
    return {
        "GRAMMAR": str(folder / "g"),
        "SCHEMA": str(folder / "s"),
        "VECTOR": str(folder / "vector.gguf"),
        "ADAPTER": str(adapter),
    }


@pytest.mark.parametrize("words", WORK, ids=lambda words: words.split()[0])
def test_options_of_llama_cli(invoke, files, words):
    for name, path in files.items():
        words = words.replace(name, path)
    done = invoke(
        "run", *([] if "-p " in words else ["-p", "How many?"]), "-n", "3", *words.split()
    )
    assert done.returncode == 0 and "no effect" not in done.stderr and done.stdout.strip(), (
        done.stderr
    )


def test_every_option_takes_as_many_values_as_in_llama_cpp():
    """By the table of the pinned llama-server, which has most of llama-cli's; and what
    of a server's is refused or left out is there to be.
    """
    for program in ("run", "serve"):
        theirs = {
            name: option for name, option in options_of(program).items() if name in server_options()
        }
        assert {
            name
            for name, option in theirs.items()
            if option.takes_value != bool(server_options()[name].n_values)
        } == set()
    # which people still type
    flags = {"--mmap", "--no-mmap", "--mlock", "-dio", "--direct-io", "-ndio", "--no-direct-io"}
    assert set(options_of("serve")) - set(server_options()) <= flags
    ours = {
        opt: not param.is_flag
        for param in main.commands["run"].params
        for opt in param.opts
        if hasattr(param, "is_flag")
    }
    optional = {"--swa-full", "--kv-unified"}  # on or off may follow
    assert {
        name
        for name in ours.keys() & server_options().keys() - optional
        if ours[name] != bool(server_options()[name].n_values)
    } == set()


def test_what_is_so_anyway(invoke):
    anyway = [
        word
        for name, option in options_of("run").items()
        if option.verdict == ANYWAY
        for word in (name, *["on"] * option.takes_value)
    ]
    done = invoke(
        *"run -p x -n 2".split(),
        *anyway,
        *"-fa auto -st -tb 1 -s 1 -r never".split(),
    )
    assert done.returncode == 0 and "no effect" not in done.stderr, done.stderr


def test_what_has_no_effect_is_said(invoke):
    done = invoke("run", "--mlock", "-p", "--mmap", "-ncmoe", "4", "--fit-ctx=1", "-n", "2")
    assert done.returncode == 0
    assert [line.partition(" has no effect")[0] for line in done.stderr.splitlines()[:-1]] == [
        "--mlock",
        "-ncmoe",
        "--fit-ctx",
    ]


def test_contexts(invoke):
    """0 is the model's own; more than it was trained for is a remark, of what measures,
    too.
    """
    done = invoke("run", "-p", "x", "-n", "2", "-c", "0")
    assert "context 256 |" in done.stderr and "trained" not in done.stderr
    for command in (
        ("run", "-p", "x", "-n", "2", "-c", "512"),
        ("bench", "-c", "512", "-p", "8", "-n", "0", "-r", "1", "--no-warmup"),
        ("eval", "--text", str(PROSE), "--chunks", "1"),
    ):
        assert "context of 512 tokens: the model was trained for 256" in invoke(*command).stderr
    done = invoke(
        "run", "-p", "x", "-n", "2", "-c", "512", "--rope-scaling", "linear", "--rope-scale", "2"
    )
    assert done.returncode == 0 and "the model was trained" not in done.stderr


def test_templates(invoke, demo, tmp_path):
    """Another than the model's; and a plain one where there is none and one is needed."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    asked = ("run", "-p", "How many?", "-n", "4", "--temp", "0")
    tokens = [int(re.search(r"prompt (\d+) tokens", invoke(*asked, *more).stderr)[1]) for more in
              ([], ["--chat-template-file", str(tmp_path / "t.jinja")], ["--chat-template", "chatml"], ["--raw"])]  # fmt: skip
    assert len(set(tokens)) >= 3
    bare = rewritten(demo, tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    done = invoke(*asked, "-m", bare, "--system", "Be brief.")
    assert done.returncode == 0, done.stderr


def test_outputs_are_looked_at_before_any_weight_is_read(invoke, tmp_path, monkeypatch):
    """A folder, and one that is not there, are no places to write to; the model is not
    looked for.
    """
    for path, words in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "no" / "x"), "there is no such folder"),
    ):
        done = invoke("run", "-m", "missing.gguf", "-p", "x", "--stats-json", path)
        assert done.returncode in (1, 2) and (
            words in done.stderr or "is a directory" in done.stderr
        ), done.stderr
    full = types.SimpleNamespace(f_blocks=100, f_bavail=0)
    with (
        monkeypatch.context() as patch,
        pytest.raises(OptionError, match=f"--output {tmp_path}/x: the disk of {tmp_path} is full"),
    ):
        patch.setattr(os, "statvfs", lambda _path: full)
        require_new(tmp_path / "x", [], "--output")
    with read_only(tmp_path), pytest.raises(OptionError, match="which is read-only"):
        require_new(tmp_path / "x", [], "--output")


def test_what_is_wrong_is_said_before_any_weight_is_read(demo, tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"no profile")
    (tmp_path / "damaged.jinja").write_text("{% for")
    run = ("run", demo, "-p", "x")
    with mock.patch.object(Engine, "loading", side_effect=AssertionError("weights are read")):
        # where nothing is wrong
        assert isinstance(CliRunner().invoke(main, run).exception, AssertionError)
        for words, text in (
            (("--strategy", "magic"), "unknown strategy 'magic'"),
            (("--strategy", "promoe", "--expert-memory", "4M"), "moeoff calibrate"),
            (("--profile", "missing.npz"), "missing.npz"),
            (("--profile", str(tmp_path / "damaged.npz")), "damaged.npz"),
        ):
            done = CliRunner().invoke(main, [*run, *words])
            assert done.exit_code == 1 and text in done.stderr, (words, done.output, done.exception)
        done = CliRunner().invoke(
            main, [*run, "--chat-template-file", str(tmp_path / "damaged.jinja")]
        )
        assert done.exit_code == 1 and "cannot be read" in done.stderr
