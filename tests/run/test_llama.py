"""moeoff.Llama as apps use it: what llama_cpp.Llama does it does alike, and what it
adds works beside that.
"""

import copy
import ctypes
import multiprocessing
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest

import moeoff
from companions import write_expert_adapter
from helpers.budgets import needed
from helpers.leaks import check_leaves_nothing
from helpers.logits import Stock, assert_bit_equal, greedy_logits
from helpers.processes import own_process, run_python
from helpers.waiting import wait_until, wait_until_still
from moeoff import BudgetError, Cancelled, OptionError
from moeoff.engine.driver import Driver
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import api
from moeoff.system.memory import rss

OPTIONS = {"n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "seed": 3}
QUESTION = [
    {"role": "user", "content": "Tom has 3 boxes with 12 apples each. How many apples has he?"}
]
PROMPT = "User: How many apples?\nAssistant:"


@pytest.fixture(scope="module")
def both(demo):
    stock = Stock(demo, **OPTIONS, logits_all=True)
    ours = moeoff.Llama(demo, expert_memory="3M", logits_all=True, **OPTIONS)
    yield stock, ours
    ours.close()
    stock.close()


def without_identity(reply):
    """Ids, times and names differ between any two calls."""
    if isinstance(reply, dict):
        return {
            k: without_identity(v) for k, v in reply.items() if k not in ("id", "created", "model")
        }
    return [without_identity(item) for item in reply] if isinstance(reply, list) else reply


def completing(**options):
    return lambda m: m.create_completion(PROMPT, **{"temperature": 0} | options)


def chatting(**options):
    return lambda m: m.create_chat_completion(QUESTION, **{"temperature": 0} | options)


def objects(kind: str, **more) -> dict:
    return {"type": "object", "properties": {"n": {"type": kind}}, **more}


FUNCTION = {"name": "add", "parameters": objects("integer")}
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 11, "repeat_penalty": 1.1}
JSON = {"type": "json_object"}
CALLS = {
    "completion": completing(max_tokens=24),
    "sampled": completing(max_tokens=24, **SAMPLED),
    "call": lambda m: m(PROMPT, max_tokens=8, temperature=0, echo=True),
    "stop": completing(max_tokens=60, stop=["\n"]),
    "stream": lambda m: list(completing(max_tokens=12, stream=True)(m)),
    "logprobs": completing(max_tokens=6, logprobs=3),
    "chat": chatting(max_tokens=24),
    "chat stream": lambda m: list(chatting(max_tokens=12, stream=True)(m)),
    "chat logprobs": chatting(max_tokens=6, logprobs=True, top_logprobs=2),
    "json": chatting(max_tokens=40, response_format=JSON),
    "schema": chatting(
        max_tokens=40, response_format=JSON | {"schema": objects("integer", required=["n"])}
    ),
    "tools": chatting(
        max_tokens=40,
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice={"type": "function", "function": {"name": "add"}},
    ),
    "logit_bias": completing(max_tokens=8, logit_bias={20: 5.0}),
    "tokens": lambda m: [
        m.tokenize(b"Hello\tworld"),
        m.detokenize([72, 300, 901]).decode(errors="replace"),
        m.n_vocab(),
        m.token_eos(),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_same_as_llama_cpp(both, name):
    stock, ours = both
    try:
        expected = without_identity(CALLS[name](stock))
    except Exception as error:  # what the class refuses for this model, ours refuses alike
        with pytest.raises(type(error)):
            CALLS[name](ours)
        return
    assert without_identity(CALLS[name](ours)) == expected


def test_save_and_load_state(both):
    stock, ours = both
    texts = []
    for model in (stock, ours):
        model.reset()
        model.eval(model.tokenize(PROMPT.encode()))
        state = model.save_state()
        first = [t for t, _ in zip(model.generate([5, 6], temp=0, reset=False), range(8))]
        model.load_state(state)
        second = [t for t, _ in zip(model.generate([5, 6], temp=0, reset=False), range(8))]
        assert first == second
        texts.append(first)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("pooling", [{}, {"pooling_type": 1}], ids=["of tokens", "of texts"])
def test_embeddings(demo, pooling):
    """One for each text: llama.cpp then wants an output of every token, also when it
    only plans a graph.
    """
    options, texts = OPTIONS | {"embedding": True} | pooling, ["an apple", "the sea"]
    stock = Stock(demo, **options)
    expected = stock.create_embedding(texts)["data"]
    stock.close()
    with moeoff.Llama(demo, expert_memory="1M", **options) as ours:
        assert ours.create_embedding(texts)["data"] == expected


def test_adapters_of_experts(demo, tmp_path):
    """A LoRA adapter of every matrix of the experts, which stays in memory as a whole:
    as in stock llama.cpp.
    """
    options = OPTIONS | {
        "lora_path": write_expert_adapter(demo, tmp_path / "adapter.gguf"),
        "logits_all": True,
    }
    stock, tokens = Stock(demo, **options), list(range(3, 12))
    expected = greedy_logits(stock, tokens, 8)
    stock.close()
    with moeoff.Llama(demo, expert_memory="3M", **OPTIONS, logits_all=True) as plain:
        assert np.abs(greedy_logits(plain, tokens, 8) - expected).max() > 0.1
    with moeoff.Llama(demo, expert_memory="3M", **options) as ours:
        assert_bit_equal(greedy_logits(ours, tokens, 8), expected)


def test_new_plans_keep_a_control_vector(demo):
    """llama.cpp plans its buffers anew where experts get slots on a device."""
    tokens = [1, 17, 23, 42, 99]
    with moeoff.Llama(demo, expert_memory="3M", **OPTIONS, logits_all=True) as llm:
        plain = greedy_logits(llm, tokens, 4)
        n_embd = llm.n_embd()
        vector = np.full((llm.engine.model_index.n_layer, n_embd), 0.5, np.float32)
        data = vector.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        assert (
            api.llama_set_adapter_cvec(
                llm.context_handle, data, vector.size, n_embd, 1, len(vector)
            )
            == 0
        )
        steered = greedy_logits(llm, tokens, 4)
        assert np.abs(steered - plain).max() > 0.1
        assert native.replan(llm.context_handle) == 0
        assert_bit_equal(greedy_logits(llm, tokens, 4), steered)


def test_no_tensor_is_mapped(demo):
    """By default llama.cpp maps some that are larger than 4 GiB: no plan of memory
    would have them.
    """
    with moeoff.Llama(demo, expert_memory="3M", **OPTIONS) as llm:
        assert llm.model_params.lazy_mode == api.LLAMA_LAZY_MODE_OFF


def test_a_copy_is_opened_with_the_same_options(demo):
    options = OPTIONS | {
        "expert_memory": "2M",
        "strategy": "lfu",
        "split_mode": 1,
        "logits_all": True,
        "type_k": "q8_0",
        "yarn_attn_factor": 1.0,
    }
    with moeoff.Llama(demo, **options) as llm, copy.deepcopy(llm) as other:
        assert other.engine.config == llm.engine.config
        assert without_identity(CALLS["completion"](other)) == without_identity(
            CALLS["completion"](llm)
        )


def test_a_spawned_process_opens_its_own(demo):
    with (
        moeoff.Llama(demo, expert_memory="2M", **OPTIONS) as llm,
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        assert pool.apply_async(llm.tokenize, (b"Hello",)).get(120) == llm.tokenize(b"Hello")


def test_prefix_cache(demo):
    from llama_cpp import LlamaRAMCache

    with moeoff.Llama(demo, expert_memory="3M", **OPTIONS) as llm:
        llm.set_cache(LlamaRAMCache())
        first = CALLS["completion"](llm)
        assert without_identity(CALLS["completion"](llm)) == without_identity(first)


def test_cancel_from_another_thread(demo, capfd):
    with moeoff.Llama(demo, expert_memory="400K", strategy="lru", n_ctx=2048, n_threads=2) as llm:
        llm.cancel()  # nothing in progress: nothing happens
        expected = without_identity(CALLS["completion"](llm))
        chosen = threading.Event()
        llm.set_gate_callback(lambda event: chosen.set())
        canceller = threading.Thread(target=lambda: chosen.wait(300) and llm.cancel())
        canceller.start()
        with pytest.raises(Cancelled):
            llm.create_completion(
                PROMPT, max_tokens=2000, temperature=0, logit_bias={llm.token_eos(): -100.0}
            )
        canceller.join()
        assert llm.n_tokens < 1500
        assert without_identity(CALLS["completion"](llm)) == expected
    # llama.cpp takes a graph that was ended for one that has failed
    assert capfd.readouterr().err == ""


def test_figures_of_a_prompt_that_was_cancelled(demo):
    """The computed part of a cancelled prompt counts at once, not when the next one
    comes; CPU time is counted.
    """
    with moeoff.Llama(demo, expert_memory="400K", strategy="lru", n_ctx=1024, n_threads=2) as llm:
        llm.set_gate_callback(lambda event: llm.cancel() if event.gate == 5 else None)
        with pytest.raises(Cancelled):
            llm.eval(list(range(300, 800)))
        counted = llm.engine.prompt_tokens
        assert 0 < counted < 500
        assert llm.stats().prompt_tokens == counted
        assert llm.stats().prompt_tps > 0
        assert llm.stats().cpu_seconds > 0
        llm.reset_stats()
        assert llm.engine.prompt_tokens == 0


def test_a_batch_that_llama_cpp_cannot_compute(demo):
    with moeoff.Llama(demo, n_ctx=256, expert_memory="1M") as llm:
        expected = llm.create_completion("Once", max_tokens=4, temperature=0)["choices"]
        llm.clear_context()
        llm.decode_batch([1] * 256, 0, 255)
        with pytest.raises(
            moeoff.ComputeError, match="llama.cpp could not compute 8 tokens: ."
        ) as caught:
            llm.decode_batch([1] * 8, 256, 263)
        assert isinstance(caught.value, RuntimeError)
        llm.clear_context()
        assert llm.create_completion("Once", max_tokens=4, temperature=0)["choices"] == expected


def test_on_stats_tells_each_answer(demo):
    seen = []
    with moeoff.Llama(demo, expert_memory="4M", on_stats=seen.append, **OPTIONS) as llm:
        CALLS["completion"](llm)
        list(CALLS["stream"](llm))
        total = llm.stats()
    assert len(seen) == 2
    assert seen[0].prompt_tokens > 3 and seen[0].gen_tokens >= 8
    assert sum(s.demand_misses for s in seen) == total.demand_misses
    assert sum(s.bytes_read for s in seen) <= total.bytes_read
    assert all(0 < s.hit_rate < 1 and s.gen_tps > 0 for s in seen)


def test_progress(demo):
    fractions = []
    with moeoff.Llama(demo, expert_memory="1M", progress=fractions.append, n_ctx=64):
        pass
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 10


@own_process
def test_set_memory(demo):
    with moeoff.Llama(demo, memory=rss() + (150 << 20), **OPTIONS) as llm:
        expected = without_identity(CALLS["completion"](llm))
        full = llm.stats().cache_bytes
        needed = llm.engine.plan.fixed + (8 << 20)
        llm.set_memory(needed)
        small = llm.stats()
        assert small.budget_bytes == needed and small.cache_bytes < full
        assert llm.engine.buffer.stats().arena_committed <= small.cache_bytes
        assert without_identity(CALLS["completion"](llm)) == expected
        with pytest.raises(BudgetError, match="too small"):
            llm.set_memory("30M")
        with pytest.raises(OptionError):
            llm.set_memory("much")
        assert llm.stats().budget_bytes == needed
        llm.set_memory(rss() + (150 << 20))
        assert llm.stats().cache_bytes == full
        assert without_identity(CALLS["completion"](llm)) == expected


def test_arena_gives_way_when_the_process_grows(grown):
    """An app that takes 20 MB more than planned still stays below the budget."""
    budget = needed(grown, n_ctx=256, n_threads=2) + 56 << 20  # for some of its 81 MiB of experts
    code = f"""
import numpy as np, moeoff
from moeoff.system.memory import peak_rss, rss
llm = moeoff.Llama({grown!r}, memory={budget}, n_ctx=256, n_threads=2)
llm.eval(list(range(10, 200)))
before = llm.stats().cache_bytes
held = []
for i in range(40):
    held.append(np.ones(1 << 17))
    llm.eval([i + 5]) if llm.n_tokens < 250 else None
after = llm.stats().cache_bytes
assert after < before, (before, after)
assert peak_rss() <= {budget}, peak_rss() / (1 << 20)
"""
    run_python(code)


def test_warm_start(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = OPTIONS | {"expert_memory": "17M", "strategy": "lru"}  # not quite all
    with moeoff.Llama(demo, warm=True, **options) as cold:
        text = without_identity(CALLS["completion"](cold))
        resident = cold.engine.buffer.residency()
        misses = cold.stats().demand_misses
    assert len(list((tmp_path / "moeoff" / "warm").glob("*.npz"))) == 1
    with moeoff.Llama(demo, warm=True, **options) as warm:
        n_resident = int(np.unpackbits(resident).sum())
        wait_until(lambda: warm.engine.buffer.stats().resident_slices >= n_resident)
        assert (warm.engine.buffer.residency() == resident).all()
        assert without_identity(CALLS["completion"](warm)) == text
        # of those that went before the end
        assert misses > 500 and warm.stats().demand_misses < misses / 10
        assert warm.stats().prefetch_issued == 0
    (path,) = (tmp_path / "moeoff" / "warm").glob("*.npz")
    path.write_bytes(b"damaged")
    with moeoff.Llama(demo, warm=True, **options) as llm:  # a cold start, no error
        assert without_identity(CALLS["completion"](llm)) == text


def test_a_warm_start_loads_everything_where_it_fits(demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # never closed before
    with moeoff.Llama(demo, warm=True, **OPTIONS | {"expert_memory": "100M"}) as llm:
        buffer = llm.engine.buffer
        wait_until(
            lambda: (
                buffer.stats().resident_slices == len(buffer.tensors) * buffer.priorities.shape[1]
            )
        )
        llm("Hello", max_tokens=8, temperature=0)
        assert llm.stats().demand_misses == 0


def test_room_that_is_left_is_filled_while_nothing_computes(demo):
    """A first prompt reads less, to the same bits; what is there already is not evicted
    for it, and every layer gets its share.
    """
    options = OPTIONS | {"expert_memory": "12M", "strategy": "score", "logits_all": True}  # of 18
    misses, outputs = [], []
    for warm in (False, True):
        with moeoff.Llama(demo, **options) as llm:
            buffer = llm.engine.buffer
            if warm:
                llm.engine.watch_prompts()
            for _ in range(2):
                llm.engine.idle()
                wait_until_still(lambda buffer=buffer: buffer.stats().reads, 0.3)
            stats, each = buffer.stats(), (buffer.residency() == 0b1110).sum(axis=1)
            assert stats.evictions == 0 and stats.arena_committed <= stats.cache_bytes
            assert (
                (stats.arena_committed > 0.95 * stats.cache_bytes and np.ptp(each) <= 1)
                if warm
                else stats.reads == 0
            )
            outputs.append(greedy_logits(llm, llm.tokenize(PROMPT.encode()), 4))
            misses.append(llm.stats().demand_misses)
    assert_bit_equal(*outputs)
    assert misses[1] < 0.7 * misses[0]


def test_what_prompts_need_comes_back_while_nothing_computes(demo):
    """An answer takes the room of its prompt's experts: a next prompt that needs the
    same ones reads less, to the same bits.
    """
    options = OPTIONS | {"expert_memory": "8M", "strategy": "score", "logits_all": True}  # of 18
    misses, outputs = [], []
    for watched in (False, True):
        with moeoff.Llama(demo, **options) as llm:
            if watched:
                llm.engine.watch_prompts()
            prompt = llm.tokenize(PROMPT.encode())
            greedy_logits(llm, prompt, 64)
            llm.engine.idle()
            wait_until_still(lambda buffer=llm.engine.buffer: buffer.stats().reads, 0.3)
            llm.reset()
            llm.reset_stats()
            outputs.append(greedy_logits(llm, prompt, 1))
            misses.append(llm.stats().demand_misses)
    assert_bit_equal(*outputs)
    assert misses[1] < 0.9 * misses[0]


@pytest.mark.perf
def test_a_warm_start_gives_way(grown):
    """Once a prompt computes, what was not yet loaded of the last session is left out,
    and the prompt's experts come at once. (Loading all of it takes a hundred times as long
    as until a prompt begins, unless others use the machine.)
    """
    with moeoff.Llama(grown, expert_memory=1 << 30, io_threads=1, n_ctx=64, strategy="lru") as llm:
        buffer = llm.engine.buffer
        n_gates, n_experts = buffer.priorities.shape
        queued = sum(buffer.preload(gate, range(n_experts)) for gate in reversed(range(n_gates)))
        assert queued == len(buffer.tensors) * n_experts
        llm.eval([5])
        wait_until_still(lambda: buffer.stats().reads)
        resident, stats = buffer.stats().resident_slices, llm.stats()
        assert stats.demand_hits + stats.demand_misses <= resident < queued
        buffer.preload(0, range(n_experts))  # later ones are loaded again while nothing computes
        wait_until(lambda: (buffer.residency()[0] == 0b1110).all())


@own_process
def test_twenty_cycles_leave_nothing(demo):
    def cycle():
        with moeoff.Llama(demo, expert_memory="2M", n_ctx=64, n_threads=2) as llm:
            llm.set_gate_callback(lambda event: None)
            llm.create_completion("Hello", max_tokens=4)

    check_leaves_nothing(cycle, 20, 8 << 20, warm_ups=3)


@pytest.mark.parametrize("order", ["a.close(); del b", "a.x = b; b.x = a"])
def test_any_order_at_interpreter_exit(demo, order):
    code = (
        f"import moeoff\na = moeoff.Llama({demo!r}, expert_memory='1M', n_ctx=64)\nb ="
        f" moeoff.Llama({demo!r}, expert_memory='1M', n_ctx=64)\na.eval([1, 2]);"
        f" b.eval([3])\n{order}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr


@own_process
def test_what_a_driver_takes_the_experts_lose(demo):
    """The driver's tables come after the arena was sized: 13 MiB of router rows with 48
    gates of 128 experts.
    """
    held, budget = [], rss() + (100 << 20)

    def attach(*args, **kwargs) -> None:
        held.append(bytes(range(256)) * (32 << 12))  # 32 MiB

    with moeoff.Llama(demo, memory=budget, **OPTIONS) as llm:
        before = llm.engine.plan
    with (
        mock.patch.object(Driver, "attach", attach),
        moeoff.Llama(demo, memory=budget, **OPTIONS) as llm,
    ):
        plan = llm.engine.plan
        assert plan.process > before.process + (24 << 20)
        assert llm.stats().cache_bytes == plan.arena and plan.fixed + plan.arena <= budget
