"""Buffers for the largest batch are lent to the experts where a batch leaves them
untouched, and taken back before a larger batch is computed.
"""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

import moeoff
from helpers.processes import own_process
from moeoff.engine import arena_sizer
from moeoff.engine.arena_sizer import CELLS, LEAST, BorrowedBuffers, BorrowedCache
from moeoff.llamacpp.llama import api
from moeoff.system import cgroup
from moeoff.system.memory import MIB, rss

NO_CGROUP = cgroup.unavailable()
in_cgroup = pytest.mark.skipif(NO_CGROUP is not None, reason=str(NO_CGROUP))
OPTIONS = {"n_ctx": 1024, "n_threads": 2, "n_batch": 512, "n_ubatch": 512, "flash_attn": False}
ROOM = 16 * MIB  # for experts, of 88
REOPENED = 12 * MIB  # at most, that a model takes in addition when it is opened again


class Sizes:
    """A buffer of a MiB for each eight tokens and a work area of half as much; what was
    given back.
    """

    def __init__(self):
        self.asked, self.given_back, self.refuses = [], [], False

    def __call__(self, n_tokens, gives_back):
        self.asked.append(n_tokens)
        if gives_back:
            if self.refuses:
                return None
            self.given_back.append(n_tokens)
        return n_tokens // 8 * MIB, n_tokens // 16 * MIB


def test_borrowed_buffers():
    sizes = Sizes()
    buffers = BorrowedBuffers(sizes, 512)

    def batches(*tokens: int) -> None:
        for n in tokens:
            buffers.grow_bound(n)
            buffers.shrink_bound()

    assert buffers.borrowed == 0
    batches(512, 300, 1, 1, 1)
    # the next piece of the prompt may be large again
    assert buffers.bound == 512 and buffers.borrowed == 0
    batches(1)
    assert buffers.bound == LEAST and sizes.given_back == [LEAST]
    assert buffers.borrowed == (64 - 1) * MIB  # the work area was as large as it gets, and stays
    batches(20, 1, 1, 1, 1, 1)
    assert buffers.bound == 32 and sizes.given_back == [LEAST]  # three MiB are not worth new plans
    assert buffers.borrowed == (64 - 4) * MIB
    assert buffers.grow_bound(1000) and buffers.bound == 512 and buffers.borrowed == 0
    assert len(sizes.asked) == 4  # of each bound once


def test_a_work_area_that_was_never_used_is_borrowed():
    buffers = BorrowedBuffers(Sizes(), 512)
    for _ in range(4):
        buffers.grow_bound(30)
        buffers.shrink_bound()
    assert (
        buffers.bound == 32
        and buffers.borrowed == (64 - 4 + 32 - 2) * MIB
        and buffers.untouched == 6 * MIB
    )


def test_a_batch_is_planned_before_it_is_computed():
    """Budgets move from other threads while it is computed: plans made then took its
    tensors away.
    """
    sizes = Sizes()
    buffers = BorrowedBuffers(sizes, 512)
    for n in (1, 30, 500):
        buffers.grow_bound(n)
        asked = len(sizes.asked)
        assert buffers.borrowed >= 0 < buffers.untouched and len(sizes.asked) == asked


def test_what_the_system_does_not_take_back_is_not_borrowed():
    sizes = Sizes()
    sizes.refuses, buffers = True, BorrowedBuffers(sizes, 512)
    for _ in range(8):
        buffers.grow_bound(1)
        assert not buffers.shrink_bound()
    assert buffers.borrowed == 0


class Cache:
    """A KV cache of 1,000 cells of 64 KiB, of which so many are used."""

    used, cells, cell = 0, 1000, MIB // 16

    def __init__(self):
        self.given_back = 0

    def __call__(self, n_tokens, gives_back):
        self.given_back += gives_back
        return max(self.cells - self.used - n_tokens, 0) * self.cell


