"""Drafts from a second, small model, which is in memory as a whole: llama.cpp's own, without an expert buffer. Or from the model's next-token layers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from ..errors import ModelError
from ..llamacpp.llama import LoadError, NextnContext, PatchedLlama, api, why_no_drafts
from ..llamacpp.native import TensorOverrides, should_abort
from ..llamacpp.threads import CoreBinding
from .engine import Engine

_AT_ONCE = 2  # tokens that it has not read where it has made the draft before: the last one of that, and what was drawn behind it


class _DraftLlama(PatchedLlama):
    """A model as it is planned (`DraftModel.memory`), which guesses on as `NextnContext` does.

    Its context follows the text by itself: what begins as the last text did is kept, the rest is read when the next draft is made.

    Attributes:
        n_known: token numbers that the other model has, too.

    Raises:
        ModelError: it cannot be loaded, or makes no drafts for the other model.
    """

    _one_output = True

    def __init__(self, engine: Engine, model: PatchedLlama):
        assert engine.draft_model is not None and engine.draft_memory is not None
        self._overrides = TensorOverrides([])
        path, n_ctx = engine.draft_model.model_index.files[0], engine.draft_memory.n_ctx
        try:
            self.load(path, n_ctx=n_ctx, use_mmap=False, verbose=engine.keywords["verbose"], **engine.draft_keywords)
            why = why_no_drafts(self, model)
        except LoadError as error:
            why = f"llama.cpp cannot load it: {error}"
        if why:
            self.close()
            raise ModelError(f"{path}: cannot make drafts for {engine.config.model_path}: {why}")
        self.handle, self.n_known = self.context_handle, min(self.n_vocab(), model.n_vocab())

    def close(self) -> None:
        if self.loaded:
            super().close()

    def catch_up(self, tokens: np.ndarray) -> None:
        known = self.input_ids[: min(self.n_tokens, len(tokens) - 1)]
        differ = np.flatnonzero(known != tokens[: len(known)])
        self.n_tokens = int(differ[0]) if len(differ) else len(known)
        if len(tokens) - self.n_tokens > _AT_ONCE:
            self.eval(tokens[self.n_tokens : -1].tolist())

    def guesses(self, tokens: np.ndarray) -> Iterator[int]:
        unread = tokens[self.n_tokens :].tolist()
        while True:
            self.eval(unread)
            unread = [int(self.batch_logits(1)[0, : self.n_known].argmax())]
            yield unread[0]


class ModelDrafts:
    """Drafts of the tokens that a second model, or the model's next-token layers, find likeliest, each behind the one before.

    Args:
        engine: of the model that verifies them; it has planned the second one.
        model: that model, loaded.

    Attributes:
        n: tokens of the last one.

    Raises:
        ModelError: the second model cannot be loaded, or makes no drafts for this one.
    """

    def __init__(self, engine: Engine, model: PatchedLlama):
        assert engine.drafts is not None
        self._engine, self._length, self.n = engine, engine.drafts, 0
        try:
            self._guesser = NextnContext(model) if engine.draft_model is None else _DraftLlama(engine, model)
        except LoadError as error:
            raise ModelError(f"{engine.config.model_path}: llama.cpp cannot compute its next-token layers: {error}") from error
        model.nextn = self._guesser if isinstance(self._guesser, NextnContext) else None
        api.llama_set_abort_callback(self._guesser.handle, should_abort, engine.buffer.handle)
        self._core_binding = None if engine.config.numa else CoreBinding(self._guesser.handle)

    def close(self) -> None:
        self._guesser.close()
        if self._core_binding is not None:
            self._core_binding.close()

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """The draft for a text [n], at most `DraftLength.best` tokens, and none behind one that ends an answer. What it computes is cancelled with the answer."""
        guesser, draft = self._guesser, list[int]()
        best = min(self._length.best, api.llama_n_ctx(guesser.handle) - len(tokens))
        if best > 0 and tokens.max() < guesser.n_known:
            started = time.perf_counter()
            self._engine.buffer.set_batch_kind(True)
            with self._engine.cancellation.computing("a draft", self._engine.buffer.check), self._core_binding or contextlib.nullcontext():
                self._engine.expect(int(tokens[-1]))
                guesser.catch_up(tokens)
                began = time.perf_counter()
                self._length.begin_draft(began, began - started)
                for token in guesser.guesses(tokens):
                    if guesser.is_end_token(token):
                        break
                    draft.append(token)
                    if len(draft) == best:
                        break
                    self._engine.expect(token)
            self._engine.drafted(time.perf_counter() - started)
        self.n = len(draft)
        return np.array(draft, np.intc)
