"""Names of the files of a split model: STEM-00001-of-00003.gguf, as llama.cpp writes them and wants them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

__all__ = ["SplitName", "model_stem"]

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class SplitName:
    """Part `index`, counted from 1, of `count`; the stem is a path or whatever was given, without the numbers."""

    stem: str
    index: int
    count: int

    @classmethod
    def parse(cls, path: str | os.PathLike) -> SplitName | None:
        """None: not named like a part."""
        match = _SPLIT.fullmatch(os.fspath(path))
        return cls(match["stem"], int(match["index"]), int(match["count"])) if match else None

    def part(self, index: int) -> str:
        """The path of another part."""
        return f"{self.stem}-{index:05d}-of-{self.count:05d}.gguf"

    @property
    def parts(self) -> list[str]:
        return [self.part(index) for index in range(1, self.count + 1)]


def model_stem(model: str | os.PathLike) -> str:
    """What the files beside a model are named after: its path without ".gguf", and without the number if it is a first part."""
    split = SplitName.parse(model)
    return split.stem if split and split.index == 1 else os.fspath(model).removesuffix(".gguf")
