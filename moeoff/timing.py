"""Tokens decoded and the time it took."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Timing:
    """Time inside llama_decode: batches of several tokens are prompt, single tokens generation."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    gen_tokens: int = 0
    gen_seconds: float = 0.0

    def add(self, n_tokens: int, seconds: float) -> None:
        if n_tokens > 1:
            self.prompt_tokens += n_tokens
            self.prompt_seconds += seconds
        else:
            self.gen_tokens += n_tokens
            self.gen_seconds += seconds

    def since(self, earlier: Timing) -> Timing:
        return Timing(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def reset(self) -> None:
        self.__init__()
