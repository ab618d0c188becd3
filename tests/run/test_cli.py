"""The command as people type it: text on stdout, the rest on stderr, one sentence for
everything that goes wrong.
"""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import fields
from pathlib import Path

import pexpect
import pytest
from click.testing import CliRunner

from header_model import header_model
from helpers.files import COMMAND
from helpers.processes import run_python, status_bytes
from helpers.waiting import wait_until
from moeoff.cli.bench import _listener
from moeoff.cli.client import Completion
from moeoff.cli.main import SHELLS
from moeoff.cli.run import _prompt
from moeoff.engine.stats import Stats
from moeoff.llamacpp import native
from moeoff.measure.job import BenchTest, Job
from moeoff.server.server import metrics_text
from moeoff.system.console import ProgressLine
from moeoff.system.files import demo_model

DEMO = demo_model()


def test_answers_without_a_model_or_a_prompt(moeoff_command):
    done = moeoff_command("run", "-n", "24", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5
    assert "hit rate" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_seed_and_strategy_do_not_change_the_text(invoke):
    texts = {
        invoke("run", "-n", "40", "--seed", "7", "-p", "How many apples?", *extra).stdout
        for extra in ([], ["--expert-memory", "400K", "--strategy", "lru"])
    }
    assert len(texts) == 1
    assert invoke("run", "-n", "40", "--seed", "8", "-p", "How many apples?").stdout not in texts


def test_stats_json(invoke, demo, tmp_path):
    path = tmp_path / "stats.json"
    done = invoke(
        "run",
        "-m",
        demo,
        "--raw",
        "-p",
        "Once upon a time",
        *"-n 32 --ignore-eos --warm off --expert-memory 4M --stats-json".split(),
        str(path),
    )
    assert done.returncode == 0, done.stderr
    stats = json.loads(path.read_text())
    assert set(stats) == {field.name for field in fields(Stats)}
    # the last token is sampled and not evaluated
    assert stats["gen_tokens"] == 31 and 3 <= stats["prompt_tokens"] <= 8
    assert stats["cache_bytes"] == 4 << 20
    assert stats["strategy"] == "auto"
    assert stats["model"] == demo
    names = (
        "python token_embedding weights row_cache state compute_buffers work_area outputs extras"
        " reserve experts"
    )
    assert list(stats["memory"]) == names.split()
    assert stats["memory"].pop("token_embedding") == 0 < stats["row_table_bytes"]
    assert all(n > 0 for n in stats["memory"].values())
    assert stats["memory"]["experts"] == stats["cache_bytes"]
    assert stats["demand_misses"] > 0 and stats["bytes_read"] > 0 and 0 < stats["hit_rate"] < 1
    assert stats["row_hits"] > 0 and stats["row_misses"] > 0 and stats["row_bytes_read"] > 0
    assert stats["gen_tps"] > 0 and stats["cpu_seconds"] > 0 and stats["disk_busy_seconds"] > 0


@pytest.mark.parametrize("layers", ["99", "all"])
@pytest.mark.parametrize(
    "command",
    [
        ("run", "-n", "4", "-p", "x", "--temp", "0"),
        ("bench", "-n", "4", "-p", "0", "-r", "1", "--no-warmup", "-o", "json"),
    ],
)
def test_layers_for_a_gpu_that_is_not_there_are_left_out(invoke, command, layers):
    """As by llama.cpp's programs."""
    done = invoke(*command, "-ngl", layers)
    assert done.returncode == 0 and "--n-gpu-layers has no effect: this build" in done.stderr
    if command[0] == "run":
        assert done.stdout == invoke(*command).stdout
    else:
        assert [row["n_gpu_layers"] for row in json.loads(done.stdout)] == [0]


def test_a_prompt_of_megabytes_stays_within_the_budget(demo):
    """It is refused before it is read as a whole, which takes llama.cpp's tokenizer
    dozens of bytes for each character.
    """
    code = """
import sys
from moeoff.system import memory
from moeoff.cli.main import main
try:
    main()
except SystemExit as end:
    print(memory.peak_rss() >> 20)  # of its own address space: ru_maxrss would be that of the process that forked it
    sys.exit(end.code)
"""
    args = ("run", "-m", str(demo), "-c", "256", "--memory", "300M", "--warm", "off", "--raw")
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        input="word " * 2_000_000,
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 1 and "more than the server has room for: make it shorter" in done.stderr
    ), done.stderr
    assert int(done.stdout) < 300


