"""One object in the hands of several threads, of one that closes it, of a fork, and of
whoever interrupts it: never a signal, a hang or a wrong answer.
"""

import contextlib
import gc
import inspect
import itertools
import os
import signal
import threading
import unittest.mock
from dataclasses import dataclass

import llama_cpp
import numpy as np
import pytest

import moeoff
from companions import write_expert_adapter
from helpers.interrupts import KINDS, OPTIONS, Interrupt, at_event, at_time, within_graph
from helpers.leaks import held
from helpers.processes import own_process
from helpers.waiting import wait_until
from moeoff import BudgetError, Cancelled, MoeoffError
from moeoff.llamacpp.compute_thread import ComputeThread
from moeoff.llamacpp.llama import api
from moeoff.llamacpp.model_lock import ModelLock
from moeoff.system.memory import rss
from shape_model import SHAPES, shape_model

PROMPT = "User: How many apples?\nAssistant:"
LONG = {"max_tokens": 2000, "temperature": 0, "logit_bias": {2: -100.0}}
GIVEN_UP = "this answer was abandoned"


def answer(llm, prompt=PROMPT, n=8):
    return llm.create_completion(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]


def tokens(llm):
    """An answer without an end."""
    return llm.generate(llm.tokenize(PROMPT.encode()), temp=0)


@contextlib.contextmanager
def thread(function, *args):
    """Yields the thread, and what it raised."""
    raised = []

    def run():
        try:
            function(*args)
        except BaseException as error:
            raised.append(error)

    t = threading.Thread(target=run, daemon=True)
    t.start()
    yield t, raised
    t.join(300)
    assert not t.is_alive()


@pytest.fixture
def llm(demo):
    with moeoff.Llama(demo, **OPTIONS | {"n_ctx": 512}) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(demo):
    with moeoff.Llama(demo, **OPTIONS | {"n_ctx": 512}) as opened:
        return {n: answer(opened, n=n) for n in (8, 20)}


# --- interrupts ---


