"""Trouble with the disk: slow, full, read-only, without direct reads; a model that is
replaced, cut or written to while it is used.

Each case says what must be so, and is in a process of its own under a deadline. As
root, a small tmpfs is the full disk and another user finds the folder read-only; else a
limit of file sizes and the folder's rights stand for them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common import (
    DEMO,
    NATIVE,
    PROMPT,
    Call,
    Child,
    Fault,
    Kind,
    answer,
    findings,
    import_all,
    is_sentence,
    main,
    open_model,
    options_of,
    preload,
)

DEADLINE = 600
CASES: dict[str, Callable[[Path], str]] = {}


def case(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Register a case. Its docstring and its result are the row of the table."""
    CASES[function.__name__.replace("_", " ")] = function
    return function


def error_of(action: Callable[[], object], words: str) -> str:
    """The sentence of the error that it must end with."""
    import moeoff

    try:
        action()
    except moeoff.MoeoffError as error:
        assert is_sentence(str(error)) and words in str(error), f"expected {words!r} in: {error}"
        return str(error)
    raise AssertionError(f"no error, expected {words!r}")


def reference() -> list[int]:
    with open_model(DEMO) as llm:
        return answer(llm)


def model_in(folder: Path) -> str:
    return str(shutil.copy(DEMO, folder / "model.gguf"))


@case
def a_slow_disk(folder: Path) -> str:
    """each read takes 3 ms more: the same text, and an answer can be cancelled"""
    import moeoff

    model, expected = model_in(folder), reference()
    with open_model(model, strategy="lru") as llm:
        with Fault(Call.READ, Kind.DELAY, 3000, 0, of=NATIVE) as slow:
            assert answer(llm) == expected
        with Fault(Call.READ, Kind.DELAY, 100_000, 0, of=NATIVE):
            before = llm.engine.buffer.stats().reads

            def n_reads() -> int:
                return llm.engine.buffer.stats().reads - before

            def cancel() -> None:
                while n_reads() < 8:
                    time.sleep(0.01)
                llm.cancel()

            llm.engine.buffer.clear()
            canceller = threading.Thread(target=cancel)
            canceller.start()
            try:
                answer(llm)
                raise AssertionError("it was not cancelled")
            except moeoff.Cancelled:
                n = n_reads()
            canceller.join()
        assert answer(llm) == expected
    assert n < slow.fired // 2, n
    return f"{slow.fired} slow reads; cancelled after 8 of them, ended after {n}"


@case
def direct_reads_are_refused(folder: Path) -> str:
    """at the open, or at the first read, as network file systems do: reads go through
    the page cache, the same text
    """
    model, expected = model_in(folder), reference()
    for fault in (
        Fault(Call.OPEN, Kind.ERROR, errno.EINVAL, 2, of=NATIVE),
        Fault(Call.READ, Kind.ERROR, errno.EINVAL, 0, of=NATIVE),
    ):
        with fault, open_model(model, strategy="lru") as llm:
            assert answer(llm) == expected
            assert llm.engine.buffer.stats().reads > 10
        assert fault.fired, fault.fired
    return "both"


@case
def a_sparse_file(folder: Path) -> str:
    """holes where zeros were: the same text; nothing but holes behind the header: text
    or one sentence
    """
    import moeoff
    from moeoff.gguf.file import ModelFile

    expected, sparse, hollow = reference(), folder / "sparse.gguf", folder / "hollow.gguf"
    subprocess.run(["cp", "--sparse=always", DEMO, sparse], check=True)
    with open_model(str(sparse)) as llm:
        assert answer(llm) == expected
    with ModelFile(DEMO) as model:
        hollow.write_bytes(model.header())
    os.truncate(hollow, os.path.getsize(DEMO))
    try:
        with open_model(str(hollow)) as llm:
            text = f"{len(answer(llm))} tokens"
    except (moeoff.MoeoffError, RuntimeError) as error:
        text = str(error)
    return f"of the hollow one: {text}"


@case
def replaced_while_it_runs(folder: Path) -> str:
    """another file takes its name: the open one goes on, the same text"""
    model, expected = model_in(folder), reference()
    with open_model(model, strategy="lru") as llm:
        answer(llm)
        other = folder / "other"
        other.write_bytes(bytes(1 << 20))
        os.replace(other, model)
        llm.engine.buffer.clear()
        assert answer(llm) == expected
    return error_of(lambda: open_model(model), "not a GGUF file")


