"""Vocabularies that llama.cpp loads and then ends the process over: its tokenizers throw through C where a token is missing that they take for granted."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping

from .file import parse

_BYTES = range(256)
_BPE = ("gpt2", "hybriddna", "whitespace")
# ids of the tokens that begin a text, end it, and end a part of it, where the file names none (llama-vocab.cpp)
_DEFAULTS: dict[str, tuple[int | None, int | None, int | None]] = {
    "llama": (1, 2, None), "bert": (101, None, 102), "t5": (None, 1, None), **dict.fromkeys(_BPE, (11, 11, None)), "gemma4": (None, None, None),
}  # fmt: skip
_HEX = re.compile(rb"\\x([0-9a-f]{2})")
_ESCAPES = {rb"\t": 9, rb"\n": 10, rb"\r": 13, rb"\\": 92, rb"\'": 39, rb"\"": 34}


def vocabulary_fault(metadata: Mapping[str, bytes]) -> str:
    """A reason to refuse a model for, or nothing.

    Args:
        metadata: of a model's file, values as they are there.
    """

    def value(name: str) -> object:
        try:
            return parse(metadata[f"tokenizer.ggml.{name}"])[0]
        except (KeyError, struct.error):
            return None

    raw, tokens = value("model"), value("tokens")
    if not isinstance(raw, bytes) or not isinstance(tokens, list):
        return ""  # llama.cpp says so itself
    model = raw.decode("utf-8", "replace")
    if model in ("llama", "rwkv"):
        missing = len(_BYTES) - len(_bytes_of(tokens) if model == "llama" else _rwkv_bytes_of(tokens))
        if missing and not (model == "rwkv" and _is_id(value("unknown_token_id"), len(tokens))):
            return f"tokenizer.ggml.model is {model!r}, but its vocabulary has no tokens for {missing} of the 256 bytes: it is of another tokenizer"
    if model not in _DEFAULTS:
        return ""
    begin, end, part = (
        next((id for id in (value(f"{name}_token_id"), default) if _is_id(id, len(tokens))), None)
        for name, default in zip(("bos", "eos", "seperator"), _DEFAULTS[model])  # llama.cpp's spelling
    )
    adds_begin, adds_end = value("add_bos_token"), value("add_eos_token")
    bpe = model in _BPE  # whether these add something depends on the rules for words, too
    lacking = {
        "bos": begin is None and (model in ("bert", "gemma4") or (adds_begin is not False if bpe or model == "llama" else adds_begin is True)),
        "eos": end is None and model != "bert" and (adds_end is not False if model == "t5" else adds_end is True),
        "seperator": part is None and model == "bert",
    }
    for name, lacks in lacking.items():
        if lacks:
            return f"its tokenizer ({model}) puts a token around every text of which the file does not say which one it is (tokenizer.ggml.{name}_token_id)"
    return ""


def _is_id(value: object, n_tokens: int) -> bool:
    return type(value) is int and 0 <= value < n_tokens


def _bytes_of(tokens: Iterable[bytes]) -> set[int]:
    """Bytes that SentencePiece's vocabularies have a token for: one that names it, or the byte itself."""
    known = {b"<0x%02X>" % byte: byte for byte in _BYTES} | {bytes([byte]): byte for byte in _BYTES}
    return {known[token] for token in tokens if token in known}


def _rwkv_bytes_of(tokens: Iterable[bytes]) -> set[int]:
    values = {0}  # it ends a text
    for token in tokens:
        if len(token) == 1 and token != b"\\":
            values.add(token[0])
        elif token in _ESCAPES:
            values.add(_ESCAPES[token])
        elif hexadecimal := _HEX.fullmatch(token):
            values.add(int(hexadecimal[1], 16))
    return values
