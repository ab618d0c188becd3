"""Drafts from a second, small model, which is in memory as a whole: llama.cpp's own, without an expert buffer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ModelError
from ..llamacpp.llama import LoadError, PatchedLlama, api, why_no_drafts
from ..llamacpp.native import TensorOverrides, should_abort
from ..llamacpp.threads import CoreBinding
from .engine import Engine

_AT_ONCE = 2  # tokens that it has not read where it has made the draft before: the last one of that, and what was drawn behind it


class _DraftLlama(PatchedLlama):
    """A model as it is planned (`DraftModel.memory`); what it computes is cancelled with the other one's answer."""

    _one_output = True
    _core_binding: CoreBinding | None = None

    def __init__(self, engine: Engine):
        self._overrides, self._engine = TensorOverrides([]), engine

    def load(self, model_path: str, **options: Any) -> None:
        super().load(model_path, **options)
        api.llama_set_abort_callback(self.context_handle, should_abort, self._engine.buffer.handle)
        self._core_binding = None if self._engine.config.numa else CoreBinding(self.context_handle)

    def _decode(self, decode: Callable[[], None], _batch: Any) -> None:
        with self._engine.cancellation.computing("a draft", self._engine.buffer.check), self._core_binding or contextlib.nullcontext():
            decode()

    def close(self) -> None:
        if self._core_binding is not None:
            self._core_binding.close()
        super().close()


class ModelDrafts:
    """Drafts of the tokens that a second model finds likeliest, each behind the one before.

    Its context follows the text by itself: what begins as the last text did is kept, the rest is read when the next draft is made.

    Args:
        engine: of the model that verifies them; it has planned the second one.
        model: that model, loaded.

    Attributes:
        n: tokens of the last one.

    Raises:
        ModelError: the second model cannot be loaded, or makes no drafts for this one.
    """

    def __init__(self, engine: Engine, model: PatchedLlama):
        assert engine.draft_model is not None and engine.draft_memory is not None and engine.drafts is not None
        self._engine, self._length, self._llm = engine, engine.drafts, _DraftLlama(engine)
        self.n = 0
        path, n_ctx = engine.draft_model.model_index.files[0], engine.draft_memory.n_ctx
        try:
            self._llm.load(path, n_ctx=n_ctx, use_mmap=False, verbose=engine.keywords["verbose"], **engine.draft_keywords)
            why = why_no_drafts(self._llm, model)
        except LoadError as error:
            why = f"llama.cpp cannot load it: {error}"
        if why:
            self.close()
            raise ModelError(f"{path}: cannot make drafts for {engine.config.model_path}: {why}")
        self._n_vocab = min(self._llm.n_vocab(), model.n_vocab())  # token numbers that both know

    def close(self) -> None:
        if self._llm.loaded:
            self._llm.close()

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """The draft for a text [n], at most `DraftLength.best` tokens, and none behind one that ends an answer."""
        llm, draft = self._llm, list[int]()
        best = min(self._length.best, llm.n_ctx() - len(tokens))
        if best > 0 and tokens.max() < self._n_vocab:
            started = time.perf_counter()
            known = llm.input_ids[: min(llm.n_tokens, len(tokens) - 1)]
            differ = np.flatnonzero(known != tokens[: len(known)])
            llm.n_tokens = int(differ[0]) if len(differ) else len(known)
            if len(tokens) - llm.n_tokens > _AT_ONCE:
                llm.eval(tokens[llm.n_tokens : -1].tolist())
            began = time.perf_counter()
            self._length.begin_draft(began, began - started)
            unread = tokens[llm.n_tokens :].tolist()
            while len(draft) < best:
                llm.eval(unread)
                unread = [int(llm.batch_logits(1)[0, : self._n_vocab].argmax())]
                if llm.is_end_token(unread[0]):
                    break
                draft += unread
            self._engine.drafted(time.perf_counter() - started)
        self.n = len(draft)
        return np.array(draft, np.intc)