@pytest.mark.parametrize(
    "command", ["run", "serve", "bench", "inspect", "doctor", "convert", "eval", "calibrate"]
)
def test_the_model_in_both_forms(invoke, command):
    """MODEL and -m MODEL, for every command that has a model; both at once are too
    many, and calibrate writes nothing beside the demo model.
    """
    more = ("--text", "x.txt") if command == "eval" else ("-p", "x") if command == "run" else ()
    results = [
        invoke(command, *model, *more) for model in (("missing.gguf",), ("-m", "missing.gguf"))
    ]
    assert all(
        done.returncode == 1 and "missing.gguf" in done.stdout + done.stderr for done in results
    ), results
    assert command == "doctor" or (results[0].stdout, results[0].stderr) == (
        results[1].stdout,
        results[1].stderr,
    )
    if command != "bench":
        done = invoke(command, "missing.gguf", "-m", "missing.gguf", *more)
        assert done.returncode == 1 and "give MODEL or -m, not both" in done.stderr


def test_a_long_job_says_how_far_it_is(capsys):
    """In a pipe a line a minute, with the time left by its rate; nothing of a short
    one.
    """
    line = ProgressLine(clock=iter([0.0, 0.0, 1.0, 61.0, 62.0, 130.0]).__next__)
    for n in (0, 100, 610, 620, 1000):
        line.update("evaluating", n, 2000)
    assert (
        capsys.readouterr().err
        == "evaluating: 610 of 2000 tokens, 10 tok/s, 2:19 left\nevaluating: 1000 of 2000 tokens,"
        " 7.69 tok/s, 2:10 left\n"
    )


def test_the_time_left_of_what_slows_down(capsys):
    """A prompt's later tokens attend to more: n tokens take 0.02 n + 0.00004 n^2
    seconds, and the second thousand longer than the first.
    """
    seconds = [0.02 * n + 4e-5 * n**2 for n in range(0, 1001, 250)]
    line = ProgressLine(slows=True, clock=iter([0.0, *seconds]).__next__)
    for at in range(0, 1001, 250):
        line.update("prompt", at, 2010)
    assert capsys.readouterr().err == "prompt: 1000 of 2010 tokens, 16.7 tok/s, 2:21 left\n"


def test_bench_says_how_far_a_test_is():
    """The line shows tokens, their rate and the time left; nothing of it stays on the
    screen.
    """
    job = Job(
        "m.gguf",
        options={"memory": 99 << 20, "strategy": "auto"},
        tests=(BenchTest(64, 0), BenchTest(0, 128)),
        repetitions=2,
    )
    ours, theirs = os.openpty()
    with open(ours, "rb", 0) as screen, open(theirs, "w") as terminal:
        with redirect_stderr(terminal):
            listen = _listener(job, ProgressLine(delay=0.0, clock=itertools.count().__next__))
            for event in (
                {"test": 0, "repetition": None, "done": 16},
                {"test": 1, "repetition": 1, "done": 2},
                {"test": 1, "repetition": 1, "done": 64},
            ):
                listen({"kind": "progress"} | event)
            listen({"kind": "closed"})
        shown = screen.read(1 << 16).decode()
    assert "moeoff auto 99 MiB, pp64, warming up: 16 of 64 tokens" in shown
    assert "moeoff auto 99 MiB, tg128: 192 of 256 tokens, 62 tok/s, 0:01 left" in shown
    assert shown.endswith("\r\x1b[2K")


def summary(**figures) -> str:
    return Completion("x", "", "stop", 1, 0, 1, 256, Stats(**figures), 1.0).summary()


def test_a_bound_that_finds_nothing_says_so():
    assert "lossless: no measured lower precision is faster within 1.00%" in summary(
        max_loss=0.01, estimated_loss=0.0
    )
    assert "lossless" not in summary()


def test_a_bound_says_what_it_leaves_out():
    """Also where nothing was left out, or was measured to cost something: τ is chosen
    all the same. The share is of decoded tokens' experts alone.
    """
    bound = {"max_loss": 0.01, "tau": 0.1}
    assert (
        " | 0.0% of experts left out below a weight of 0.1 (measured loss 0.00%, bound 1.00%) | "
        in summary(**bound, estimated_loss=0.0)
    )
    told = summary(
        **bound,
        estimated_loss=0.004,
        skipped=24,
        expert_uses=1000,
        prompt_tokens=23,
        gen_tokens=2,
        experts_per_token=40,
    )
    assert (
        " | 30.0% of experts left out below a weight of 0.1 (measured loss 0.40%, bound 1.00%) | "
        in told
    )
    told = summary(
        **bound, tier="Q4_0", skipped=24, gen_tokens=2, experts_per_token=40, estimated_loss=0
    )
    assert "all experts in Q4_0, 30.0% of experts left out" in told


