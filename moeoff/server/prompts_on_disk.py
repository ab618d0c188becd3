"""A server's prompts on disk, read if that is faster than computing.

A prompt is its tokens and llama.cpp's states of the model and the draft model, with
checkpoints if the state cannot be cut. A user's servers share a folder, with a file for
each prompt, written atomically with a digest. File names begin with the identity of the
server, which reads no others. The limit evicts the least recently used file, including
files of other identities unused for a day.
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
# magic, identity, number of tokens and checkpoints, tokens per second; then a table
_HEADER = struct.Struct("<8s16sIId")
_CHECKPOINTS = 2  # most checkpoints of a prompt
_DIGEST = 16  # bytes
_PIECE = 8 << 20  # bytes of one read or write
_SYNCED = 64 << 20  # bytes between syncs: dirty pages count in a cgroup's memory
_LEAST = 64  # tokens of the shortest prompt: fewer are computed before a file is open
_MOST = 512  # files, whose tokens are compared with each prompt's
_GAIN = 0.8  # most of the time to compute that reading may take
_PROBE = 0.1  # seconds
_STALE = 86_400  # seconds without use after which files of another identity are evicted


def folder() -> Path:
    """Return the folder of prompts. Raise `OSError` if there is no cache folder."""
    return cache_folder() / "prompts"


def identity(engine: Engine, options: ServerOptions, files: Sequence[str]) -> bytes:
    """Return the `state_identity` of a server that reads its model from `files`."""
    args = list(options.args)
    while "--log-file" in args:
        i = args.index("--log-file")
        del args[i : i + 2]
    parallel = options.kv_unified or options.parallel
    # the context length affects a state only if it selects rope factors
    n_ctx = (
        any("rope_factors" in name for name in engine.model_index.dense) and engine.planned.n_ctx
    )
    return state_identity(
        engine, parallel, n_ctx, engine.config.spec_type, args, [file_state(path) for path in files]
    )


@dataclass(frozen=True)
class EvictedPrompt:
    """A prompt evicted from memory.

    Attributes:
        parts: The two states at its end, and three of each checkpoint.
        free: Function that frees the parts.
        checkpoints: Number of tokens, first and last position of each checkpoint.
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
    """The header of a file.

    Attributes:
        sizes: Sizes of the parts in bytes.
        rate: Tokens per second when the prompt was computed. 0: unknown.
        checkpoints: As in `EvictedPrompt`.
    """

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
        return struct.pack(
            f"<{len(self.sizes)}Q{len(self.checkpoints)}i", *self.sizes, *self.checkpoints
        )


class _ServerEnded(Exception):
    """The server ends while a file is written."""


