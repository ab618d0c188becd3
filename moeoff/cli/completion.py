"""One answer: the prompt in the model's own template, the text as it comes, and what it took.

Knows nothing of files. The model computes in a thread of its own, because a long prompt keeps llama.cpp busy
for minutes and Python notices Ctrl-C only in a thread that is not.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ..engine.stats import Stats
from ..errors import ContextError, MoeoffError, OptionError
from ..options import Sampling
from ..system.console import ProgressLine
from ..system.files import Closing
from ..system.memory import format_size
from ..system.signals import handling

if TYPE_CHECKING:
    from llama_cpp import CreateCompletionStreamResponse

    from ..engine.llama import Llama
    from ..engine.prompt import PromptCache

_TELL = 0.25  # seconds between looks at how much of a prompt is computed


@dataclass(frozen=True)
class Completion:
    """An answer's text, and what it took.

    Attributes:
        finish_reason: "stop": the model or a stop text ended it; "length": -n or the context did; "cancelled": the user did.
        prompt_tokens: of the whole prompt.
        reused_tokens: those at its beginning that the KV cache still held.
        completion_tokens: drawn, the end token included.
        n_ctx: tokens that the context holds.
        stats: of this answer alone; its prompt_tokens are those that had to be computed.
        seconds: from the question to the end.
        discarded_tokens: that context shifts have forgotten.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    n_ctx: int
    stats: Stats
    seconds: float
    discarded_tokens: int = 0

    @property
    def context_full(self) -> bool:
        return self.finish_reason == "length" and not self.discarded_tokens and self.prompt_tokens + self.completion_tokens >= self.n_ctx

    def to_dict(self) -> dict[str, Any]:
        """The object that `moeoff run --json` prints."""
        n_prompt, n_completion, stats = self.prompt_tokens, self.completion_tokens, asdict(self.stats)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}
        return {"model": stats["model"], "text": self.text, "finish_reason": self.finish_reason, "usage": usage, "stats": stats}

    def summary(self) -> str:
        """One line for people. Its memory is the most that the process has taken since it began."""
        s = self.stats
        precision = s.precision_summary
        if s.max_loss is not None and not precision:
            precision = f"lossless: nothing that was measured is worth it within {s.max_loss:.2%}"
        reused = f" (+{self.reused_tokens} reused)" if self.reused_tokens else ""
        mb = s.bytes_read / 1e6 / max(s.prompt_tokens + s.gen_tokens, 1)
        stalled = min(s.stall_seconds / max(self.seconds, 1e-9), 1)
        parts = [
            f"prompt {s.prompt_tokens} tokens{reused}, {s.prompt_tps:.1f} tok/s",
            f"generated {self.completion_tokens}, {s.gen_tps:.1f} tok/s",
            f"{s.hit_summary}, {mb:.2f} MB/token read{'' if s.direct_io else ' (through the page cache)'}, stalled {stalled:.0%}",
            precision,
            f"context {self.n_ctx}",
            f"memory {format_size(s.peak_rss_bytes)}" + (f" of {format_size(s.budget_bytes)}" if s.budget_bytes else ""),
        ]
        return " | ".join(filter(None, parts))


