"""Habits of llama.cpp's programs: their most used options are taken, or refused with the reason."""

import os
import re
import types
from unittest import mock

import pytest
from click.testing import CliRunner

from helpers.files import PROSE
from helpers.models import rewritten
from moeoff import OptionError
from moeoff.cli.main import main
from moeoff.engine.engine import Engine
from moeoff.llamacpp.habits import ANYWAY, habits_of
from moeoff.server.library import server_options
from moeoff.system.files import require_new

# of llama-cli's and llama-server's, with a value where they take one
USED = """
-m -hf -p -f -n --predict --n-predict -c --ctx-size -t --threads -tb --threads-batch -ngl --gpu-layers --n-gpu-layers -fa --flash-attn -b -ub -ctk -ctv
-s --seed --temp --top-k --top-p --min-p --repeat-penalty --presence-penalty --frequency-penalty --ignore-eos -r --reverse-prompt -sys --system-prompt
-cnv -no-cnv -st --chat-template --chat-template-file --jinja --color --simple-io --no-display-prompt --no-mmap --mlock --numa -cmoe -ncmoe -ot -sm -ts -mg
--rope-scaling --rope-freq-base --yarn-orig-ctx --keep --context-shift --no-context-shift --prompt-cache --grammar --json-schema --lora --mirostat --samplers
--logit-bias --override-kv -i -e -v --log-disable --no-warmup --perf -cb --mmproj --prio --no-kv-offload --device --verbosity --temperature --xtc-threshold -jf
--repack --warmup --reasoning --reasoning-format --reasoning-budget --reasoning-effort --log-verbosity --offline -sp --list-devices -fit
""".split()


def test_every_habit_has_an_answer():
    """Known to `moeoff run`: what it has no use for is taken where nothing is lost, else the reason is said."""
    known = {opt for param in main.commands["run"].params for opt in param.opts}
    assert len(USED) >= 60 and not set(USED) - known - set(habits_of("run"))
    assert not known & set(habits_of("run"))


def test_every_habit_takes_as_many_values_as_in_llama_cpp():
    """By the table of the pinned llama-server, which has most of llama-cli's; and what of a server's is refused or left out is there to be."""
    for program in ("run", "serve"):
        theirs = {name: habit for name, habit in habits_of(program).items() if name in server_options()}
        assert {name for name, habit in theirs.items() if habit.takes_value != bool(server_options()[name].n_values)} == set()
    flags = {"--mmap", "--no-mmap", "--mlock", "-dio", "--direct-io", "-ndio", "--no-direct-io"}  # which people still type
    assert set(habits_of("serve")) - set(server_options()) <= flags
    ours = {opt: not param.is_flag for param in main.commands["run"].params for opt in param.opts if hasattr(param, "is_flag")}
    optional = {"--swa-full", "--kv-unified"}  # on or off may follow
    assert {name for name in ours.keys() & server_options().keys() - optional if ours[name] != bool(server_options()[name].n_values)} == set()


def test_what_is_so_anyway(invoke):
    anyway = [word for name, habit in habits_of("run").items() if habit.verdict == ANYWAY for word in (name, *["on"] * habit.takes_value)]
    done = invoke("run", "-p", "x", "-n", "2", *anyway, "-fa", "auto", "-st", "-tb", "1", "-s", "1", "-r", "never")
    assert done.returncode == 0 and "no effect" not in done.stderr, done.stderr


def test_what_has_no_effect_is_said(invoke):
    done = invoke("run", "--mlock", "-p", "--mmap", "-ncmoe", "4", "--fit-ctx=1", "-n", "2")
    assert done.returncode == 0 and [line.partition(" has no effect")[0] for line in done.stderr.splitlines()[:-1]] == ["--mlock", "-ncmoe", "--fit-ctx"]


@pytest.mark.parametrize("args, words", [
    (["-e"], "-e: the prompt is taken"), (["--mirostat=2"], "--mirostat: answers are drawn with --temp"), (["--xtc-threshold", "1"], "--temp"),
    (["--reasoning-budget", "0"], "--reasoning-budget: moeoff serve takes it"), (["--list-devices"], "moeoff doctor"),
])  # fmt: skip
def test_what_is_refused(invoke, args, words):
    done = invoke("run", "-p", "x", "-n", "2", *args)
    assert done.returncode in (1, 2) and words in done.stderr, done.stderr


def test_contexts(invoke):
    """0 is the model's own; more than it was trained for is a remark, of what measures, too."""
    done = invoke("run", "-p", "x", "-n", "2", "-c", "0")
    assert "context 256 |" in done.stderr and "trained" not in done.stderr
    for command in (
        ("run", "-p", "x", "-n", "2", "-c", "512"),
        ("bench", "-c", "512", "-p", "8", "-n", "0", "-r", "1", "--no-warmup"),
        ("eval", "--text", str(PROSE), "--chunks", "1"),
    ):
        assert "a context of 512: the model was trained for 256 tokens" in invoke(*command).stderr
    done = invoke("run", "-p", "x", "-n", "2", "-c", "512", "--rope-scaling", "linear", "--rope-scale", "2")
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
    """A folder, and one that is not there, are no places to write to; the model is not looked for."""
    for path, words in ((str(tmp_path), "is a folder"), (str(tmp_path / "no" / "x"), "there is no such folder")):
        done = invoke("run", "-m", "missing.gguf", "-p", "x", "--stats-json", path)
        assert done.returncode in (1, 2) and (words in done.stderr or "is a directory" in done.stderr), done.stderr
    full = types.SimpleNamespace(f_blocks=100, f_bavail=0)
    with monkeypatch.context() as patch, pytest.raises(OptionError, match=f"--output {tmp_path}/x: the disk of {tmp_path} is full"):
        patch.setattr(os, "statvfs", lambda _path: full)
        require_new(tmp_path / "x", [], "--output")
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere
    with pytest.raises(OptionError, match="which is read-only"):
        require_new(tmp_path / "x", [], "--output")


def test_what_is_wrong_is_said_before_any_weight_is_read(demo, tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"no profile")
    (tmp_path / "damaged.jinja").write_text("{% for")
    run, report = ("run", demo, "-p", "x"), ("report", demo, "-o", str(tmp_path / "page.html"))
    with mock.patch.object(Engine, "loading", side_effect=AssertionError("weights are read")):
        for command in (run, report):
            assert isinstance(CliRunner().invoke(main, command).exception, AssertionError)  # where nothing is wrong
            for words, text in (
                (("--strategy", "magic"), "unknown strategy 'magic'"),
                (("--strategy", "promoe", "--expert-memory", "4M"), "moeoff calibrate"),
                (("--profile", "missing.npz"), "missing.npz"),
                (("--profile", str(tmp_path / "damaged.npz")), "damaged.npz"),
            ):
                done = CliRunner().invoke(main, [*command, *words])
                assert done.exit_code == 1 and text in done.stderr, (words, done.output, done.exception)
        done = CliRunner().invoke(main, [*run, "--chat-template-file", str(tmp_path / "damaged.jinja")])
        assert done.exit_code == 1 and "cannot be read" in done.stderr
