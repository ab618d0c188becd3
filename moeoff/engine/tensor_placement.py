"""Which tensors go to which memory, as llama.cpp's --override-tensor says it."""

from __future__ import annotations

import re

from ..binding import buffer_types
from ..errors import OptionError
from ..gguf.layout import Layout

__all__ = ["tensor_buffers"]


def tensor_buffers(text: str | None, layout: Layout) -> list[tuple[str, int]]:
    """(pattern, ggml_backend_buffer_type_t) of each "PATTERN=BUFFER", separated by commas.

    Raises:
        OptionError: no such buffer, no regular expression, one that is found in no tensor's name, or in that of routed experts:
            those have a buffer of their own.
    """
    if not text:
        return []
    found = []
    types = buffer_types()
    for part in text.split(","):
        pattern, _, buffer = part.rpartition("=")
        if not pattern or buffer not in types:
            raise OptionError(f"override_tensor: PATTERN=BUFFER with a buffer out of {', '.join(types)}, not {part!r}")
        try:
            search = re.compile(pattern).search
        except re.error as error:
            raise OptionError(f"override_tensor: {pattern!r} is no regular expression: {error}") from None
        expert = next(filter(search, layout.experts), None)
        if expert is not None:
            raise OptionError(f"override_tensor: {pattern!r} is found in {expert!r}: routed experts lie in moeoff's expert buffer and nowhere else")
        if not any(map(search, layout.dense)):
            raise OptionError(f"override_tensor: {pattern!r} is found in the name of no tensor outside the experts")
        found.append((pattern, types[buffer]))
    return found
