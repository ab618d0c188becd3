"""A load that exercises the slots of a server and its prompt cache, and a check of
every answer.

Several clients ask at the same time, in pinned and unpinned slots, with prompts that
share beginnings; some of them close their stream before its end. Each answer must be
the greedy one that the model gives alone.

Equal tokens can be expected only where a token's result does not depend on the other
tokens of its batch. By default it does. On the demo model 8 of 60 greedy answers of 100
tokens differ with one slot, because a prompt whose beginning is reused is divided into
other micro-batches, and 13 to 26 with two to four slots, because kernels round a row
differently beside others. With one slot and micro-batches of one token (`EXACT`) all
are equal. With more slots they are not: llama.cpp puts a token of each sequence into
such a micro-batch. There the model reads the answers that differ, token by token
(`check_answers`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import llama_cpp
import numpy as np

import moeoff
from helpers.servers import Service

EXACT = {"parallel": 1, "n_batch": 64, "n_ubatch": 1}
NEAR = 0.2  # logits: what batches of different shapes round apart
TOGETHER = (1, 2, 4, 48)  # tokens of an answer in one batch: first as a server with one client
PATIENCE = 30  # seconds without a byte after which a client has been forgotten
NAMES = ("Tom", "Ida", "Ben", "Ann")
STORY = " ".join(f"In the year {1900 + 7 * i} a heron stood at pond {i}." for i in range(9))
PROMPTS = (
    *(
        f"{name} has {n} apples and buys {n + 3} more. How many apples has {name}?"
        for n, name in enumerate(NAMES, 3)
    ),
    STORY,
    *(f"{STORY} {name} saw it and said:" for name in NAMES[:2]),
    f"{STORY} {NAMES[0]} saw it and said: look, a bird! {NAMES[1]} said:",
    " ".join(
        f"{name} sells {n} books to {other}."
        for n, name in enumerate(NAMES)
        for other in NAMES
        if other != name
    ),
)


@dataclass(frozen=True)
class Request:
    """One request of the load.

    Attributes:
        prompt: Index into `PROMPTS`.
        n_predict: Number of tokens to generate.
        n_read: Number of tokens after which the client closes its stream; None: it
            reads them all.
        options: More fields of the body.
    """

    prompt: int
    n_predict: int
    n_read: int | None
    options: dict[str, object]


def draw_requests(n: int, n_slots: int, n_predict: int, seed: int = 0) -> list[Request]:
    """Draw n requests: 40 % are pinned to a slot, 25 % close their stream, 10 % use no
    cache.
    """
    chance = random.Random(seed)
    requests = []
    for _ in range(n):
        n_tokens = chance.randint(1, n_predict)
        options: dict[str, object] = {"cache_prompt": chance.random() > 0.1}
        if chance.random() < 0.4:
            options["id_slot"] = chance.randrange(n_slots)
        n_read = chance.randrange(n_tokens) if chance.random() < 0.25 else None
        requests.append(Request(chance.randrange(len(PROMPTS)), n_tokens, n_read, options))
    return requests


def _body(request: Request, **more: object) -> dict[str, object]:
    fixed = {
        "prompt": PROMPTS[request.prompt],
        "n_predict": request.n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
    }
    return {**fixed, **request.options, **more}


def read_stream(url: str, request: Request) -> Iterator[list[int]]:
    """Yield the tokens of each piece of a streamed answer; closing the iterator hangs
    up.
    """
    with httpx.stream(
        "POST", f"{url}/completion", json=_body(request, stream=True), timeout=PATIENCE
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["tokens"]


def send(url: str, request: Request) -> list[int]:
    """Return the tokens of the answer that the client has read."""
    if request.n_read is None:
        answer = httpx.post(f"{url}/completion", json=_body(request), timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]
    tokens: list[int] = []
    with contextlib.closing(read_stream(url, request)) as pieces:
        for piece in pieces:
            tokens += piece
            if len(tokens) >= request.n_read:
                break
    return tokens


def check_answers(
    model: str, answers: Iterable[tuple[str, str]], tell: Callable[[str], None] = lambda _text: None
) -> list[str]:
    """Return a line for each answer in which a token is plainly not the best one.

    An answer that looks wrong is read again in the other ways in which a server may
    have computed it: with more tokens at once, and with the other way of computing
    attention. A router between two experts turns a small difference of rounding into a
    large one.

    Args:
        answers: Prompts, and the tokens of their answers as JSON.
        tell: Called with a line of progress.
    """
    behind: dict[tuple[str, str], np.ndarray] = {}
    for flash_attn, at_once in itertools.product((True, False), TOGETHER):
        doubtful = [
            key for key in answers if key not in behind or behind[key].max(initial=0) > NEAR
        ]
        if not doubtful:
            break
        tell(
            f"{len(doubtful)} answers are read, {at_once} tokens at once, flash attention"
            f" {'on' if flash_attn else 'off'}"
        )
        with moeoff.Llama(
            model, expert_memory="2G", n_ctx=1024, logits_all=True, flash_attn=flash_attn
        ) as llm:
            vocab = llama_cpp.llama_model_get_vocab(llm.model)
            ends = [
                token
                for token in range(llm.n_vocab())
                if llama_cpp.llama_vocab_is_eog(vocab, token)
            ]
            for prompt, tokens in doubtful:
                asked, answer = (
                    llm.tokenize(prompt.encode(), add_bos=True, special=True),
                    json.loads(tokens),
                )
                llm.reset()
                llm.eval(asked)
                for i in range(0, len(answer), at_once):
                    llm.eval(answer[i : i + at_once])
                logits = np.array(llm.scores[len(asked) - 1 : len(asked) + len(answer) - 1])
                # requests ignore them
                logits[:, ends] = np.minimum(
                    logits[:, ends], logits[np.arange(len(answer)), answer][:, None]
                )
                far = logits.max(axis=1) - logits[np.arange(len(answer)), answer]
                behind[prompt, tokens] = np.minimum(far, behind.get((prompt, tokens), far))
    return [
        f"{prompt!r}: token {far.argmax()} of {tokens} is {far.max():.2f} behind the best one"
        for (prompt, tokens), far in behind.items()
        if far.max(initial=0) > NEAR
    ]


def find_wrong(
    server: Service, requests: Sequence[Request], n_clients: int, model: str | None = None
) -> list[str]:
    """Send the requests from several clients at once, and return a line for each wrong
    answer.

    Args:
        model: Path of the model that reads the answers which differ from those alone.
            None: all must be equal.
    """

    def ask(request: Request) -> list[int] | Exception:
        try:
            return send(server.url, request)
        except Exception as error:  # whatever it is, it is not the answer
            return error

    n_most = max(request.n_predict for request in requests)
    alone = [
        send(server.url, Request(i, n_most, None, {"cache_prompt": False}))
        for i in range(len(PROMPTS))
    ]
    assert {len(tokens) for tokens in alone} == {n_most}, "the context is too short for this load"
    with ThreadPoolExecutor(n_clients) as pool:
        answers = list(pool.map(ask, requests))
    wrong, doubtful = [], set()
    for n, (request, tokens) in enumerate(zip(requests, answers)):
        if isinstance(tokens, Exception):
            wrong.append(f"request {n}, {request}: {type(tokens).__name__}: {tokens}")
            continue
        expected = alone[request.prompt][
            : request.n_predict if request.n_read is None else len(tokens)
        ]
        if tokens == expected:
            continue
        if model is not None and len(tokens) == len(expected):
            doubtful.add((PROMPTS[request.prompt], json.dumps(tokens)))
        else:
            first = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b),
                min(len(tokens), len(expected)),
            )
            wrong.append(
                f"request {n}, {request}: {len(tokens)} tokens, expected {len(expected)}; they"
                f" differ from token {first} on"
            )
    return wrong + (check_answers(model, doubtful) if model is not None else [])