@case
def cut_while_it_runs(folder: Path) -> str:
    """one sentence that names it at each request; once it is whole and loaded again,
    the same text
    """
    model, expected = model_in(folder), reference()
    with open_model(model, strategy="lru") as llm:
        answer(llm)
        os.truncate(model, 3 << 20)
        llm.engine.buffer.clear()
        text = error_of(lambda: answer(llm), "model.gguf")
        error_of(lambda: answer(llm), "model.gguf")
    error_of(lambda: open_model(model), "truncated")
    shutil.copy(DEMO, model)
    with open_model(model) as llm:
        assert answer(llm) == expected
    return text


@case
def rows_that_cannot_be_read(folder: Path) -> str:
    """of the token embedding, which stays on disk: it fails, or the file ends there:
    one sentence that says where, then the same text
    """
    from moeoff.gguf.model_index import EMBEDDING, ModelIndex

    model, expected, texts = model_in(folder), reference(), []
    table = ModelIndex.read(model).row_tables[EMBEDDING]
    for kind, value in ((Kind.ERROR, errno.EIO), (Kind.END, 0)):
        with open_model(model, strategy="lru") as llm:
            with Fault(Call.READ, kind, value, 1, of=NATIVE):
                texts.append(error_of(lambda llm=llm: answer(llm), "model.gguf: read of "))
            assert (
                table.offset
                <= int(re.search(r"at offset (\d+)", texts[-1])[1])
                < table.offset + table.nbytes
            ), texts[-1]
            assert answer(llm) == expected
    return "; ".join(texts)


@case
def cut_between_two_reads(folder: Path) -> str:
    """in the middle of an answer: one sentence that names it"""
    model = model_in(folder)
    with open_model(model, strategy="lru") as llm:
        answer(llm)
        llm.engine.buffer.clear()
        llm.reset()
        llm.clear_context()

        def cut() -> None:
            tokens = llm.generate(llm.tokenize(PROMPT.encode()), top_k=1, temp=0.0)
            next(tokens)
            llm.engine.buffer.clear()
            os.truncate(model, 3 << 20)
            llm.engine.buffer.clear()
            for _ in range(20):
                next(tokens)

        return error_of(cut, "model.gguf")


@case
def cut_while_it_is_converted(folder: Path) -> str:
    """one sentence, and nothing is left"""
    from moeoff.experts.convert import convert

    model = model_in(folder)

    def cut(n: int, total: int) -> None:
        if n > total // 4:
            os.truncate(model, 3 << 20)

    text = error_of(
        lambda: convert(model, tiers="original,Q4_0", progress=cut, threads=2), "model.gguf"
    )
    assert sorted(path.name for path in folder.iterdir()) == ["model.gguf"]
    return text


@contextlib.contextmanager
def full_disk(folder: Path, room: int) -> Iterator[Path]:
    """A folder where so many bytes fit."""
    place = folder / "full"
    place.mkdir()
    if (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={room}", "none", place], capture_output=True
        ).returncode
        == 0
    ):
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", place], check=True)
        return
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield place
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@case
def full_while_it_is_converted(folder: Path) -> str:
    """refused before the work where the room is known, else one sentence; nothing is
    left, an old sidecar stays
    """
    from moeoff.experts.convert import convert

    model = model_in(folder)
    with full_disk(folder, 4 << 20) as place:
        out = place / "m.experts.gguf"
        out.write_bytes(b"old")
        message = error_of(
            lambda: convert(model, tiers="original,Q4_0", output=out, force=True), "m.experts.gguf"
        )
        assert [path.name for path in place.iterdir()] == [
            "m.experts.gguf"
        ] and out.read_bytes() == b"old"
    return message


