"""The process of a running model: which packages and how much memory it holds beside
the model, how it ends, and what its forks can do.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import traceback

import pytest

import moeoff
from helpers.files import ROOT
from helpers.processes import own_process, run_python
from moeoff import MoeoffError, OptionError
from moeoff.budget.dry_load import memory_sizes
from moeoff.budget.plan import RESERVE
from moeoff.llamacpp.llama import api
from moeoff.system.memory import MIB

# each takes megabytes, and nothing that answers a prompt uses it
FORBIDDEN = (
    "fastapi gguf huggingface_hub matplotlib numpy.fft numpy.random pandas prompt_toolkit pydantic"
    " rich scipy sklearn tqdm uvicorn".split()
)
CHAT = """
import json, sys, moeoff
with moeoff.Llama(sys.argv[1], n_ctx=256, memory="200M", seed=1) as llm:
    llm("The heron", max_tokens=4)
    llm.create_chat_completion([{"role": "user", "content": "What is 2 + 3?"}], max_tokens=4, stream=False)
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("runs", ["Llama", "moeoff run"])
def test_packages_of_a_running_model(demo, runs):
    if runs == "Llama":
        command = [sys.executable, "-c", CHAT, demo]
    else:
        code = (
            "import atexit, json, sys; atexit.register(lambda:"
            " print(json.dumps(sorted(sys.modules)))); from moeoff.cli.main import main; main()"
        )
        command = [
            sys.executable,
            "-c",
            code,
            "run",
            "-m",
            demo,
            "-p",
            "What is 2 + 3?",
            *"-n 4 -c 256".split(),
        ]
    out = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout
    modules = json.loads(out.splitlines()[-1])
    assert ("moeoff.engine.llama" if command[2] == CHAT else "moeoff.server.server") in modules
    assert [name for name in FORBIDDEN if name in modules] == []


@pytest.fixture(scope="module")
def measured(grown) -> dict:
    """Return what bench_process.py finds of the grown model, more than a hundred times
    what the process holds beside it.
    """
    command = [
        sys.executable,
        str(ROOT / "scripts" / "bench" / "bench_process.py"),
        grown,
        *"-c 512 --memory 200M".split(),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_what_the_process_holds_beside_the_model(measured):
    """llama.cpp's vocabulary and graphs, the driver, the queue of gate events: what
    comes with opening it, beyond the packages.
    """
    rss = measured["rss"]
    opened = rss["opened"] - measured["needed"]["weights"] - measured["needed"]["state"]
    assert opened - rss["imported"] < 20 * MIB
    assert measured["beside"] - rss["imported"] < 30 * MIB


def test_the_plan_holds(measured):
    """The difference between the plan without the reserve and the process after an
    answer is what the reserve is for.
    """
    plan, rss = measured["plan"], measured["rss"]["answered"]
    planned = (
        plan["process"]
        + plan["weights"]
        + plan["state"]
        + plan["compute"]
        + measured["needed"]["arena"]
    )
    assert rss - planned < RESERVE
    assert rss <= plan["budget"]


def test_logits_of_one_token_are_planned(demo):
    """llama.cpp plans compute buffers for the logits of every token of a micro-batch,
    which nothing wants but logits_all.
    """
    compute = {}
    for all_tokens in (False, True):
        with moeoff.Llama(demo, n_ctx=512, expert_memory="1M", logits_all=all_tokens) as llm:
            compute[all_tokens] = memory_sizes(llm).compute
            logits = 512 * 4 * llm.n_vocab()
    assert compute[True] >= logits and compute[True] - compute[False] > logits // 4


def test_logits_that_are_not_there(demo):
    """llama.cpp would end the process."""
    with moeoff.Llama(demo, n_ctx=256, expert_memory="1M") as llm:
        llm.decode_batch([1, 2, 3], 0, first_output=2)
        with pytest.raises(
            OptionError, match="logits of 2 tokens of a batch: open the model with logits_all=True"
        ):
            llm.decode_batch([1, 2, 3], 3, first_output=4)
        assert llm("A", max_tokens=2)["usage"]["completion_tokens"] > 0
    with moeoff.Llama(demo, n_ctx=256, expert_memory="1M", gate_input=True) as llm:
        llm.decode_batch([1, 2, 3], 0)
        assert llm.batch_logits(3).shape == (3, llm.n_vocab())


def test_samplers_of_earlier_answers_are_freed(demo):
    """Not by the garbage collector, which comes by when it has counted objects enough,
    however large they are.
    """
    from llama_cpp._internals import LlamaSampler

    def alive():
        return {
            id(x) for x in gc.get_objects() if isinstance(x, LlamaSampler) and x.sampler is not None
        }

    gc.collect()
    gc.disable()
    try:
        others = alive()  # of models that other tests keep open
        with moeoff.Llama(demo, n_ctx=256, expert_memory="1M") as llm:
            for _ in range(3):
                llm("A", max_tokens=2)
                llm.reset()
                llm.eval([1])
                llm.sample()
            assert len(alive() - others) <= 1
    finally:
        gc.enable()


@pytest.mark.parametrize("is_left", [False, True])
def test_it_may_end_while_a_thread_computes(demo, is_left):
    """The buffer is freed then, and the model is not: what llama.cpp asks while it
    computes still has to be there. Also beside an answer that nobody reads on.
    """
    left = 'left = llm.create_completion("A", max_tokens=9, stream=True)' if is_left else ""
    code = f"""
import threading, moeoff
llm = moeoff.Llama({demo!r}, expert_memory="4M", n_ctx=2048, n_threads=2, warm=False)
{left}
began = threading.Event()
llm.set_gate_callback(lambda _event: began.set())
threading.Thread(target=lambda: llm.eval([7] * 2000), daemon=True).start()
began.wait(300)
"""
    run_python(code)


@own_process
def test_forks_end_and_say_what_they_cannot(demo):
    """Whatever the threads did that they do not have; and the process that was copied
    goes on. A fork in which something does not end is killed by its alarm.
    """

    def forked(what) -> int:
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            try:
                what()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def text(llm) -> str:
        return llm("The heron", max_tokens=8, temperature=0)["choices"][0]["text"]

    def opens() -> None:
        with moeoff.Llama(demo, expert_memory="1M", n_ctx=64) as llm:
            assert llm("Hello", max_tokens=2)["choices"]

    assert forked(opens) == 0, "before anything was computed it is as any other process"
    llm = moeoff.Llama(demo, expert_memory="4M", n_ctx=512, n_threads=1, warm=True)
    expected = text(llm)
    stream = llm.create_completion("Hello", max_tokens=9, stream=True)
    next(stream)
    context = llm.context_handle

    def refused() -> None:
        for ask in (lambda: llm("The heron", max_tokens=8), lambda: next(stream)):
            with pytest.raises(MoeoffError, match="the model was opened in process"):
                ask()
        with pytest.raises(MoeoffError, match="this process is a fork"):
            opens()

    def compute() -> None:
        token = (api.llama_token * 1)(1)
        assert api.llama_decode(context, api.llama_batch_get_one(token, 1)) != 0

    assert [forked(what) for what in (refused, compute, llm.close)] == [0] * 3
    assert text(llm) == expected
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            llm.create_completion("Once upon a time", max_tokens=40, temperature=1.0)

    thread = threading.Thread(target=work)
    thread.start()
    found = [forked(what) for what in (refused, llm.close, lambda: None) for _ in range(3)]
    ends.set()
    thread.join()
    assert found == [0] * 9 and text(llm) == expected