def test_a_borrowed_cache():
    cache = Cache()
    borrowing = BorrowedCache(cache)
    assert borrowing.borrowed == cache.cells * cache.cell and cache.given_back == 1
    untouched = cache.cells
    for n in (300, *[1] * 200, 40, 64, 1, 65, 100):
        changed, before = borrowing.reclaim(n), borrowing.borrowed
        cache.used += n
        untouched = min(untouched, cache.cells - cache.used)
        assert borrowing.borrowed <= untouched * cache.cell, "before it is touched"
        assert borrowing.borrowed >= (untouched - 2 * CELLS) * cache.cell
        assert changed or borrowing.borrowed == before
    assert cache.given_back == 1
    size = borrowing.borrowed
    cache.used -= 300  # another answer to the same question
    for _ in range(2 * CELLS):
        borrowing.reclaim(1)
        cache.used += 1
    assert borrowing.borrowed > size and cache.given_back == 2
    assert borrowing.return_all() and borrowing.borrowed == 0 and not borrowing.return_all()
    # llama.cpp moves what is cached when the next batch comes
    assert not borrowing.reclaim(500) and borrowing.borrowed == 0
    borrowing.reclaim(1)
    assert borrowing.borrowed == cache(1 + CELLS, False) and cache.given_back == 3
    borrowing.reclaim(2000)
    assert borrowing.borrowed == 0


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 4000, n).tolist()


class Outcome:
    """Results of turns: the arena before each batch is computed, each batch's outputs,
    and the experts in memory after each turn.

    Its numbers are the process's: one at a time.
    """

    def __init__(self, model: str, turns, **options):
        self.arenas, self.outputs, self.residents = [], [], []
        with moeoff.Llama(model, **OPTIONS, **options) as llm:
            self._llm, engine = llm, llm.engine
            self.plan, begin = engine.plan, engine.begin

            def watched(*args):
                begin(*args)
                self.arenas.append(engine.buffer.stats().cache_bytes)

            engine.begin = watched
            for seed, n in enumerate(turns):
                llm.reset()
                self._eval(n, seed)
                for i in range(12):
                    self._eval(1, seed + i)
                self.residents.append(engine.buffer.stats().resident_slices)

    def _eval(self, n: int, seed: int) -> None:
        self._llm.eval(np.random.default_rng(seed).integers(10, 4000, n).tolist())
        logits = api.llama_get_logits_ith(self._llm.context_handle, -1)
        self.outputs.append(np.ctypeslib.as_array(logits, (self._llm.n_vocab(),)).copy())


def needs(model: str) -> int:
    """Bytes of a model without its experts, as this process is."""
    with moeoff.Llama(model, memory="4G", **OPTIONS) as llm:
        return llm.engine.plan.fixed