class PromptsOnDisk:
    """The prompts of one server.

    Args:
        folder: Folder, created at the first write.
        bound: Most bytes of this server's and stale files.
        identity: Identity of the server, see `identity`.
        prompt_rate: Function that returns the prompt's tokens per second, 0 if unknown.
        cuttable: Tokens up to which a recurrent or sliding-window state can be cut. A
            longer prompt is reused as a whole or up to a checkpoint.
        n_checkpoints: Checkpoints of a slot. Prompts with more are not restored.
        on_freed: Callback of the writing thread with a freed prompt's bytes.

    Attributes:
        n_written, n_read: Number of prompts.
        read_seconds: Duration of all reads.
    """

    def __init__(
        self,
        folder: Path,
        bound: int,
        identity: bytes,
        prompt_rate: Callable[[], float],
        on_freed: Callable[[int], object] = lambda _nbytes: None,
        cuttable: float = math.inf,
        n_checkpoints: int = 0,
    ):
        self._folder, self._bound, self._identity, self._cuttable, self._n_checkpoints = (
            folder,
            bound,
            identity,
            cuttable,
            n_checkpoints,
        )
        self._prompt_rate, self._on_freed = prompt_rate, on_freed
        self._read_rate = 0.0  # bytes per second, 0 if unknown
        self.n_written = self.n_read = 0
        self.read_seconds = 0.0
        self._lock = threading.Lock()  # guards `_stored`, which the writing thread changes
        self._writer: threading.Thread | None = None
        self._closing = False
        self._has_warned = False
        self._stored: dict[Path, StoredPrompt] = {}
        for path, _, _ in self._files():
            if self._is_own(path) and (prompt := self._open(path)) is not None:
                self._stored[path] = prompt

    # --- writing ---

    def accepts(self, tokens: Tokens, nbytes: int) -> bool:
        """Return True if a prompt is worth writing and no other one is being written."""
        writes = self._writer is not None and self._writer.is_alive()
        if (
            self._closing
            or writes
            or len(tokens) < _LEAST
            or self._file_size(len(tokens), nbytes) > self._bound
        ):
            return False
        with self._lock:
            if any(self._serves(prompt.tokens, tokens) for prompt in self._stored.values()):
                return False
        rate = self._prompt_rate()
        return rate > 0 and self._pays(nbytes, len(tokens) / rate)

    def _serves(self, stored: Tokens, tokens: Tokens) -> bool:
        """Return True if a stored prompt makes a file of `tokens` unnecessary."""
        return _common(stored, tokens) == len(tokens) and (
            len(stored) == len(tokens) or len(stored) <= self._cuttable
        )

    def store(self, prompt: EvictedPrompt) -> None:
        """Write a prompt on a new thread."""
        writer = threading.Thread(
            target=self._write, args=(prompt,), name="moeoff-prompts", daemon=True
        )
        try:
            writer.start()
        except RuntimeError:  # no more threads
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
            self._warn(error.message)
        except _ServerEnded:
            pass
        finally:
            self._free(prompt)

    def _write_file(self, prompt: EvictedPrompt) -> None:
        sizes = tuple(part.nbytes for part in prompt.parts)
        stored = StoredPrompt(
            self._path(prompt.tokens), prompt.tokens, sizes, self._prompt_rate(), prompt.checkpoints
        )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._make_room(
                self._file_size(len(stored.tokens), stored.nbytes, len(stored.checkpoints) // 3)
            ):
                self._warn(f"{self._folder}: disk nearly full: prompts are not kept")
                return
        except OSError as error:
            raise WriteError(
                f"{self._folder}: prompts cannot be written: {error.strerror}"
            ) from None
        with atomic_file(stored.path) as file:
            fd, digest, unsynced = file.fileno(), hashlib.blake2b(digest_size=_DIGEST), 0
            os.fchmod(fd, 0o600)
            header = _HEADER.pack(
                _MAGIC,
                self._identity,
                len(stored.tokens),
                len(stored.checkpoints) // 3,
                stored.rate,
            )
            for part in (
                memoryview(header + stored.table),
                stored.tokens.data.cast("B"),
                *prompt.parts,
            ):
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
            for shorter in [
                other
                for other in self._stored.values()
                if self._serves(stored.tokens, other.tokens)
            ]:
                if shorter.path != stored.path:
                    self._remove(shorter.path)
            self._stored[stored.path] = stored
            self.n_written += 1

    def _path(self, tokens: Tokens) -> Path:
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
        return self._folder / f"{self._identity.hex()}-{digest}{_SUFFIX}"

    def _make_room(self, nbytes: int) -> bool:
        """Evict least recently used files, or return False on a nearly full disk."""
        stale = time.time() - _STALE
        files = sorted(
            (file for file in self._files() if self._is_own(file[0]) or file[2] < stale),
            key=lambda file: file[2],
        )
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

    # --- reading ---

    def find(self, tokens: Tokens, n_have: int) -> StoredPrompt | None:
        """Return the prompt that saves the most time for `tokens`, or None.

        Args:
            n_have: Number of tokens at the beginning that are already computed.
        """
        with self._lock:
            common = [(_common(prompt.tokens, tokens), prompt) for prompt in self._stored.values()]
        best: StoredPrompt | None = None
        most, measured = 0.0, self._prompt_rate()
        for n, prompt in common:
            rate = measured or prompt.rate
            if len(prompt.tokens) > self._cuttable and not n == len(prompt.tokens) < len(tokens):
                n = max(
                    (
                        place
                        for place in prompt.checkpoints[::3]
                        if place <= min(n, len(tokens) - 1)
                    ),
                    default=0,
                )
            if (
                n - n_have < _LEAST
                or rate <= 0
                or len(prompt.checkpoints) > 3 * self._n_checkpoints
            ):
                continue
            if not self._read_rate:
                self._measure(prompt)
            computing = (n - n_have) / rate
            saves = computing - prompt.nbytes / self._read_rate if self._read_rate else 0.0
            if saves > most and self._pays(prompt.nbytes, computing):
                best, most = prompt, saves
        return best

    def read(self, prompt: StoredPrompt, into: Sequence[memoryview]) -> bool:
        """Read a prompt's parts. Return False, and delete the file, if that fails."""
        began = time.perf_counter()
        try:
            with open_file(prompt.path) as file:
                digest = hashlib.blake2b(digest_size=_DIGEST)
                known = prompt.table + prompt.tokens.tobytes()
                head = _read_all(file, memoryview(bytearray(_HEADER.size + len(known))))
                digest.update(head)
                whole = (
                    os.fstat(file.fileno()).st_size == len(head) + prompt.nbytes + _DIGEST
                    and head[_HEADER.size :] == known
                )
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
        self._read_rate = (
            (self._read_rate + prompt.nbytes / seconds) / 2
            if self._read_rate
            else prompt.nbytes / seconds
        )
        with contextlib.suppress(OSError):
            os.utime(prompt.path)
        return True

    def _pays(self, nbytes: int, computing: float) -> bool:
        """Return True if reading is faster, or if the read rate is unknown."""
        return not self._read_rate or nbytes / self._read_rate < _GAIN * computing

    def _measure(self, prompt: StoredPrompt) -> None:
        try:
            self._read_rate = probe(prompt.path, 1 << 20, _PROBE, 1).bytes_per_second
        except ModelError as error:
            self._drop(prompt.path, error.message)

    # --- files ---

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the folder."""
        return sum(size for _, size, _ in self._files())

    def _is_own(self, path: Path) -> bool:
        return path.name.startswith(self._identity.hex()) and path.suffix == _SUFFIX

    def _files(self) -> list[tuple[Path, int, float]]:
        """Return path, size and mtime of all files, including incomplete ones."""
        out = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        out.append((Path(entry.path), entry.stat().st_size, entry.stat().st_mtime))
        return out

    def _file_size(self, n_tokens: int, nbytes: int, n_checkpoints: int = 0) -> int:
        return (
            _HEADER.size
            + 8 * (2 + 3 * n_checkpoints)
            + 12 * n_checkpoints
            + 4 * n_tokens
            + nbytes
            + _DIGEST
        )

    def _open(self, path: Path) -> StoredPrompt | None:
        """Read a file's header. Return None, and delete the file, if it is damaged."""
        try:
            with open_file(path) as file:
                magic, identity, n, n_checkpoints, rate = _HEADER.unpack(
                    _read_all(file, memoryview(bytearray(_HEADER.size)))
                )
                if (
                    magic != _MAGIC
                    or identity != self._identity
                    or n < _LEAST
                    or n_checkpoints > _CHECKPOINTS
                ):
                    raise OSError(0, "damaged")
                table = struct.Struct(f"<{2 + 3 * n_checkpoints}Q{3 * n_checkpoints}i")
                numbers = table.unpack(_read_all(file, memoryview(bytearray(table.size))))
                sizes, checkpoints = (
                    numbers[: 2 + 3 * n_checkpoints],
                    numbers[2 + 3 * n_checkpoints :],
                )
                if os.fstat(file.fileno()).st_size != self._file_size(
                    n, sum(sizes), n_checkpoints
                ) or not all(0 < place <= n for place in checkpoints[::3]):
                    raise OSError(0, "damaged")
                tokens = np.frombuffer(_read_all(file, memoryview(bytearray(4 * n))), np.int32)
        except OSError as error:
            self._drop(path, error.strerror or str(error))
            return None
        return StoredPrompt(path, tokens, sizes, rate, checkpoints)

    def _drop(self, path: Path, why: str) -> bool:
        if path.exists():  # else another server has deleted it
            self._warn(f"{path}: stored prompt deleted: {why}")
        with self._lock:
            self._remove(path)
        return False

    def _remove(self, path: Path) -> None:
        """Delete a file. The lock must be held."""
        self._stored.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()

    def _warn(self, text: str) -> None:
        """Print the first warning only: a full disk fails for every prompt."""
        if not self._has_warned:
            self._has_warned = True
            note(text)

    def join(self, deadline: float) -> None:
        """Wait for the running write until a deadline of `time.monotonic`."""
        if self._writer is not None:
            self._writer.join(max(deadline - time.monotonic(), 0.0))

    def close(self, deadline: float = 0.0) -> None:
        """Wait for the running write until a deadline, then abort it."""
        self.join(deadline)
        self._closing = True
        if self._writer is not None:
            self._writer.join()


def _common(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _read_all(file: object, into: memoryview) -> memoryview:
    """Fill a buffer from an unbuffered file. Raise `OSError` at its end."""
    at = 0
    while at < into.nbytes:
        n = file.readinto(into[at:])  # type: ignore[attr-defined]
        if not n:
            raise OSError(0, "truncated")
        at += n
    return into