@case
def full_while_it_is_calibrated(folder: Path) -> str:
    """one sentence, the old profile stays"""
    import numpy as np

    from moeoff.experts.profile import Profile
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate

    model, text = model_in(folder), folder / "text.txt"
    text.write_text((PROMPT + "\n") * 300)
    options = {"tokens": 512, "hidden": 0, "memory": "2G", "only": {"popularity"}}
    with full_disk(folder, 4 << 10) as place:
        profile = place / "m.profile.npz"
        Profile.write(profile, ModelIndex.read(model), {"precision": {"bits": np.arange(3)}})
        old = profile.read_bytes()
        if not os.path.ismount(place):
            resource.setrlimit(resource.RLIMIT_FSIZE, (256, -1))
        message = error_of(
            lambda: calibrate(model, text=[str(text)], output=profile, **options), "m.profile.npz"
        )
        assert [path.name for path in place.iterdir()] == [
            "m.profile.npz"
        ] and profile.read_bytes() == old
    return message


@case
def full_while_a_trace_is_written(folder: Path) -> str:
    """one sentence; what was written can be read, and the model is closed"""
    from moeoff.routing.trace import Trace

    model = model_in(folder)
    with full_disk(folder, 64 << 10) as place:

        def run() -> None:
            with open_model(model, trace=str(place / "run.trace")) as llm:
                for _ in range(20):
                    answer(llm)

        text = error_of(run, "run.trace: cannot be written")
        n = len(Trace.read(place / "run.trace").events)
    assert n > 10
    return f"{text}; {n} events are there"


@case
def a_full_cache_folder(folder: Path) -> str:
    """the warm-start file cannot be written: no error, the next start is a cold one"""
    model, expected = model_in(folder), reference()
    with full_disk(folder, 4 << 10) as place:
        os.environ["XDG_CACHE_HOME"] = str(place)
        (
            (place / "filler").write_bytes(bytes(4 << 10))
            if os.path.ismount(place)
            else resource.setrlimit(resource.RLIMIT_FSIZE, (16, -1))
        )
        for _ in range(2):
            with open_model(model, warm=True) as llm:
                assert answer(llm) == expected
    return "two starts"


@case
def a_read_only_folder(folder: Path) -> str:
    """warm-start file and profile go to the cache folder, and are found there"""
    from moeoff.experts.profile import Profile
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate

    place, cache = folder / "models", folder / "cache"
    place.mkdir()
    cache.mkdir()
    model, text = model_in(place), folder / "text.txt"
    text.write_text((PROMPT + "\n") * 300)
    options = {"tokens": 512, "hidden": 0, "memory": "2G", "only": {"popularity"}}
    # imports what the other user may not read
    calibrate(model_in(folder), text=[str(text)], **options)
    with open_model(str(folder / "model.gguf"), warm=True, profile="auto") as llm:
        answer(llm)
    for path in (place, Path(model)):
        path.chmod(0o555)
    folder.chmod(0o755)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    if os.geteuid() == 0:
        os.chown(cache, 65534, -1)
        os.setgroups([])
        os.setuid(65534)
    result = calibrate(model, text=[str(text)], **options)
    assert Path(result.path).is_relative_to(cache), result.path
    profile = Profile.find(ModelIndex.read(model))
    assert profile is not None and profile.path == result.path
    with open_model(model, warm=True, profile="auto") as llm:
        answer(llm)
    assert list(cache.rglob("warm/*.npz")), "no warm-start file"
    return ", ".join(sorted({path.parent.name for path in cache.rglob("*.npz")}))


@main.command("disk", help=__doc__)
@options_of(CASES)
def check_disk(only: tuple[str, ...], json_file: str | None) -> None:
    preload()
    import_all()
    with findings(
        json_file, "disk", "disk trouble", ["what", "what must be so", "what was said", "held"]
    ) as (table, problems):
        for name in only or CASES:
            with tempfile.TemporaryDirectory(prefix="moeoff-disk-") as folder:
                os.environ["XDG_CACHE_HOME"] = f"{folder}/own-cache"
                child = Child(
                    lambda name=name, folder=folder: print(
                        "DONE " + CASES[name](Path(folder)).replace(folder, "…")
                    )
                )
                code = child.wait(DEADLINE)
            text = next(
                (line[5:] for line in child.output.splitlines() if line.startswith("DONE ")), ""
            )
            if code != 0:
                problems.append(
                    f"{name}: {'hangs' if code is None else f'exit code {code}'}:"
                    f" {child.output[-500:]}{child.errors[-3000:]}"
                )
            table.row(name, CASES[name].__doc__ or "", text, "yes" if code == 0 else "NO")