@own_process
def test_experts_have_what_short_prompts_leave(grown):
    turns = (20, 400, 30, 520, 12)
    without = Outcome(grown, turns, expert_memory=ROOM)
    lent = Outcome(grown, turns, memory=needs(grown) + ROOM)
    batches = [n for turn in turns for n in (*([512] * (turn // 512)), turn % 512, *([1] * 12))]
    ends = np.cumsum([turn // 512 + 13 for turn in turns]) - 1  # the last of each turn
    plan = lent.plan
    assert len(lent.arenas) == len(batches)
    for n, arena in zip(batches, lent.arenas, strict=True):
        if n > 256:
            assert arena <= plan.arena + plan.state // 2, (
                "what a large batch touches had been taken back before it was computed"
            )
    assert all(lent.arenas[end] > plan.arena + 0.8 * plan.compute for end in ends)
    assert lent.arenas[ends[1] + 1] > plan.arena + 0.5 * plan.compute, (
        "of a short prompt hardly anything is taken back"
    )
    assert all(
        more > 1.2 * fewer for more, fewer in zip(lent.residents, without.residents, strict=True)
    )
    assert all(np.array_equal(a, b) for a, b in zip(lent.outputs, without.outputs, strict=True))


def resident(llm: moeoff.Llama) -> int:
    """Bytes of the process that are not the experts'."""
    return rss() - llm.engine.buffer.stats().arena_committed


@pytest.mark.parametrize("flash_attn", [True, pytest.param(False, marks=pytest.mark.slow)])
@own_process
def test_experts_have_what_the_conversation_does_not_fill(grown, flash_attn):
    """Experts have the unused part of a long context's KV cache; without flash
    attention that of its keys alone.
    """
    options = {"n_ctx": 2048, "n_ubatch": 128, "n_batch": 128, "flash_attn": flash_attn}
    text = tokens(500)

    def logits(llm: moeoff.Llama) -> np.ndarray:
        rows = []
        for turn in (text[:20], text, text[:30]):
            llm.reset()
            for begin in range(0, len(turn), 128):
                llm.eval(turn[begin : begin + 128])
                rows.append(
                    np.ctypeslib.as_array(
                        api.llama_get_logits_ith(llm.context_handle, -1), (llm.n_vocab(),)
                    ).copy()
                )
        return np.array(rows)

    with moeoff.Llama(grown, expert_memory=ROOM, **options) as llm:
        expected = logits(llm)
    # now: what closed models leave to the process counts
    with moeoff.Llama(grown, memory="4G", **options) as llm:
        fixed = llm.engine.plan.fixed
    with moeoff.Llama(grown, memory=fixed + ROOM, **options) as llm:
        plan, arena = llm.engine.plan, lambda: llm.engine.buffer.stats().cache_bytes
        lendable = plan.state if flash_attn else plan.state // 2
        assert (
            plan.state > 8 * MIB
            and min(0.9 * lendable, plan.arena_full - plan.arena) <= arena() - plan.arena
        ), "nothing of it is resident yet"
        llm.eval(text[:20])
        beginning, before = arena(), resident(llm)
        for first in range(20, 1500, 128):
            llm.eval([text[i % 500] for i in range(first, first + 128)])
        assert arena() < beginning
        state = llm.save_state()
        end = resident(llm)
        assert end > before + 0.5 * lendable, "it was not resident, and is"
        llm.clear_context()
        assert resident(llm) < end - 0.5 * lendable, "emptied, it is the system's"
        llm.load_state(state)
        assert llm.n_tokens == 20 + 128 * 12 and arena() <= plan.arena, (
            "its place had been taken back"
        )
        llm.clear_context()
        assert np.array_equal(logits(llm), expected)


class Conversations:
    """Prompts for a server, asked by number; what was lent of its KV cache when a batch
    was about to be computed, and of that what is not touched.
    """

    N = 220  # tokens, of the 256 that the model was trained with

    def __init__(self, server: moeoff.Server):
        self._server, engine = server, server.engine
        self.lent, self.arenas, self.fills = [], [], []
        begin, fill, borrowed = engine.begin, engine.sizer.fill, engine.sizer._borrowed

        def watched(*args):
            untouched = borrowed and borrowed[1]._unused(0, False)
            begin(*args)
            self.arenas.append(engine.buffer.stats().cache_bytes)
            if borrowed:
                self.lent.append((borrowed[1].borrowed, untouched))

        def filled(n_tokens):
            self.fills.append(n_tokens)
            fill(n_tokens)

        engine.begin, engine.sizer.fill = watched, filled

    def ask(self, seed: int, n: int = N, **more) -> list[int]:
        body = {
            "prompt": tokens(n, seed),
            "n_predict": 8,
            "ignore_eos": True,
            "temperature": 0,
            "return_tokens": True,
        }
        return self.post("/completion", **body, **more)["tokens"]

    def post(self, path: str, **body) -> dict:
        answer = httpx.post(self._server.url + path, json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()


@own_process
def test_experts_of_a_server_have_what_its_conversations_do_not_fill(grown, tmp_path):
    """Prompts that come back from the prompt cache, or from a slot's file, take their
    cells back before they are written there.
    """
    options = {
        "n_ctx": 2048,
        "n_ubatch": 128,
        "n_batch": 128,
        "n_threads": 2,
        "parallel": 8,
        "cache_ram": "64M",
        "kv_disk": 0,
    }
    # the first gives way, and comes back
    turns = [(0, Conversations.N), *((seed, 30) for seed in range(1, 6)), (0, Conversations.N)]
    with moeoff.Server(grown, port=0, expert_memory=2 * ROOM, **options) as server:
        conversations = Conversations(server)
        expected = [conversations.ask(*turn) for turn in turns]
        assert Conversations.N < conversations.fills[0] < 256
    with pytest.raises(moeoff.BudgetError) as refused:
        moeoff.Server(grown, port=0, memory="10M", **options)
    with moeoff.Server(
        grown,
        port=0,
        memory=refused.value.hint["memory"] + 2 * ROOM,
        args=["--slot-save-path", str(tmp_path)],
        **options,
    ) as server:
        conversations, plan = Conversations(server), server.engine.plan
        assert [conversations.ask(*turn) for turn in turns] == expected and Conversations.N in (
            n - 7 for n in conversations.fills
        )
        most = max(conversations.arenas)
        assert most - plan.arena >= min(0.8 * plan.state, 0.9 * (plan.arena_full - plan.arena))
        conversations.ask(50, id_slot=3)
        conversations.post("/slots/3?action=save", filename="kept")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(conversations.ask, range(30, 38)))
        filled = conversations.arenas[-1]
        assert filled < most - 0.4 * plan.state
        for slot in range(8):
            conversations.post(f"/slots/{slot}?action=erase")
        for seed in range(40, 44):
            conversations.ask(seed, 30, id_slot=1)
        assert conversations.arenas[-1] > filled + 0.2 * plan.state
        assert (
            conversations.post("/slots/3?action=restore", filename="kept")["n_restored"] > 0
            and conversations.fills[-1] == 2048
        )
        conversations.ask(44, 30, id_slot=1)
        assert all(lent <= untouched for lent, untouched in conversations.lent)


def test_a_server_that_moves_what_is_cached_gets_all_of_it_back_first(grown):
    """With --cache-reuse llama-server moves keys, in every cell, when a prompt goes on
    as another one did behind a gap.
    """
    options = {
        "n_ctx": 2048,
        "n_ubatch": 128,
        "n_batch": 128,
        "n_threads": 2,
        "parallel": 1,
        "cache_ram": 0,
        "kv_disk": 0,
    }
    with moeoff.Server(
        grown, port=0, memory="1G", args=["--cache-reuse", "16"], **options
    ) as server:
        conversations = Conversations(server)
        text = tokens(200)
        for prompt in (text, text[:40] + text[80:]):
            conversations.post(
                "/completion", prompt=prompt, n_predict=2, ignore_eos=True, temperature=0
            )
        assert conversations.lent[0][0] > 0 and 0 in [lent for lent, _ in conversations.lent]


@own_process
def test_slots_that_nothing_was_read_into_are_no_room(grown):
    """As of a warm start that a prompt has ended: what they do not hold is not what the
    process does not need.
    """
    # little to lend: the arena stays far below what could fill
    options = OPTIONS | {"n_batch": 64, "n_ubatch": 64, "n_ctx": 256}
    with moeoff.Llama(grown, memory="4G", **options) as llm:
        fixed = llm.engine.plan.fixed
    with moeoff.Llama(grown, memory=fixed + ROOM // 2 + REOPENED, **options) as llm:
        for n in (20, *[1] * 8):
            llm.eval(tokens(n))
        buffer = llm.engine.buffer
        buffer.clear()
        before = buffer.stats()
        unread = min(before.arena_committed, (llm.engine.plan.arena_full - before.cache_bytes) // 2)
        assert unread > 4 * MIB
        arena_sizer.rss = lambda: rss() - unread
        llm.engine.sizer.fit_budget()
        assert buffer.stats().cache_bytes == before.cache_bytes


@own_process
def test_what_is_reserved_is_not_free_before_it_is_touched(grown):
    """As for a prompt that a server is about to read, while another one's memory is
    given back.
    """
    budget = needs(grown) + ROOM + REOPENED
    with moeoff.Llama(grown, memory=budget, **OPTIONS) as llm:
        for n in (20, *[1] * 8):
            llm.eval(tokens(n))
        sizer, reserved = llm.engine.sizer, 0
        for nbytes in (sizer.plan.arena - 4 * MIB, 2 * MIB, -2 * MIB):
            sizer.reserve(nbytes)
            sizer.fit_budget()
            stats, reserved = llm.engine.buffer.stats(), reserved + nbytes
            assert (
                rss()
                - stats.arena_committed
                + sum(part.untouched for part in sizer._borrowed)
                + reserved
                + stats.cache_bytes
                <= budget
            )
        sizer.reserve(-reserved)
        assert llm.engine.buffer.stats().cache_bytes > stats.cache_bytes


@own_process
def test_nothing_is_lent_where_the_run_must_repeat(grown, tmp_path):
    run = Outcome(grown, [20], memory=needs(grown) + ROOM, trace=tmp_path / "t.trace")
    assert set(run.arenas) == {run.arenas[0]}


# In a process of its own, because peaks are the process's: prompts long and short in
# turn; what the process held, and how many experts.
LLAMA = """
import json, sys
import moeoff
from moeoff.system.memory import peak_rss, rss
model, turns = sys.argv[1], json.loads(sys.argv[2])
with moeoff.Llama(model, memory=int(sys.argv[3]), n_ctx=1024, n_threads=2, n_batch=512, n_ubatch=512) as llm:
    seen = []
    for i, n in enumerate(turns):
        llm.reset()
        llm.eval([10 + (7 * i + j * j) % 4000 for j in range(n)])
        for j in range(24):
            llm.eval([11 + (5 * i + j) % 4000])
        stats = llm.stats()
        seen.append({"peak": peak_rss(), "rss": rss(), "arena": stats.cache_bytes, "resident": llm.engine.buffer.stats().resident_slices})
    print(json.dumps({"planned": llm.engine.plan.arena, "compute": llm.engine.plan.compute, "held": llm.engine.plan.extras, "seen": seen}))
"""
SERVER = """
import json, sys, urllib.request
import moeoff
from moeoff.system.memory import peak_rss, rss
model, turns = sys.argv[1], json.loads(sys.argv[2])
with moeoff.Server(model, port=0, memory=int(sys.argv[3]), n_ctx=1024, n_threads=2, n_batch=512, n_ubatch=512, cache_ram=0) as server:
    seen = []
    for i, n in enumerate(turns):
        body = {"prompt": [10 + (7 * i + j * j) % 4000 for j in range(n)], "n_predict": 24, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(server.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        assert json.loads(urllib.request.urlopen(request, timeout=300).read())["tokens_predicted"] == 24
        stats = server.stats()
        seen.append({"peak": peak_rss(), "rss": rss(), "arena": stats.cache_bytes, "resident": server.engine.buffer.stats().resident_slices})
    print(json.dumps({"planned": server.engine.plan.arena, "compute": server.engine.plan.compute, "held": 0, "seen": seen}))
"""


@pytest.mark.cgroup
@in_cgroup
# the server keeps to what the model was trained with
@pytest.mark.parametrize("script, longest", [(LLAMA, 900), (SERVER, 230)], ids=["Llama", "Server"])
def test_budget_holds_while_it_is_lent(grown, script, longest):
    """In a cgroup of no more than the budget: prompts long and short in turn, no
    process is killed, and the peak is below.
    """
    turns = [20, longest // 2, 30, longest, 12, longest // 3, 20]
    run = [sys.executable, "-c", script, grown, json.dumps(turns)]
    least = int(
        re.search(
            r"give memory=(\d+)",
            subprocess.run([*run, str(100 * MIB)], capture_output=True, text=True).stderr,
        )[1]
    )
    memory = least + ROOM // 2
    with cgroup.memory_cgroup(memory) as group:
        done = group.run([*run, str(memory)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    report = json.loads(done.stdout)
    for turn, seen in zip(turns, report["seen"], strict=True):
        assert seen["peak"] <= memory
        assert seen["arena"] > report["planned"] + 0.8 * report["compute"], turn
    assert report["seen"][-1]["peak"] > memory - 16 * MIB - report["held"], (
        "the budget is used, but for chat templates where none was"
    )
