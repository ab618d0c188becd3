"""Text that a model writes by itself, to be calibrated on where there is no other: what it says is what it will be asked to compute.

Many sequences are written side by side, so that their experts are read once for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..budget.footprint import Footprint
from ..engine.chat_template import Template
from ..engine.llama import Llama
from ..engine.llama_options import read_options
from ..errors import ModelError
from ..gguf.layout import Layout

# sequences side by side, and their tokens, beginnings among them: the more sequences, the fewer bytes are read for each
SHAPES = ((64, 256), (64, 128), (64, 96), (32, 128), (32, 96), (16, 128), (16, 96), (8, 96))
_STATE_SHARE = 0.15  # of the budget, for the KV cache of all of them
_KV = {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": True}  # what is written need not be exact
TOP_K, TEMPERATURE = 40, 0.9
_BATCH = 64
OPENINGS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a refrigerator works to a curious child.",
    "A train leaves at 9:40 and arrives at 13:15. How long is the journey, and how fast is it over 290 km?",
    "def binary_search(items, target):",
    "Summarize the causes of the First World War in five sentences.",
    "Translate into French: The library closes at eight, but the garden stays open.",
    "List ten healthy breakfasts and how long each takes.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "SELECT customers.name, SUM(orders.total) FROM customers",
    "My neighbour's dog barks all night. Write a polite note.",
    "Prove that the square root of two is irrational.",
    "The patient complains of a persistent cough and a mild fever. What questions should a doctor ask?",
    "Compare electric cars with diesel cars: cost, range, repair.",
    "Escribe un poema breve sobre el mar en invierno.",
    "What are the steps to bake sourdough bread at home?",
    "import numpy as np\n\nclass Matrix:",
    "Write a product description for a waterproof backpack.",
    "Why is the sky blue, and why are sunsets red?",
    "A farmer has 17 sheep, and all but 9 run away. How many are left? Explain.",
    "Give me a plan for learning to play the piano in a year.",
    "Once upon a time, in a city built on bridges,",
    "What happened in the Roman Republic between 133 and 27 BC?",
    "<!DOCTYPE html>\n<html>\n<head>",
    "Explain compound interest with an example of 1,000 at 5 percent.",
    "Draft an e-mail that moves a meeting from Tuesday to Friday.",
    "What do bees need in a garden, month by month?",
    "The committee met on Monday to discuss the new budget.",
    "How does a transformer language model choose its next word?",
    "Write a dialogue between a detective and a reluctant witness.",
    "Solve for x: 3x + 7 = 2(x - 4) + 21.",
    "Which countries border Switzerland, and what languages are spoken there?",
    "The experiment was repeated three times, and the results",
)


class ParallelLlama(Llama):
    """Its context holds several sequences side by side."""

    def __init__(self, model: str, n_sequences: int, **options: Any):
        self._n_sequences = n_sequences
        super().__init__(model, **options)


def sequences_within(model: str, memory: int) -> tuple[int, int]:
    """Of SHAPES, the first that leaves the experts most of the memory."""
    layout = Layout.read(model)
    keywords = read_options({**_KV, "n_batch": _BATCH, "n_ubatch": _BATCH})
    for n, length in SHAPES[:-1]:
        if Footprint.of(layout, n * length, keywords).planned.state <= _STATE_SHARE * memory:
            return n, length
    return SHAPES[-1]


@dataclass
class _Sequence:
    forced: list[int]  # tokens of its beginning that it has not read
    written: list[int] = field(default_factory=list)
    position: int = 0


class Writer:
    """A model that writes. Use with `with`.

    Args:
        memory: budget in bytes.
        seed: of what is drawn.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """

    def __init__(self, model: str, *, memory: int, seed: int = 0, **options: Any):
        n, self._length = sequences_within(model, memory)
        self._llm = ParallelLlama(model, n, memory=memory, n_ctx=n * self._length, n_batch=_BATCH, n_ubatch=_BATCH, **{**options, **_KV})
        self._random = np.random.default_rng(seed)
        try:
            self._template: Template | None = Template(self._llm)
        except ModelError:
            self._template = None
        self._openings = 0
        self._sequences = [self._begin() for _ in range(n)]
        self._done: list[list[int]] = []
        self.n_written = self.n_steps = 0
        self.seconds = 0.0

    def _begin(self) -> _Sequence:
        """The next opening: by turns as a question in the model's template, and as a text to go on with."""
        opening, asked = OPENINGS[self._openings % len(OPENINGS)], self._openings % 2 == 0
        self._openings += 1
        if asked and self._template is not None:
            tokens = self._template.tokens([{"role": "user", "content": opening}])
        else:
            tokens = self._llm.tokenize(opening.encode(), add_bos=True)
        return _Sequence(tokens[: self._length // 2])

    def write(self, n_tokens: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Until so many tokens are written in all, openings not counted."""
        while self.n_written < n_tokens:
            self._step()
            if progress:
                progress(min(self.n_written, n_tokens), n_tokens)

    def begin(self, n_steps: int) -> None:
        """So many tokens of each sequence, most of them of its opening. The first, cold ones are not counted."""
        for i in range(n_steps):
            if i == n_steps // 3:
                self.n_steps, self.seconds = 0, 0.0
            self._step()

    @property
    def rate(self) -> float:
        """Tokens written per second in the long run, when openings take their usual part of it."""
        opening = sum(len(self._llm.tokenize(text.encode())) for text in OPENINGS) / len(OPENINGS)
        return len(self._sequences) * self.n_steps / self.seconds * max(1 - opening / self._length, 0.5)

    def _step(self) -> None:
        started = time.perf_counter()
        llm, sequences = self._llm, self._sequences
        tokens = [s.forced[0] if s.forced else s.written[-1] for s in sequences]
        llm.decode_sequences(tokens, [s.position for s in sequences], range(len(sequences)), [True] * len(sequences))
        drawn = self._draw(llm.batch_logits(len(sequences)))
        for i, s in enumerate(sequences):
            s.position += 1
            if s.forced:
                s.forced.pop(0)
                if s.forced:
                    continue
            token = int(drawn[i])
            ended = llm.is_end_token(token)
            if not ended:
                s.written.append(token)
                self.n_written += 1
            if ended or s.position + 1 >= self._length:
                self._done.append(s.written)
                llm.forget_sequence(i)
                sequences[i] = self._begin()
        self.n_steps += 1
        self.seconds += time.perf_counter() - started

    def _draw(self, logits: np.ndarray) -> np.ndarray:
        """[n] tokens of [n, n_vocab]."""
        k = min(TOP_K, logits.shape[1])
        best = np.argpartition(logits, -k, axis=1)[:, -k:]
        x = np.take_along_axis(logits, best, axis=1) / TEMPERATURE
        p = np.exp(x - x.max(axis=1, keepdims=True))
        below = p.cumsum(axis=1) < self._random.random((len(p), 1)) * p.sum(axis=1, keepdims=True)
        chosen: np.ndarray = best[np.arange(len(best)), np.minimum(below.sum(axis=1), k - 1)]
        return chosen

    @property
    def text(self) -> str:
        """All that is written, the sequences one after the other."""
        pieces = [*self._done, *(s.written for s in self._sequences)]
        return "\n\n".join(self._llm.detokenize(tokens).decode("utf-8", "replace").strip() for tokens in pieces if tokens)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._llm.close()
