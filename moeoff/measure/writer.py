"""Text that a model writes by itself, to be calibrated on where there is no other: what it says is what it will be asked to compute.

Many sequences are written side by side, so that their experts are read once for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..budget.dry_load import dry_load
from ..engine.llama import Llama
from ..engine.prompt import Template
from ..errors import ModelError
from ..gguf.model_index import ModelIndex
from ..options import llama_keywords
from ..system.files import Closing
from ..system.memory import Budget, trim
from .checkpoint import Checkpoint
from .perplexity import interruptible

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


def sequences_within(model_index: ModelIndex, memory: int, n_tokens: int) -> tuple[int, int]:
    """The first of SHAPES that leaves the experts most of the memory and makes at least two rounds of so many tokens."""
    keywords = llama_keywords({**_KV, "n_batch": _BATCH, "n_ubatch": _BATCH})
    for n, length in SHAPES[:-1]:
        if 2 * n * length <= n_tokens and dry_load(model_index, n * length, keywords).state <= _STATE_SHARE * memory:
            return n, length
    return SHAPES[-1]


@dataclass
class _Sequence:
    forced: list[int]  # tokens of its beginning that it has not read
    written: list[int] = field(default_factory=list)
    position: int = 0


def written_text(
    model: str, n_tokens: int, checkpoint: Checkpoint, *, least: int = 0, until: float = math.inf, memory: str | int | None = None, seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> str:  # fmt: skip
    """Text by the model itself; an interrupted one goes on with the round that it was in.

    Args:
        n_tokens: to write, openings not counted.
        until: of `time.monotonic`, when it ends with fewer, but `least` at least.
        memory: bound of the process; None: 80 % of what is available.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    part = checkpoint.load("text")
    if part is None:
        nbytes = Budget.of(memory).most
        n, length = checkpoint.once("writing", lambda: {"shape": np.array(sequences_within(ModelIndex.read(model), nbytes, n_tokens))})["shape"].tolist()
        bound = {} if "expert_memory" in options else {"memory": nbytes}
        stage = progress and functools.partial(progress, "the model writes text")
        with Writer(model, n, length, seed=seed, **bound, **options) as writer, interruptible(writer.llm) as call:
            text = call(writer.write, n_tokens, checkpoint, stage, least, until)
        part = {"text": np.frombuffer(text.encode(), np.uint8)}
        checkpoint.save("text", part)
        trim()  # what the writer leaves would count against the next model's budget
    return part["text"].tobytes().decode("utf-8", "replace")


@contextlib.contextmanager
def texts_or_written(model: str, text: Sequence[str | os.PathLike[str]], n_tokens: int, checkpoint: Checkpoint, **how: Any) -> Iterator[list[str]]:
    """The files of a user's texts; without any, one with what `written_text` gives."""
    if text:
        yield [os.fspath(path) for path in text]
        return
    words = written_text(model, n_tokens, checkpoint, **how)
    with tempfile.TemporaryDirectory(prefix="moeoff-text-") as folder:
        path = os.path.join(folder, "written.txt")
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(words)
        yield [path]


class Writer(Closing):
    """A model that writes, in rounds: each depends on the seed and its number alone, so that one that was kept need not be written again.
    Use with `with`.

    Args:
        n, length: sequences side by side, and their tokens (`sequences_within`).
        seed: of what is drawn.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """

    def __init__(self, model: str, n: int, length: int, *, seed: int = 0, **options: Any):
        self.llm = ParallelLlama(model, n, n_ctx=n * length, n_batch=_BATCH, n_ubatch=_BATCH, **{**options, **_KV})
        self._seed, self._n_sequences, self._length = seed, n, length
        self._template: Template | None = None
        with contextlib.suppress(ModelError):
            self._template = Template(self.llm) if "tokenizer.chat_template" in self.llm.metadata else None

    def write(self, n_tokens: int, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None, least: int = 0, until: float = math.inf) -> str:
        """So many tokens or more, openings not counted; or `least`, when the time is over. Rounds that are finished are kept in the checkpoint."""
        pieces: list[str] = []
        written = 0

        def enough(n: int) -> bool:
            """Whether so many of a round are."""
            if progress:
                progress(min(written + n, n_tokens), n_tokens)
            return written + n >= least and time.monotonic() > until

        while written < n_tokens and not enough(0):
            part = checkpoint.once(f"round-{len(pieces)}", functools.partial(self._round, len(pieces), enough))
            pieces.append(part["text"].tobytes().decode("utf-8", "replace"))
            written += max(int(part["n_tokens"]), 1)
        if progress:
            progress(n_tokens, n_tokens)
        return "\n\n".join(pieces)

    def _opening(self) -> _Sequence:
        """The next one: by turns as a question in the model's template, and as a text to go on with."""
        opening, asked = OPENINGS[self._n_begun % len(OPENINGS)], self._n_begun % 2 == 0
        self._n_begun += 1
        if asked and self._template is not None:
            tokens = self._template.tokens([{"role": "user", "content": opening}])
        else:
            tokens = self.llm.tokenize(opening.encode(), add_bos=True)
        return _Sequence(tokens[: self._length // 2])

    def _round(self, index: int, enough: Callable[[int], bool]) -> dict[str, np.ndarray]:
        """As many tokens of each sequence as it may have; one that ends before makes way for another opening, and the last are cut."""
        self._n_begun = 2 * index * self._n_sequences
        sequences, texts = [self._opening() for _ in range(self._n_sequences)], list[list[int]]()
        random = np.random.default_rng([self._seed, index])
        self.llm.clear_context()
        with self.llm.engine.cancellation.in_progress():
            for _ in range(self._length - 1):
                self._step(sequences, random, texts)
                if enough(sum(map(len, texts)) + sum(len(s.written) for s in sequences)):
                    break
        self.llm.clear_context()
        texts += [s.written for s in sequences]
        text = "\n\n".join(self.llm.detokenize(tokens).decode("utf-8", "replace").strip() for tokens in texts if tokens)
        return {"text": np.frombuffer(text.encode(), np.uint8), "n_tokens": np.array(sum(map(len, texts)))}

    def _step(self, sequences: list[_Sequence], random: np.random.Generator, texts: list[list[int]]) -> None:
        tokens = [s.forced[0] if s.forced else s.written[-1] for s in sequences]
        self.llm.decode_sequences(tokens, [s.position for s in sequences], range(len(sequences)), [True] * len(sequences))
        drawn = self._draw(self.llm.batch_logits(len(sequences)), random)
        for i, s in enumerate(sequences):
            s.position += 1
            if s.forced:
                s.forced.pop(0)
                if s.forced:
                    continue
            token = int(drawn[i])
            ended = self.llm.is_end_token(token)
            if not ended:
                s.written.append(token)
            if ended or s.position + 1 >= self._length:
                texts.append(s.written)
                self.llm.forget_sequence(i)
                sequences[i] = self._opening()

    @staticmethod
    def _draw(logits: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """[n] tokens of [n, n_vocab]."""
        k = min(TOP_K, logits.shape[1])
        best = np.argpartition(logits, -k, axis=1)[:, -k:]
        x = np.take_along_axis(logits, best, axis=1) / TEMPERATURE
        p = np.exp(x - x.max(axis=1, keepdims=True))
        below = p.cumsum(axis=1) < random.random((len(p), 1)) * p.sum(axis=1, keepdims=True)
        chosen: np.ndarray = best[np.arange(len(best)), np.minimum(below.sum(axis=1), k - 1)]
        return chosen

    def close(self) -> None:
        self.llm.close()