def test_metrics_say_what_is_given_up():
    lines = metrics_text(
        Stats(max_loss=0.01, estimated_loss=0.004, tau=0.1, tier="Q4_0").metrics()
    ).splitlines()
    assert {
        "moeoff_tau 0.1",
        'moeoff_tier_info{tier="Q4_0"} 1',
        "moeoff_max_loss 0.01",
        "moeoff_estimated_loss 0.004",
    } <= set(lines)
    plain = metrics_text(Stats().metrics())
    assert "moeoff_tau 0.0\n" in plain and 'tier="original"' in plain and "max_loss" not in plain


def test_no_warning_of_numpy_reaches_a_person():
    code = (
        "import numpy as np, sys; from moeoff.cli.main import main; main(['--version'],"
        " standalone_mode=False); np.float64(1) / np.float64(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_one_line_about_a_long_context(moeoff_command):
    """That the model was trained on a shorter one is said in our words: llama.cpp's are
    not for everyone.
    """
    done = moeoff_command("run", "-p", "x", "-n", "4", "-c", "1024")
    assert done.returncode == 0
    assert len(done.stderr.strip().splitlines()) == 2
    assert "the model was trained for 256" in done.stderr
    assert "n_ctx_train" not in done.stderr
    assert (
        "n_ctx_train"
        in moeoff_command("run", "-p", "x", "-n", "4", "-c", "1024", "--verbose").stderr
    )


def test_prompt_from_wherever(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("How many apples?\n")

    def read(prompt: str | None = None, file: str | None = None, piped: str = "") -> str | None:
        with CliRunner().isolation(input=piped):
            return _prompt(prompt, file)

    assert (
        read(file=str(file))
        == read(piped="How many apples?\n")
        == read("How many apples?")
        == "How many apples?"
    )
    assert read("How many?", piped="apples\n") == "How many?\n\napples" and read() is None


def test_json(invoke, demo):
    options = ["run", "-m", demo, "-n", "16", "--temp", "0", "-p", "How many apples are there?"]
    text = invoke(*options).stdout
    done = invoke(*options, "--json")
    answer = json.loads(done.stdout)
    assert done.stderr == ""
    assert set(answer) == {"model", "text", "finish_reason", "usage", "stats"}
    assert answer["text"].lstrip() + "\n" == text
    assert answer["finish_reason"] == "length"
    assert answer["model"] == demo
    usage = answer["usage"]
    assert usage["completion_tokens"] == 16 and usage["total_tokens"] == usage["prompt_tokens"] + 16
    assert set(answer["stats"]) == {field.name for field in fields(Stats)}
    assert answer["stats"]["prompt_tokens"] == usage["prompt_tokens"]


def test_sampling_options_reach_the_sampler(invoke):
    def answer(*words: str) -> str:
        return invoke(
            "run", "--raw", "-p", "How many apples are there?", "-n", "24", "-s", "3", *words
        ).stdout

    greedy = answer("--temp", "0")
    assert all(
        answer("--temp", "1", *likeliest) == greedy
        for likeliest in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1"))
    )
    assert answer("--temp", "2", "--top-k", "0", "--top-p", "1", "--min-p", "0") != greedy
    for penalty in (
        ("--repeat-penalty", "1.8"),
        ("--presence-penalty", "2"),
        ("--frequency-penalty", "2"),
    ):
        assert answer("--temp", "0", *penalty) != greedy


def test_stop_texts(invoke):
    options = ["run", "-n", "24", "--temp", "0", "-p", "How many apples are there?"]
    text = invoke(*options).stdout
    word = text.split()[3]
    stopped = json.loads(invoke(*options, "--stop", "never said", "-r", word, "--json").stdout)
    assert stopped["text"].lstrip() == text[: text.index(word)]
    assert stopped["finish_reason"] == "stop"


def test_help_and_import_load_nothing_heavy():
    code = (
        "import sys, moeoff; from moeoff.cli.main import main; main(['--help'],"
        " standalone_mode=False); print(*sys.modules)"
    )
    loaded = run_python(code).split()
    assert "moeoff.cli.main" in loaded
    assert not {
        "llama_cpp",
        "numpy",
        "rich",
        "prompt_toolkit",
        "sklearn",
        "gguf",
    } & set(loaded)


@pytest.mark.perf
@pytest.mark.parametrize(
    "command, limit", [(["-m", "moeoff.cli", "--help"], 0.3), (["-c", "import moeoff"], 0.4)]
)
def test_start_up_time(command, limit):
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        seconds.append(time.monotonic() - started)
    assert min(seconds) < limit, seconds


def test_ctrl_c_ends_cleanly():
    command = [
        COMMAND,
        *"run -n 100000 -c 100000 --ignore-eos --expert-memory 400K".split(),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err and "hit rate" in err


@pytest.mark.parametrize("command, code, phase", [
    ("run", 130, "planned"), ("run", 130, "loaded"), ("serve", 0, "planned"), pytest.param("serve", 0, "loaded", marks=pytest.mark.slow),
])  # fmt: skip
def test_ctrl_c_while_a_model_is_loaded(command, code, phase, tmp_path):
    """llama.cpp's errors are not said, and nothing is lost in what it calls of
    Python's. Of a model of 18 GB, from its header.
    """
    header_model("qwen3-30b-a3b", model := str(tmp_path / "model.gguf"))
    words = [
        COMMAND,
        command,
        model,
        "--memory",
        "4G",
        *(["-p", "x"] if command == "run" else ["--port", "0"]),
    ]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if phase == "planned":
        wait_until(
            lambda: any(
                os.path.realpath(entry) == model
                for entry in Path(f"/proc/{process.pid}/fd").iterdir()
            )
        )
    else:
        wait_until(lambda: status_bytes(pid=process.pid) > 600 << 20)  # of 1 GB outside the experts
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code and out == "", err
    assert err == (
        "SIGINT: stopping the server; repeat to exit at once\n" if command == "serve" else ""
    )


def test_ctrl_c_in_the_middle_of_a_long_prompt(tmp_path):
    trace = tmp_path / "t"
    command = [COMMAND, "run", "-c", "32768", "--expert-memory", "400K", "--trace", str(trace)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdin.write("apples " * 30000)
    process.stdin.close()
    process.stdin = None
    wait_until(lambda: trace.exists() and trace.stat().st_size > 1 << 16)  # some gates have chosen
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    remark, line = err.strip().splitlines()
    assert out.strip() == ""
    assert "the model was trained for 256" in remark
    assert "generated 0" in line
    assert "reused" not in err


def test_stock_binding_is_named(tmp_path):
    """Beside a llama-cpp-python that is not the fork, importing says so and how to mend
    it.
    """
    info = tmp_path / "llama_cpp_python-0.3.36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import moeoff"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "expected moeoff's build of llama-cpp-python, got 0.3.36: run `make env`" in done.stderr
    done = subprocess.run([COMMAND, "--help"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "make env" in done.stderr


def test_another_abi_is_refused():
    code = """
import llama_cpp.llama_cpp as binding
class Other:
    def __init__(self, lib):
        self.lib = lib
    def __getattr__(self, name):
        return Version() if name == "moeoff_abi_version" else getattr(self.lib, name)
class Version:
    def __call__(self):
        return 999
binding._lib = Other(binding._lib)
import moeoff.llamacpp.native
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        f"has version 999 of the expert buffer's interface, expected {native.ABI_VERSION}"
        in done.stderr
    )


# --- completion in real shells: what a person gets who types and presses Tab ---

BIN = str(Path(sys.executable).parent)
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(moeoff shell-completion bash)"',
    "zsh": 'autoload -U compinit && compinit -D -u; eval "$(moeoff shell-completion zsh)"',
    "fish": "moeoff shell-completion fish | source",
}


def shell_environment(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "XDG_CONFIG_HOME": str(home),
    }


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell, tmp_path):
    """A command's rest, an option's rest, a file's rest."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "remarkable.gguf").touch()
    child = pexpect.spawn(
        START[shell][0],
        START[shell][1:],
        env=shell_environment(tmp_path),
        cwd=str(tmp_path),
        encoding="utf-8",
        timeout=300,
        dimensions=(40, 150),
    )
    try:
        child.sendline(LOAD[shell])
        child.sendline("echo loa''ded")
        child.expect("loaded")
        for typed, rest in (
            ("moeoff insp", "ect"),
            ("moeoff run --expert-mem", "ory"),
            ("moeoff inspect rema", "rkable.gguf"),
        ):
            child.send(f"{typed}\t")
            child.expect(f"{rest}")
            child.send("\x15")  # Ctrl-U; behind Ctrl-C, bash may lose what is typed at once
            child.sendline("echo ne''xt")
            child.expect("next")
    finally:
        child.close(force=True)