@pytest.mark.parametrize("nth", [1, 3])
def test_the_logits_of_an_interrupted_token_are_not_drawn_from(llm, expected, nth):
    """An interrupt behind a decode: the context is the token's, and the logits are not."""
    ends = itertools.count(1)

    def interrupted(*args, end=llm.engine.end) -> None:
        end(*args)
        if next(ends) == nth:
            raise KeyboardInterrupt

    with (
        unittest.mock.patch.object(llm.engine, "end", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        answer(llm)
    assert answer(llm) == expected[8]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupts_at_given_places(demo, kind):
    """Evenly over an answer, another set of places for each kind. (More kinds, at random:
    scripts/faults/faults.py objects.)
    """
    ask = KINDS[kind]
    with moeoff.Llama(demo, **OPTIONS) as llm:
        with at_event(0) as counted:
            expected = ask(llm, PROMPT)
        n = counted.places
        for nth in range(1 + len(kind), n, n // 5):
            with contextlib.suppress(Interrupt), at_event(nth) as counted:
                ask(llm, PROMPT)
            assert ask(llm, PROMPT) == expected, counted.where


# --- exceptions of callbacks ---


class OwnError(Exception):
    pass


def fails(*_args):
    raise OwnError


@pytest.mark.parametrize(
    "keywords", [{"logits_processor": [fails]}, {"stopping_criteria": [fails]}]
)
def test_exceptions_of_callbacks_reach_the_caller(llm, expected, keywords):
    kinds = {
        "logits_processor": llama_cpp.LogitsProcessorList,
        "stopping_criteria": llama_cpp.StoppingCriteriaList,
    }
    ((name, functions),) = keywords.items()
    for ask in (lambda: answer(llm), lambda: None):
        ask()
        with pytest.raises(OwnError):
            llm.create_completion(
                PROMPT, max_tokens=8, temperature=0, **{name: kinds[name](functions)}
            )
        with pytest.raises(OwnError):
            list(
                llm.create_completion(
                    PROMPT,
                    max_tokens=8,
                    temperature=0,
                    stream=True,
                    **{name: kinds[name](functions)},
                )
            )
        assert answer(llm) == expected[8]


@pytest.mark.parametrize(
    "processor, error",
    [
        (lambda _ids, scores: scores[:-1], ValueError),
        (lambda _ids, scores: np.full_like(scores, -np.inf), MoeoffError),
    ],
)
def test_a_processor_that_gives_something_else_or_leaves_nothing(llm, expected, processor, error):
    with pytest.raises(error):
        llm.create_completion(PROMPT, logits_processor=llama_cpp.LogitsProcessorList([processor]))
    assert answer(llm) == expected[8]


def test_processors_change_what_is_drawn_and_nothing_else(llm, demo):
    flip = llama_cpp.LogitsProcessorList([lambda _ids, scores: -scores])
    stock = llama_cpp.Llama(demo, n_ctx=256, n_threads=2, flash_attn=True, verbose=False)
    keywords = {"max_tokens": 6, "temperature": 0}
    assert (
        llm(PROMPT, **keywords, logits_processor=flip)["choices"]
        == stock(PROMPT, **keywords, logits_processor=flip)["choices"]
    )
    assert llm(PROMPT, **keywords)["choices"] == stock(PROMPT, **keywords)["choices"]
    stock.close()


def test_an_exception_of_progress_ends_the_load(demo):
    with pytest.raises(OwnError):
        moeoff.Llama(demo, progress=fails, **OPTIONS)


def test_an_exception_of_on_stats(demo):
    with moeoff.Llama(demo, on_stats=fails, **OPTIONS) as llm, pytest.raises(OwnError):
        answer(llm)


# --- what an interrupt leaves ---


@dataclass(frozen=True)
class Kind:
    """A model, and a prompt for it.

    Attributes:
        n: Number of tokens of a prompt: of a model whose windows are kept alone, more
            than a window.
        recurs: True for recurrent layers, whose state cannot be cut.
        batch: Number of tokens of a micro-batch.
    """

    path: str
    n: int
    options: dict
    recurs: bool = False

    @property
    def batch(self) -> int:
        return self.n // 10

    def open(self, **more) -> moeoff.Llama:
        options = OPTIONS | {
            "n_ctx": self.n + 256,
            "n_batch": self.batch,
            "n_ubatch": self.batch,
            "expert_memory": "64M",
        }
        return moeoff.Llama(self.path, **options | self.options | more)

    def words(self, seed: int, n: int | None = None) -> list[int]:
        return np.random.default_rng(seed).integers(300, 1000, self.n if n is None else n).tolist()


@pytest.fixture(scope="module", params=["attention", "recurrent", "window"])
def kind(demo, request, tmp_path_factory):
    if request.param == "attention":
        return Kind(demo, 200, {})
    shape = {"recurrent": "qwen3.6-35b-a3b", "window": "gpt-oss-20b"}[request.param]
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    shape_model(SHAPES[shape].cut(layers=4, shrink=8, hidden=64), path)
    # flash attention adds up a window's cells in the order in which they lie in the
    # cache
    return Kind(
        str(path),
        400,
        {"swa_full": False, "flash_attn": False} if request.param == "window" else {},
        recurs=request.param == "recurrent",
    )


@pytest.fixture(scope="module")
def opened(kind):
    """Two of the kind: one that is interrupted, and one that never is."""
    with kind.open() as llm, kind.open() as fresh:
        yield llm, fresh


@pytest.fixture
def pair(opened):
    for llm in opened:
        llm.clear_context()
    return opened


def turn(llm, prompt, n=4):
    """The first tokens of an answer, the logits of the last one, and how many tokens of
    the prompt were computed.
    """
    before = llm.stats().prompt_tokens
    stream = llm.generate(prompt, temp=0)
    drawn = [next(stream) for _ in range(n)]
    stream.close()
    return drawn, llm.batch_logits(1)[0].copy(), llm.stats().prompt_tokens - before


def assert_same(two):
    (drawn, logits, _), (others, other, _) = two
    assert drawn == others and (logits == other).all()


def test_interrupted_prompts_add_up(kind, pair):
    """Three that are cancelled within a micro-batch after 60 % of it."""
    (llm, fresh), prompt = pair, kind.words(1)
    for _ in range(3):
        with within_graph(llm, lambda: llm.n_tokens >= 0.6 * kind.n), pytest.raises(Cancelled):
            turn(llm, prompt)
    again = turn(llm, prompt)
    assert again[2] == 0.4 * kind.n
    assert_same([again, turn(fresh, prompt)])


def test_a_batch_of_several_micro_batches_is_cut_to_the_last_complete_one(kind):
    prompt = kind.words(2)
    with kind.open(n_batch=kind.n) as llm, kind.open(n_batch=kind.n) as fresh:
        memory = api.llama_get_memory(llm.context_handle)
        with (
            within_graph(llm, lambda: api.llama_memory_seq_pos_max(memory, 0) >= 6 * kind.batch),
            pytest.raises(Cancelled),
        ):
            turn(llm, prompt)
        again = turn(llm, prompt)
        assert again[2] == kind.n - 6 * kind.batch
        assert_same([again, turn(fresh, prompt)])


def cancel_within_a_token(stream, llm):
    with within_graph(llm), pytest.raises(Cancelled):
        next(stream)


def interrupt_after_a_token(stream, llm):
    with (
        unittest.mock.patch.object(llm.engine, "end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        next(stream)


@pytest.mark.parametrize(
    "end", [lambda stream, _llm: stream.close(), cancel_within_a_token, interrupt_after_a_token]
)
def test_the_turn_after_an_interrupted_answer_computes_what_is_new(kind, pair, end):
    (llm, fresh), prompt = pair, kind.words(3, kind.n // 2)
    stream = llm.generate(prompt, temp=0)
    drawn = [next(stream) for _ in range(6)]
    end(stream, llm)
    again = [*prompt, *drawn, *kind.words(4, 12)]
    reused = turn(llm, again)
    assert reused[2] <= 13
    # the same batches: the sixth token was computed, or not
    turn(fresh, prompt, 6 if reused[2] == 13 else 7)
    assert_same([reused, turn(fresh, again)])


def test_an_exception_behind_the_prompt_leaves_all_of_it(kind, pair):
    """And the logits, which the same prompt draws from."""
    (llm, fresh), prompt = pair, kind.words(5, kind.n // 2)
    with pytest.raises(OwnError):
        llm.create_completion(
            prompt,
            max_tokens=8,
            temperature=0,
            stopping_criteria=llama_cpp.StoppingCriteriaList([fails]),
        )
    again = turn(llm, prompt)
    assert again[2] == 0
    assert_same([again, turn(fresh, prompt)])


def test_a_prompt_that_goes_back_sees_its_whole_window(kind, pair):
    """llama.cpp says that it can go back where the window's cells are overwritten."""
    (llm, fresh), first, other = (
        pair,
        kind.words(6),
        kind.words(6)[: kind.n // 4] + kind.words(7, 30),
    )
    turn(llm, first)
    (drawn, logits, _), (others, expected, _) = turn(llm, other), turn(fresh, other)
    assert drawn == others
    np.testing.assert_allclose(logits, expected, atol=0.05)  # other batches


def test_a_second_cancel_ends_a_token_of_recurrent_layers(kind, pair):
    """The state is that before the prompt's last micro-batch then."""
    (llm, fresh), prompt = pair, kind.words(8, kind.n // 2)
    stream = llm.generate(prompt, temp=0)
    next(stream)
    with within_graph(llm, cancel=lambda: (llm.cancel(), llm.cancel())), pytest.raises(Cancelled):
        next(stream)
    again = turn(llm, prompt)
    assert again[2] == (kind.batch if kind.recurs else 0)
    assert again[0] == turn(fresh, prompt)[0]


def test_a_turn_that_goes_back_behind_a_prompt_reuses_most_of_it(kind, pair):
    """As where a template drops a thought. Recurrent layers go back to the last
    micro-batch.
    """
    (llm, fresh), prompt = pair, kind.words(9)
    turn(llm, prompt, 8)
    again = [*prompt, *kind.words(10, 12)]
    reused = turn(llm, again)
    assert reused[2] <= 13 + kind.batch * kind.recurs
    assert reused[0] == turn(fresh, again)[0]


def test_a_copy_of_a_state_is_part_of_the_budget(kind):
    with kind.open(expert_memory=None, memory="1G") as llm:
        before = llm.engine.plan.extras
        turn(llm, kind.words(11))
        assert (llm.engine.plan.extras > before) == kind.recurs


# --- several threads ---


def test_threads_take_turns(llm, expected):
    got = []
    with contextlib.ExitStack() as stack:
        for i in range(4):
            stack.enter_context(
                thread(
                    lambda n: [got.append((n, answer(llm, n=n))) for _ in range(3)], (8, 20)[i % 2]
                )
            )
    assert len(got) == 12 and all(text == expected[n] for n, text in got)


def test_a_stream_has_its_turn_to_its_end(llm, expected):
    """Another thread waits, and what it may do meanwhile it does."""
    stream = llm.create_completion(PROMPT, max_tokens=20, temperature=0, stream=True)
    text = [next(stream)]
    got, meanwhile = [], []

    def other():
        meanwhile.append(
            (
                llm.tokenize(b"an apple"),
                llm.n_vocab(),
                llm.stats().gen_tokens,
                len(llm.save_state().llama_state),
            )
        )
        got.append(answer(llm))

    with thread(other):
        wait_until(lambda: meanwhile)
        text += stream
        assert "".join(chunk["choices"][0]["text"] for chunk in text) == expected[20]
    assert got == [expected[8]]


@pytest.mark.parametrize(
    "end", [lambda stream, llm: stream.close(), lambda stream, llm: llm.cancel()]
)
def test_a_stream_that_is_ended_lets_others_in(llm, expected, end):
    stream, got = tokens(llm), []
    next(stream)
    with thread(lambda: got.append(answer(llm))):
        end(stream, llm)
    assert got == [expected[8]]


def test_a_stream_that_is_dropped_or_whose_reader_has_ended_lets_others_in(llm, expected):
    stream = tokens(llm)
    next(stream)
    del stream
    got, left = [], []
    with thread(lambda: left.append(tokens(llm)) or next(left[0])):
        pass
    with thread(lambda: got.append(answer(llm))):
        pass
    assert got == [expected[8]]
    with pytest.raises(MoeoffError, match=GIVEN_UP):
        next(left[0])


def test_the_same_thread_does_not_wait_for_itself(llm, expected):
    stream = tokens(llm)
    next(stream)
    assert answer(llm) == expected[8]
    with pytest.raises(MoeoffError, match=GIVEN_UP):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    assert answer(llm) == expected[8]


def test_cancel_between_two_tokens(llm, expected):
    stream = tokens(llm)
    next(stream)
    llm.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert answer(llm) == expected[8]


# --- closing ---


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.create_completion(PROMPT, **LONG),
        lambda llm: list(tokens(llm)),
        lambda llm: [llm.eval([5]) for _ in range(2000)],
    ],
)
def test_close_ends_what_another_thread_computes(demo, ask):
    llm, began = moeoff.Llama(demo, **OPTIONS | {"n_ctx": 512}), threading.Event()
    llm.set_gate_callback(lambda _event: began.set())
    with (
        thread(ask, llm) as (_, raised),
        thread(lambda: began.wait() and answer(llm)) as (_, waited),
    ):
        assert began.wait(300)
        llm.close()
    assert isinstance(raised[0], MoeoffError) and isinstance(waited[0], MoeoffError)


def test_close_while_others_ask_for_tokens(demo):
    llm, n = moeoff.Llama(demo, **OPTIONS), []

    def ask():
        while True:
            n.append(len(llm.tokenize(PROMPT.encode())) + llm.n_ctx() + llm.stats().bytes_read)

    with thread(ask) as (_, one), thread(ask) as (_, other):
        wait_until(lambda: len(n) > 20)
        llm.close()
    assert [type(one[0]), type(other[0])] == [MoeoffError] * 2


def test_close_from_inside(demo):
    """A callback may close the model: it is freed when the call has returned."""
    llm = moeoff.Llama(demo, **OPTIONS)

    def close(*_args):
        llm.close()
        return False

    with pytest.raises(MoeoffError):
        llm.create_completion(
            PROMPT, max_tokens=8, stopping_criteria=llama_cpp.StoppingCriteriaList([close])
        )
    assert not llm.engine.buffer.running


def test_close_with_a_half_read_stream(demo):
    llm = moeoff.Llama(demo, on_stats=lambda _stats: None, **OPTIONS)
    streams = (
        tokens(llm),
        llm.create_chat_completion([{"role": "user", "content": "Hello"}], stream=True),
    )
    next(streams[0])
    llm.close()
    for stream in streams:
        with pytest.raises(MoeoffError, match="the model is closed"):
            next(stream)
    streams[0].close()


AFTER = {
    "__call__": ("x",), "call": (len, "x"), "create_completion": ("x",), "create_chat_completion": ([{"role": "user", "content": "x"}],), "create_embedding": ("x",),
    "create_chat_completion_openai_v1": ([{"role": "user", "content": "x"}],), "detokenize": ([1, 2],), "embed": ("x",), "eval": ([1, 2],),
    "tokenize": (b"x",), "generate": ([1, 2],), "load_state": "state", "set_memory": ("300M",), "set_gate_callback": (None,),
    "batch_logits": (1,), "decode_batch": ([1], 0),
}  # fmt: skip
HARMLESS = {"close", "cancel", "set_cache", "set_seed", "on_close", "batches_as", "load", "tokenizer", "from_pretrained", "logits_to_logprobs", "longest_token_prefix"}  # fmt: skip


def methods():
    return sorted(
        {
            name
            for name, f in inspect.getmembers(moeoff.Llama, inspect.isfunction)
            if not name.startswith("_")
        }
        | {"__call__"}
    )


@pytest.mark.parametrize("closes", ["close", "fork"])
def test_every_method_after_the_end(demo, closes):
    """Also of the tokenizer that it gave out, and of a property. In a fork the same, of
    which the exit code tells.
    """
    llm = moeoff.Llama(demo, embedding=False, **OPTIONS)
    llm.eval(llm.tokenize(PROMPT.encode()))
    state, tokenizer = llm.save_state(), llm.tokenizer()

    def problems():
        lines = []
        for name in sorted(set(methods()) - HARMLESS):
            args = (state,) if name == "load_state" else AFTER.get(name, ())
            try:
                result = getattr(llm, name)(*args)
                if inspect.isgenerator(result):
                    next(result)
            except MoeoffError:
                continue
            except ImportError:  # what create_chat_completion_openai_v1 needs
                continue
            except BaseException as error:
                lines.append(f"{name}: {type(error).__name__}: {error}")
            else:
                lines.append(f"{name}: nothing")
        for what in (lambda: tokenizer.tokenize(b"x"), lambda: llm.ctx, lambda: llm.model):
            with pytest.raises(MoeoffError):
                what()
        return lines

    if closes == "close":
        llm.close()
        llm.cancel()
        assert problems() == []
        return
    pid = os.fork()
    if pid == 0:
        os._exit(bool(problems()))
    assert os.waitpid(pid, 0)[1] == 0
    llm.close()


@own_process
def test_nothing_is_left_to_the_cycle_collector(demo, tmp_path):
    """`del` without close: neither threads nor memory wait for a collection."""
    options = OPTIONS | {"expert_memory": "2M", "n_ctx": 256, "strategy": "fate"}
    options["lora_path"] = write_expert_adapter(demo, tmp_path / "adapter.gguf")

    def use() -> None:
        llm = moeoff.Llama(demo, **options)
        llm.set_gate_callback(lambda event: None)
        llm.create_completion("Hello", max_tokens=4, logit_bias={5: 1.0})
        next(llm.create_completion("Hello", max_tokens=4, stream=True))

    gc.disable()
    use()
    use()
    (threads, _), size = held(), rss()
    for _ in range(11):
        use()
    wait_until(lambda: held()[0] <= threads + 1, 60)  # one that was told to end is scheduled once
    assert rss() < size + (24 << 20)


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
@own_process
def test_a_budget_moves_whole_or_not_at_all(demo, step):
    """Wherever the move is interrupted: the arenas have what the plan says, and the
    next move and answer are as ever.
    """
    with moeoff.Llama(
        demo, **OPTIONS | {"expert_memory": None, "memory": rss() + (150 << 20)}
    ) as llm:
        text, needs, wrong, nth = answer(llm), llm.engine.plan.fixed, [], 0
        llm.set_memory(needs + (11 << 20))  # attaches what the first move attaches
        while True:
            nth += step
            before = llm.engine.plan.budget
            budget = llm.engine.plan.fixed + ((6 if nth % 2 else 11) << 20)
            with contextlib.suppress(Interrupt), at_event(nth) as counted:
                llm.set_memory(budget)
            plan, stats = llm.engine.plan, llm.engine.buffer.stats()
            if (
                plan.budget not in (before, budget)
                or stats.cache_bytes != sum(llm.engine.sizer.arenas)
                or stats.arena_committed > stats.cache_bytes
            ):
                wrong.append(f"{counted.where}: plan {plan.arena}, arenas {stats.cache_bytes}")
            if counted.where is None:
                break
        assert not wrong and nth > 10
        assert answer(llm) == text


@own_process
def test_a_budget_without_room_for_the_driver_is_refused(demo):
    """It holds the experts that compute and not the tables of what chooses them, which
    the first smaller budget brings: the old one stays.
    """
    with moeoff.Llama(
        demo, **OPTIONS | {"expert_memory": None, "memory": rss() + (150 << 20), "strategy": "fate"}
    ) as llm:
        text, plan, attach = answer(llm), llm.engine.plan, llm.engine.attach_strategy
        small = plan.floor + (4 << 20)

        def attached():
            attach()
            llm.engine.sizer.make_room(100 << 20)

        with (
            unittest.mock.patch.object(llm.engine, "attach_strategy", attached),
            pytest.raises(BudgetError),
        ):
            llm.set_memory(small)
        assert answer(llm) == text and llm.engine.plan.budget == plan.budget
        llm.set_memory(small)
        assert answer(llm) == text and llm.engine.plan.budget == small


def test_an_interrupted_wait_leaves_the_thread_free():
    """Whatever place of `take` is interrupted, the next call runs, once."""
    lock, nth = ModelLock(ComputeThread()), 0
    while True:
        nth += 1
        ran = []
        with contextlib.suppress(Interrupt), at_event(nth) as counted:
            lock.take(lambda: ran.append(nth))  # noqa: B023  it runs in this turn or never
        with thread(lock.take, lambda: None) as (_, raised):
            pass
        assert not raised and len(ran) < 2
        if counted.where is None:
            break
    assert nth > 10 and ran
    lock.thread.end()


def test_an_interrupt_ends_its_own_call_alone(llm, expected):
    """And not what the thread computes for another one meanwhile."""
    got, began, goes_on = [], threading.Event(), threading.Event()

    def other():
        began.set()
        goes_on.wait(300)
        got.append(answer(llm))

    with thread(llm.call, other) as (_, raised):
        assert began.wait(300)
        with at_time(0.1), pytest.raises(Interrupt):
            answer(llm)
        goes_on.set()
    assert got == [expected[8]] and not raised


def test_a_second_interrupt_does_not_wait(llm, expected):
    """For a callback that does not come to its end."""
    goes_on, n = threading.Event(), []

    def interrupt(*_args):
        n.append(1)
        if len(n) < 3:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(Interrupt):
            llm.call(goes_on.wait, 300)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        goes_on.set()
    assert len(n) == 2 and answer(llm) == expected[8]