class Completer(Closing):
    """Has a model answer, one prompt after the other. Use with `with`.

    Args:
        llm: stays the caller's, who closes it after this.
        sampling: how answers are drawn; may be changed between them.
        prompt_cache: where the context of one prompt comes from, and goes to.

    Raises:
        ModelError: the prompt cache is not of this model and context.
    """

    def __init__(self, llm: Llama, sampling: Sampling, prompt_cache: PromptCache | None = None):
        self.llm = llm
        self.sampling = sampling
        self._prompt_cache = prompt_cache
        self._cached_tokens: list[int] = []
        if prompt_cache is not None:
            prompt_cache.load(llm)
            self._cached_tokens = llm.input_ids[: llm.n_tokens].tolist()
        self._prompt: list[int] = []
        self._cancelled = threading.Event()
        # one thread for all answers: OpenMP keeps a team of threads for each thread that ever computed
        self._executor = ThreadPoolExecutor(1, "moeoff-answer")
        self._stops: list[str] = []

    def close(self) -> None:
        self._executor.shutdown()

    def cancel(self) -> None:
        """Ends the answer that is being computed; from any thread, and from a signal handler."""
        self._cancelled.set()
        self.llm.cancel()

    def stop_at(self, text: str) -> None:
        """One more text that ends answers."""
        self._stops.append(text)

    def complete(self, tokens: list[int], write: Callable[[str], None]) -> Completion:
        """Answers a prompt; each piece of text goes to `write` in the calling thread. Ctrl-C ends the answer, not the program.

        Raises:
            ContextError: the prompt alone is longer than the context.
            MoeoffError: what went wrong while computing; the model stays usable.
        """
        llm = self.llm
        n_ctx = llm.n_ctx()
        if not tokens:
            raise OptionError("the prompt is empty: there is nothing to answer")
        if len(tokens) >= n_ctx:
            raise ContextError(len(tokens), n_ctx)
        self._cancelled.clear()
        before, started = llm.stats(), time.perf_counter()
        pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        text: list[str] = []
        # a handler and not `except KeyboardInterrupt`: that could come between taking a piece and writing it
        with handling(signal.SIGINT, lambda _signum, _frame: self.cancel()):
            future = self._executor.submit(self._compute, tokens, pieces)
            try:
                while (piece := self._next(pieces, len(tokens)) if not text else pieces.get()) is not None:
                    text.append(piece)
                    write(piece)
            except BaseException:  # the reader of our output has gone
                self.cancel()
                raise
            finally:
                future.exception()  # waits
            reason = future.result()
        ended = time.perf_counter()
        stats = llm.stats().since(before)
        if stats.gen_tokens:  # as a reader sees it: sampling and writing are part of the time
            stats = replace(stats, gen_tps=(stats.gen_tokens - stats.drafts_rejected) / (ended - started - stats.prompt_seconds))
        n_tokens = llm.n_tokens + llm.n_discarded
        n_computed = stats.prompt_tokens - llm.engine.unfinished_tokens + stats.gen_tokens - stats.drafts_rejected
        return Completion(
            text="".join(text),
            finish_reason=reason,
            prompt_tokens=len(tokens),
            reused_tokens=max(n_tokens - n_computed, 0),
            completion_tokens=max(n_tokens - len(tokens) + 1, 0),  # after each token that was computed one is drawn
            n_ctx=n_ctx,
            stats=stats,
            seconds=ended - started,
            discarded_tokens=llm.n_discarded,
        )

    def _next(self, pieces: queue.SimpleQueue[str | None], n_prompt: int) -> str | None:
        """The first piece. Until it comes, a line says how much of the prompt is computed."""
        line, before = ProgressLine(slows=True), self.llm.engine.prompt_tokens
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return pieces.get(timeout=_TELL)
                line.update("prompt", min(self.llm.engine.prompt_tokens - before, n_prompt), n_prompt)
        finally:
            line.clear()

    def _compute(self, tokens: list[int], pieces: queue.SimpleQueue[str | None]) -> str:
        """Puts pieces of text, then None; returns why the answer has ended. Runs in the thread."""
        reason = "length"
        self._prompt = tokens
        try:
            if self._cancelled.is_set():
                return "cancelled"
            chunks = cast("Iterator[CreateCompletionStreamResponse]", self.llm.create_completion(tokens, stream=True, **self._completion_keywords()))
            for chunk in chunks:
                choice = chunk["choices"][0]
                if choice["text"]:
                    pieces.put(choice["text"])
                reason = choice["finish_reason"] or reason
        except (MoeoffError, RuntimeError) as error:
            if self._cancelled.is_set():
                self._save_interrupted_prompt()
                return "cancelled"
            if isinstance(error, MoeoffError):
                raise
            raise MoeoffError(f"llama.cpp could not go on: {error}") from error
        finally:
            pieces.put(None)
        return "cancelled" if self._cancelled.is_set() else reason

    def _save_interrupted_prompt(self) -> None:
        """Write the computed part of the prompt to the prompt cache, if the cache holds less of it."""
        if self._prompt and self._prompt_cache is not None:
            self.llm.settle()
            n = self.llm.n_tokens
            if self._prompt[:n] != self._cached_tokens[:n]:
                self._prompt_cache.save(self.llm)

    def _drawn(self, _tokens: object, _logits: object) -> bool:
        """True if the answer ends here. Called after each token that was drawn, before it is computed."""
        cache, prompt = self._prompt_cache, self._prompt
        if prompt and cache is not None and prompt != self._cached_tokens[: len(prompt)]:
            cache.save(self.llm)  # the context holds the prompt and nothing else
        self._prompt = []
        return self._cancelled.is_set()

    def _completion_keywords(self) -> dict[str, Any]:
        from llama_cpp import StoppingCriteriaList

        s = self.sampling
        same = ("top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        keywords = {name: getattr(s, name) for name in same} | {"max_tokens": s.n_predict, "temperature": s.temp, "stop": [*s.stop, *self._stops]}
        keywords["stopping_criteria"] = StoppingCriteriaList([self._drawn])
        if s.ignore_eos:
            keywords["logit_bias"] = {token: float("-inf") for token in range(self.llm.n_vocab()) if self.llm.is_end_token(token)}
        return keywords
