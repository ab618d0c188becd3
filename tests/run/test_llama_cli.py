"""Habits of llama.cpp's programs: their most used options are taken, or refused with the reason."""

import os
import re
import tarfile
import types
from unittest import mock

import pytest
from click.testing import CliRunner

import fork
from helpers.files import PROSE
from helpers.models import with_metadata
from moeoff import OptionError
from moeoff.cli.llama_cli import FLAGS, REFUSED, TAKEN
from moeoff.cli.main import main
from moeoff.engine.engine import Engine
from moeoff.files import demo_model, require_new

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
    assert len(USED) >= 60 and not set(USED) - known
    assert not {flag for flags in TAKEN for flag in flags} & {flag for flags in REFUSED for flag in flags}


def test_every_habit_takes_as_many_values_as_in_llama_cpp():
    """By the table of the pinned llama.cpp: names, those of the opposite, and the form of a value."""
    pinned = fork.Fork.load()
    with tarfile.open(fork.pinned_sdist(pinned, fork.cache_root())) as sdist:
        member = next(member for member in sdist if member.name.endswith("/vendor/llama.cpp/common/arg.cpp"))
        source = sdist.extractfile(member).read().decode()
    names = r"\{(\s*\"-[^}]*)\}"
    theirs = {}
    for match in re.finditer(rf"common_arg\(\s*{names},(?:\s*{names},)?(?:[ \t]*(\"[^\n]*\",)$)?", source, re.MULTILINE):
        theirs |= dict.fromkeys(re.findall(r"\"(-[^\"]+)\"", match[1] + (match[2] or "")), bool(match[3]))
    assert len(theirs) > 300 and theirs["--color"] and theirs["-ctk"] and not theirs["--jinja"] and not theirs["-nr"]
    ours = {opt: not getattr(param, "is_flag", False) for param in main.commands["run"].params for opt in param.opts}
    gone = {"--mmap", "--no-mmap", "--mlock"}  # which people still type
    mine = {flag for flags in (*TAKEN, *REFUSED) for flag in flags} | {flag for flag in USED if flag in theirs}
    assert not mine - set(theirs) - gone, mine - set(theirs) - gone
    assert not (wrong := {flag for flag in mine & set(theirs) if ours[flag] != theirs[flag]}), wrong
    assert FLAGS <= {flag for flags in REFUSED for flag in flags}


def test_what_is_so_anyway(moeoff_command):
    anyway = [word for flags, values in TAKEN.items() for word in (flags[0], *values[:1])]
    done = moeoff_command("run", "-p", "x", "-n", "2", *anyway, "-fa", "auto", "-st", "-tb", "1", "-s", "1", "-r", "never")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("args, words", [
    (["--mlock"], "--mlock: experts come and go"), (["--n-cpu-moe", "4"], "--n-cpu-moe: experts are in moeoff's buffer"), (["-e"], "-e: the prompt is taken"),
    (["--mirostat=2"], "--mirostat: answers are drawn with --temp"), (["--grammar", "x"], "moeoff serve takes it"), (["--repack"], "round differently"), (["--color", "sometimes"], "'on', 'off', 'auto'"),
    (["--reasoning-budget", "0"], "--reasoning-budget: moeoff serve takes it"), (["--list-devices"], "moeoff doctor"), (["--xtc-threshold", "1"], "--temp"),
    (["--chat-template", "llama3"], "--chat-template: a Jinja template or chatml, not 'llama3'"), (["--chat-template", "{% for"], "cannot be read"),
])  # fmt: skip
def test_what_is_refused(moeoff_command, args, words):
    done = moeoff_command("run", "-p", "x", "-n", "2", *args)
    assert done.returncode in (1, 2) and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_contexts(moeoff_command):
    """0 is the model's own; more than it was trained for is a remark."""
    done = moeoff_command("run", "-p", "x", "-n", "2", "-c", "0")
    assert "context 256 |" in done.stderr and "trained" not in done.stderr
    done = moeoff_command("run", "-p", "x", "-n", "2", "-c", "512")
    assert done.returncode == 0 and "the model was trained for 256 tokens" in done.stderr
    done = moeoff_command("run", "-p", "x", "-n", "2", "-c", "512", "--rope-scaling", "linear", "--rope-scale", "2")
    assert done.returncode == 0 and "the model was trained" not in done.stderr


def test_contexts_of_other_commands(moeoff_command, demo, tmp_path):
    """What measures with a context that the model was not trained for says so, too."""
    said = "a context of 512: the model was trained for 256 tokens"
    assert said in moeoff_command("bench", demo, "-c", "512", "-p", "8", "-n", "0", "-r", "1", "--no-warmup").stderr
    assert "trained" not in moeoff_command("bench", demo, "-p", "8", "-n", "0", "-r", "1", "--no-warmup").stderr
    assert said in moeoff_command("eval", demo, "--text", str(PROSE), "--chunks", "1").stderr
    assert "trained" not in moeoff_command("eval", demo, "--text", str(PROSE), "--ctx", "256", "--chunks", "1").stderr


def test_templates(moeoff_command, demo, tmp_path):
    """Another than the model's; and a plain one where there is none and one is needed."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    asked = ("run", "-p", "How many?", "-n", "4", "--temp", "0")
    tokens = [int(re.search(r"prompt (\d+) tokens", moeoff_command(*asked, *more).stderr)[1]) for more in
              ([], ["--chat-template-file", str(tmp_path / "t.jinja")], ["--chat-template", "chatml"], ["--raw"])]  # fmt: skip
    assert len(set(tokens)) >= 3
    bare = with_metadata(demo, tmp_path / "bare.gguf", {"tokenizer.chat_template": None})
    done = moeoff_command(*asked, "-m", bare, "--system", "Be brief.")
    assert done.returncode == 0, done.stderr


def test_outputs_are_looked_at_before_any_weight_is_read(moeoff_command, tmp_path, monkeypatch):
    """A folder, one that is not there, and the installed package are no places to write to; the model is not looked for."""
    for path, words in ((str(tmp_path), "is a folder"), (str(tmp_path / "no" / "x"), "there is no such folder")):
        done = moeoff_command("run", "-m", "missing.gguf", "-p", "x", "--stats-json", path)
        assert done.returncode in (1, 2) and (words in done.stderr or "is a directory" in done.stderr), done.stderr
    done = moeoff_command("calibrate", demo_model(), "-o", f"{demo_model()}.npz")
    assert done.returncode == 1 and "lies in moeoff's own package" in done.stderr
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
            for words, said in (
                (("--strategy", "magic"), "unknown strategy 'magic'"),
                (("--strategy", "promoe", "--expert-memory", "4M"), "moeoff calibrate"),
                (("--profile", "missing.npz"), "missing.npz"),
                (("--profile", str(tmp_path / "damaged.npz")), "damaged.npz"),
            ):
                done = CliRunner().invoke(main, [*command, *words])
                assert done.exit_code == 1 and said in done.stderr, (words, done.output, done.exception)
        done = CliRunner().invoke(main, [*run, "--chat-template-file", str(tmp_path / "damaged.jinja")])
        assert done.exit_code == 1 and "cannot be read" in done.stderr
