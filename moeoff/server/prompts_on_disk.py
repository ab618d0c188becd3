"""Prompts on disk: those that fall out of a server's memory, at its end all of them, and come back where reading is quicker than computing.

A prompt is its tokens, and behind them the state of the model, and of the one that makes drafts, as llama.cpp writes it; of a state that cannot be cut also
the checkpoints that it can go back to. They lie in one folder for all servers of a user: a file for each prompt, whole or not at all, with a digest of every
byte. Its name begins with the identity of what computed it, and no other file is read. When the bound is reached, those go first that were used the longest
ago. Files of other models count, and go, when nobody has used them for a day: until then they are another server's, which has a bound of its own.

Knows neither llama.cpp nor the server: bytes come as buffers, rates from a function.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..engine.engine import Engine
from ..engine.prompt import file_state, state_identity
from ..errors import ModelError, WriteError
from ..options import ServerOptions
from ..system.console import note
from ..system.disk import leave_page_cache, probe
from ..system.files import atomic_file, cache_folder, open_file

Tokens = npt.NDArray[np.int32]

_SUFFIX = ".kv"
_MAGIC = b"moeoffK2"
_HEADER = struct.Struct("<8s16sIId")  # magic, identity, tokens, checkpoints, tokens per second when they were computed; then a table
_CHECKPOINTS = 2  # of a prompt, at most
_DIGEST = 16  # bytes
_PIECE = 8 << 20  # bytes that are read or written at a time
_SYNCED = 64 << 20  # bytes after which what is written goes to the disk: pages that wait for it count in a cgroup's memory
_LEAST = 64  # tokens: fewer are computed before a file is open
_MOST = 512  # files: their tokens are compared with each prompt's
_GAIN = 0.8  # of the time to compute, what reading may take
_PROBE = 0.1  # seconds
_STALE = 86_400  # seconds without use, after which another server's files are nobody's


def folder() -> Path:
    """Where prompts lie. Raises `OSError` if there is no cache folder."""
    return cache_folder() / "prompts"


def identity(engine: Engine, options: ServerOptions, files: Sequence[str]) -> bytes:
    """`state_identity` of a server. How long the context is changes no state, but where it chooses between a model's factors for positions.

    Args:
        files: all that the model is read from.
    """
    args = list(options.args)
    while "--log-file" in args:
        i = args.index("--log-file")
        del args[i : i + 2]
    parallel = options.kv_unified or options.parallel
    n_ctx = any("rope_factors" in name for name in engine.model_index.dense) and engine.planned.n_ctx
    return state_identity(engine, parallel, n_ctx, engine.config.spec_type, args, [file_state(path) for path in files])


@dataclass(frozen=True)
class EvictedPrompt:
    """A prompt that has fallen out of memory.

    Attributes:
        parts: both states behind it, and three of each checkpoint.
        free: gives their memory back.
        checkpoints: of each the tokens before it, and the first and the last position that it has.
    """

    tokens: Tokens
    parts: tuple[memoryview, ...]
    free: Callable[[], None]
    checkpoints: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class StoredPrompt:
    """A file, as its header says. sizes: of its parts, in bytes. rate: tokens per second when it was computed; 0: not known."""

    path: Path
    tokens: Tokens
    sizes: tuple[int, ...]
    rate: float
    checkpoints: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def table(self) -> bytes:
        """The sizes of its parts, and its checkpoints, in the file."""
        return struct.pack(f"<{len(self.sizes)}Q{len(self.checkpoints)}i", *self.sizes, *self.checkpoints)


class _ServerEnded(Exception):
    """The server ends while a file is written."""


class PromptsOnDisk:
    """Prompts of one server.

    Args:
        folder: made when there is something to write.
        bound: bytes of its files, and of those that nobody uses.
        identity: of what computes.
        prompt_rate: tokens per second of the prompts that were computed; 0: not known yet.
        cuttable: tokens behind which a state cannot be cut, being recurrent or a sliding window's: a longer prompt is of use to one that goes on behind all
            of it, or behind a checkpoint.
        n_checkpoints: that a slot has room for; prompts with more stay on disk.
        on_freed: called with each prompt's bytes when its memory has been given back, on the thread that writes.

    Attributes:
        n_written, n_read: prompts, since the start.
        read_seconds: that reading took.
    """

    def __init__(self, folder: Path, bound: int, identity: bytes, prompt_rate: Callable[[], float], on_freed: Callable[[int], object] = lambda _nbytes: None,
                 cuttable: float = math.inf, n_checkpoints: int = 0):  # fmt: skip
        self._folder, self._bound, self._identity, self._cuttable, self._n_checkpoints = folder, bound, identity, cuttable, n_checkpoints
        self._prompt_rate, self._on_freed = prompt_rate, on_freed
        self._read_rate = 0.0  # bytes per second; 0: not known yet
        self.n_written = self.n_read = 0
        self.read_seconds = 0.0
        self._lock = threading.Lock()  # of the table, which the writing thread changes
        self._writer: threading.Thread | None = None
        self._closing = False
        self._has_complained = False
        self._stored: dict[Path, StoredPrompt] = {}
        for path, _, _ in self._files():
            if self._is_own(path) and (prompt := self._open(path)) is not None:
                self._stored[path] = prompt

    # --- out ---

    def accepts(self, tokens: Tokens, nbytes: int) -> bool:
        """Whether this prompt would be written: one at a time, and only what would come back."""
        writes = self._writer is not None and self._writer.is_alive()
        if self._closing or writes or len(tokens) < _LEAST or self._file_size(len(tokens), nbytes) > self._bound:
            return False
        with self._lock:
            if any(self._serves(prompt.tokens, tokens) for prompt in self._stored.values()):
                return False
        rate = self._prompt_rate()
        return rate > 0 and self._pays(nbytes, len(tokens) / rate)

    def _serves(self, stored: Tokens, tokens: Tokens) -> bool:
        """Whether a file with the first tokens does what one with the others would."""
        return _common(stored, tokens) == len(tokens) and (len(stored) == len(tokens) or len(stored) <= self._cuttable)

    def store(self, prompt: EvictedPrompt) -> None:
        """Writes it, on a thread of its own."""
        writer = threading.Thread(target=self._write, args=(prompt,), name="moeoff-prompts", daemon=True)
        try:
            writer.start()
        except RuntimeError:  # the system gives this process no more threads
            self._free(prompt)
        else:
            self._writer = writer

    def _free(self, prompt: EvictedPrompt) -> None:
        nbytes = prompt.nbytes
        prompt.free()
        self._on_freed(nbytes)

    def _write(self, prompt: EvictedPrompt) -> None:
        try:
            self._write_file(prompt)
        except WriteError as error:
            self._complain(error.message)
        except _ServerEnded:
            pass
        finally:
            self._free(prompt)

    def _write_file(self, prompt: EvictedPrompt) -> None:
        sizes = tuple(part.nbytes for part in prompt.parts)
        stored = StoredPrompt(self._path(prompt.tokens), prompt.tokens, sizes, self._prompt_rate(), prompt.checkpoints)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(self._file_size(len(stored.tokens), stored.nbytes, len(stored.checkpoints) // 3)):
                self._complain(f"{self._folder}: the disk is nearly full: prompts are not kept there")
                return
        except OSError as error:
            raise WriteError(f"{self._folder}: prompts cannot be kept: {error.strerror}") from None
        with atomic_file(stored.path) as file:
            fd, digest, unsynced = file.fileno(), hashlib.blake2b(digest_size=_DIGEST), 0
            os.fchmod(fd, 0o600)
            header = _HEADER.pack(_MAGIC, self._identity, len(stored.tokens), len(stored.checkpoints) // 3, stored.rate)
            for part in (memoryview(header + stored.table), stored.tokens.data.cast("B"), *prompt.parts):
                for offset in range(0, part.nbytes, _PIECE):
                    if self._closing:
                        raise _ServerEnded
                    piece = part[offset : offset + _PIECE]
                    digest.update(piece)
                    file.write(piece)
                    unsynced += piece.nbytes
                    if unsynced >= _SYNCED:
                        file.flush()
                        leave_page_cache(fd, sync=True)
                        unsynced = 0
            file.write(digest.digest())
            file.flush()
            leave_page_cache(fd, sync=True)
        with self._lock:
            for shorter in [other for other in self._stored.values() if self._serves(stored.tokens, other.tokens)]:
                if shorter.path != stored.path:
                    self._remove(shorter.path)
            self._stored[stored.path] = stored
            self.n_written += 1

    def _path(self, tokens: Tokens) -> Path:
        return self._folder / f"{self._identity.hex()}-{hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()}{_SUFFIX}"

    def _make_room(self, nbytes: int) -> bool:
        """Removes what was used the longest ago; whether there is room then, and as much again is left to others."""
        stale = time.time() - _STALE
        files = sorted((file for file in self._files() if self._is_own(file[0]) or file[2] < stale), key=lambda file: file[2])
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        total = sum(size for _, size, _ in files)
        if free + total < 2 * nbytes:
            return False
        while files and (total + nbytes > self._bound or free < 2 * nbytes or len(files) >= _MOST):
            path, size, _ = files.pop(0)
            with self._lock:
                self._remove(path)
            total, free = total - size, free + size
        return True

    # --- back ---

    def find(self, tokens: Tokens, n_have: int) -> StoredPrompt | None:
        """What begins with more of these tokens than the first n_have, and would come back sooner than the others are computed."""
        with self._lock:
            common = [(_common(prompt.tokens, tokens), prompt) for prompt in self._stored.values()]
        best: StoredPrompt | None = None
        most, measured = 0.0, self._prompt_rate()
        for n, prompt in common:
            rate = measured or prompt.rate
            if len(prompt.tokens) > self._cuttable and not n == len(prompt.tokens) < len(tokens):
                n = max((place for place in prompt.checkpoints[::3] if place <= min(n, len(tokens) - 1)), default=0)
            if n - n_have < _LEAST or rate <= 0 or len(prompt.checkpoints) > 3 * self._n_checkpoints:
                continue
            if not self._read_rate:
                self._measure(prompt)
            computing = (n - n_have) / rate
            saves = computing - prompt.nbytes / self._read_rate if self._read_rate else 0.0
            if saves > most and self._pays(prompt.nbytes, computing):
                best, most = prompt, saves
        return best

    def read(self, prompt: StoredPrompt, into: Sequence[memoryview]) -> bool:
        """Its bytes; False: it cannot be read, or is damaged, and then it goes."""
        began = time.perf_counter()
        try:
            with open_file(prompt.path) as file:
                digest = hashlib.blake2b(digest_size=_DIGEST)
                known = prompt.table + prompt.tokens.tobytes()
                head = _read_all(file, memoryview(bytearray(_HEADER.size + len(known))))
                digest.update(head)
                whole = os.fstat(file.fileno()).st_size == len(head) + prompt.nbytes + _DIGEST and head[_HEADER.size :] == known
                for part in into:
                    for offset in range(0, part.nbytes, _PIECE):
                        digest.update(_read_all(file, part[offset : offset + _PIECE]))
                whole = whole and _read_all(file, memoryview(bytearray(_DIGEST))) == digest.digest()
                leave_page_cache(file.fileno())
        except OSError as error:
            return self._drop(prompt.path, error.strerror or str(error))
        if not whole:
            return self._drop(prompt.path, "damaged")
        seconds = time.perf_counter() - began
        self.n_read, self.read_seconds = self.n_read + 1, self.read_seconds + seconds
        self._read_rate = (self._read_rate + prompt.nbytes / seconds) / 2 if self._read_rate else prompt.nbytes / seconds
        with contextlib.suppress(OSError):
            os.utime(prompt.path)
        return True

    def _pays(self, nbytes: int, computing: float) -> bool:
        """Whether so many bytes are read sooner than in these seconds, as far as that is known."""
        return not self._read_rate or nbytes / self._read_rate < _GAIN * computing

    def _measure(self, prompt: StoredPrompt) -> None:
        """The disk's rate, before anything was read from it."""
        try:
            self._read_rate = probe(prompt.path, 1 << 20, _PROBE, 1).bytes_per_second
        except ModelError as error:
            self._drop(prompt.path, error.message)

    # --- files ---

    @property
    def nbytes(self) -> int:
        """Of all files in the folder."""
        return sum(size for _, size, _ in self._files())

    def _is_own(self, path: Path) -> bool:
        """A file that this server, or another of the same identity, has written."""
        return path.name.startswith(self._identity.hex()) and path.suffix == _SUFFIX

    def _files(self) -> list[tuple[Path, int, float]]:
        """Path, size and time in seconds of what is in the folder, also of files that are being written, or were given up."""
        out = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        out.append((Path(entry.path), entry.stat().st_size, entry.stat().st_mtime))
        return out

    def _file_size(self, n_tokens: int, nbytes: int, n_checkpoints: int = 0) -> int:
        return _HEADER.size + 8 * (2 + 3 * n_checkpoints) + 12 * n_checkpoints + 4 * n_tokens + nbytes + _DIGEST

    def _open(self, path: Path) -> StoredPrompt | None:
        """None: it is no such file, and goes."""
        try:
            with open_file(path) as file:
                magic, identity, n, n_checkpoints, rate = _HEADER.unpack(_read_all(file, memoryview(bytearray(_HEADER.size))))
                if magic != _MAGIC or identity != self._identity or n < _LEAST or n_checkpoints > _CHECKPOINTS:
                    raise OSError(0, "damaged")
                table = struct.Struct(f"<{2 + 3 * n_checkpoints}Q{3 * n_checkpoints}i")
                numbers = table.unpack(_read_all(file, memoryview(bytearray(table.size))))
                sizes, checkpoints = numbers[: 2 + 3 * n_checkpoints], numbers[2 + 3 * n_checkpoints :]
                if os.fstat(file.fileno()).st_size != self._file_size(n, sum(sizes), n_checkpoints) or not all(0 < place <= n for place in checkpoints[::3]):
                    raise OSError(0, "damaged")
                tokens = np.frombuffer(_read_all(file, memoryview(bytearray(4 * n))), np.int32)
        except OSError as error:
            self._drop(path, error.strerror or str(error))
            return None
        return StoredPrompt(path, tokens, sizes, rate, checkpoints)

    def _drop(self, path: Path, why: str) -> bool:
        if path.exists():  # else another server has removed it
            self._complain(f"{path}: a prompt that was kept cannot be used, and is removed: {why}")
        with self._lock:
            self._remove(path)
        return False

    def _remove(self, path: Path) -> None:
        """With the lock held."""
        self._stored.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def _complain(self, text: str) -> None:
        """Once: a disk that is full stays full for every prompt."""
        if not self._has_complained:
            self._has_complained = True
            note(text)

    def join(self, deadline: float) -> None:
        """Waits for what is being written; at most until then, of `time.monotonic`."""
        if self._writer is not None:
            self._writer.join(max(deadline - time.monotonic(), 0.0))

    def close(self, deadline: float = 0.0) -> None:
        """Gives up what is still being written then."""
        self.join(deadline)
        self._closing = True
        if self._writer is not None:
            self._writer.join()


def _common(a: Tokens, b: Tokens) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _read_all(file: object, into: memoryview) -> memoryview:
    """Fills a buffer from an unbuffered file. Raises `OSError`: it has ended."""
    at = 0
    while at < into.nbytes:
        n = file.readinto(into[at:])  # type: ignore[attr-defined]
        if not n:
            raise OSError(0, "it is too short")
        at += n
    return into
