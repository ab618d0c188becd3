"""Tables on disk, as the token embedding: their rows against ggml's own of the same
bytes in memory, and models that have some or need one whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moeoff
from helpers.arch_models import open_moeoff, open_stock, run, write_model
from helpers.budgets import needed
from helpers.files import ROOT
from helpers.ggml_api import ABORTED, F32, Context, quantizable_types
from helpers.logits import Stock, assert_bit_equal, greedy_logits
from helpers.models import rewritten, split_model, write_per_layer_model
from helpers.row_tables import MAPPED, ON_DISK, Rows
from model_writer import ModelWriter
from moeoff import ModelError, ReadError
from moeoff.budget.dry_load import memory_sizes
from moeoff.engine.buffer import ExpertBuffer
from moeoff.gguf.file import ModelFile, unpack
from moeoff.gguf.model_index import EMBEDDING, OUTPUT, ModelIndex
from moeoff.gguf.quantize import row_bytes
from moeoff.llamacpp import native
from moeoff.system import cgroup
from moeoff.system.memory import MIB

TYPES = quantizable_types()
N_ROWS, N_COLS, OFFSET = 120, 256, 4128
OPTIONS = {"n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "logits_all": True, "verbose": False}


@pytest.fixture
def rows(tmp_path):
    """Opens lookups of n tokens in a table of a type, of random bytes between others."""
    with contextlib.ExitStack() as stack:

        def open_rows(type: int, n_tokens: int, **options) -> Rows:
            path = tmp_path / str(type)
            if not path.exists():
                # all bits mean something
                path.write_bytes(
                    np.random.default_rng(type).bytes(
                        OFFSET + N_ROWS * row_bytes(type, N_COLS) + 100
                    )
                )
            return stack.enter_context(
                Rows(path, type, (N_ROWS, N_COLS), n_tokens, OFFSET, **options)
            )

        yield open_rows


@pytest.mark.parametrize("name", ["F16", "F32", "Q4_K", "Q8_0"])
def test_a_row_that_is_cast(name, rows, backend):
    """As gemma4 takes the first one in the place of a picture's."""
    table = rows(TYPES[name], 1)
    for n_threads in (1, 2):
        np.testing.assert_array_equal(
            table.cast_third(backend, ON_DISK, n_threads),
            table.cast_third(backend, MAPPED, n_threads),
        )


def assert_same(table: Rows, backend, ids: np.ndarray, n_threads: int) -> None:
    table.prepare(ids)
    for way in (ON_DISK, MAPPED):
        table.compute(backend, way, n_threads)
    np.testing.assert_array_equal(table.result(ON_DISK), table.result(MAPPED))


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, rows, backend):
    rng = np.random.default_rng(1)
    for n_tokens in (1, 2, 7, 400):
        table = rows(TYPES[name], n_tokens)
        for n_threads in (1, 2, 4):
            for ids in (
                rng.integers(0, N_ROWS, n_tokens),
                np.full(n_tokens, N_ROWS - 1),
                np.arange(n_tokens)[::-1] % N_ROWS,
            ):
                assert_same(table, backend, ids, n_threads)


def test_through_the_page_cache(rows, backend):
    table = rows(TYPES["Q8_0"], 400, direct_io=False)
    assert_same(table, backend, np.random.default_rng(1).integers(0, N_ROWS, 400), 2)


def test_what_lookups_are_counted(rows, backend):
    """A row once a batch; those on one page are one read."""
    # two rows of each page, each twice
    table, ids = rows(TYPES["Q8_0"], 32), np.repeat(np.arange(0, 128, 8), 2) % N_ROWS
    for hits in (0, 15):
        assert_same(table, backend, ids, 2)
        stats = table.buffer.stats()
        assert (stats.row_hits, stats.row_misses, stats.row_bytes_read) == (hits, 15, 8 * 4096)


@pytest.mark.parametrize("n_threads", [1, 2, 4])
def test_a_graph_that_cannot_be_computed(n_threads, rows, backend):
    """A file cut off, or a row that is not in the table: the graph ends with a message,
    and the next one is right.
    """
    table = rows(TYPES["Q8_0"], 8)
    content = table.path.read_bytes()
    ids = np.array([1, 2, 3, 4, 5, 6, 7, 100])
    begin = OFFSET + 100 * table.row_bytes
    backend.set_abort_callback(native.should_abort, table.buffer.handle)
    with open(table.path, "r+b") as file:
        file.truncate(begin + 10)
    for batch, message in (
        (
            ids,
            (
                f"^{table.path}: read of {table.row_bytes} bytes at offset {begin} failed: the file"
                f" ends at {begin + 10} "
            ),
        ),
        (ids + N_ROWS - 100, f"^table.weight: a token names row {N_ROWS} of {N_ROWS}"),
        (ids - 5, f"^table.weight: a token names row -4 of {N_ROWS}"),
    ):
        table.prepare(batch)
        table.compute(backend, ON_DISK, n_threads, status=ABORTED)
        with pytest.raises(ReadError, match=message):
            table.buffer.check()
    table.path.write_bytes(content)
    assert_same(table, backend, ids, n_threads)
    backend.set_abort_callback(None, None)


def logits(model, n_steps: int = 6) -> np.ndarray:
    return greedy_logits(
        model,
        model.tokenize(b"A heron stood in the shallow water, and nothing moved but the light."),
        n_steps,
    )


def test_it_is_not_in_memory(demo):
    model_index = ModelIndex.read(demo)
    with (
        contextlib.closing(Stock(demo, **OPTIONS)) as stock,
        moeoff.Llama(demo, expert_memory="1G", **OPTIONS) as model,
    ):
        assert_bit_equal(logits(model), logits(stock))
        assert (
            memory_sizes(model).weights
            == model_index.dense_bytes - model_index.dense[EMBEDDING].nbytes
        )
        assert (
            model.engine.plan.on_disk
            == model.stats().row_table_bytes
            == model_index.dense[EMBEDDING].nbytes
        )


def test_it_lies_in_a_later_part(demo, tmp_path):
    backwards = tmp_path / "backwards.gguf"
    with ModelFile(demo) as model:
        tensors = list(reversed(model.tensors.values()))
        with ModelWriter(backwards, model.metadata, tensors) as file:
            for tensor in tensors:
                file.write(model.data(tensor.name))
    first = str(split_model(str(backwards), tmp_path, 3)[0])
    assert ModelIndex.read(first).row_tables[EMBEDDING].file == 2
    with (
        contextlib.closing(Stock(demo, **OPTIONS)) as stock,
        moeoff.Llama(first, expert_memory="1G", **OPTIONS) as model,
    ):
        assert_bit_equal(logits(model), logits(stock))


@pytest.mark.parametrize("architecture", ["qwen3moe", "cohere2moe", "granitemoe"])
def test_an_output_matrix_stays_in_memory(architecture, writer, folder):
    """Models without an output matrix multiply with their embedding, and need it whole."""
    untied = write_model(writer, folder, architecture, "Q8_0")
    tied = folder / "tied.gguf"
    rewritten(untied, tied, arrays={OUTPUT: None})
    model_index = ModelIndex.read(tied)
    assert EMBEDDING in model_index.dense and not model_index.row_tables
    with open_stock(tied) as stock, open_moeoff(tied) as model:
        np.testing.assert_array_equal(run(model), run(stock))
        assert model.engine.plan.on_disk == model.stats().row_table_bytes == 0
        assert memory_sizes(model).weights >= model_index.dense_bytes


PER_LAYER = "per_layer_token_embd.weight"


@pytest.fixture(scope="module")
def per_layer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("per-layer") / "model.gguf"
    write_per_layer_model(path, 1024)
    return str(path)


def test_a_row_for_each_layer(per_layer):
    """Per-layer rows, also of a model whose token embedding is its output matrix."""
    model_index = ModelIndex.read(per_layer)
    assert list(model_index.row_tables) == [PER_LAYER]
    with (
        contextlib.closing(Stock(per_layer, **OPTIONS)) as stock,
        moeoff.Llama(per_layer, expert_memory="1M", **OPTIONS) as model,
    ):
        assert_bit_equal(logits(model), logits(stock))
        assert (
            model.engine.plan.on_disk
            == model.stats().row_table_bytes
            == model_index.dense[PER_LAYER].nbytes
        )
        assert (
            model.engine.planned.weights
            == memory_sizes(model).weights
            < model_index.dense[PER_LAYER].nbytes
        )


_WRITES = """
import json, sys, moeoff
with moeoff.Llama(sys.argv[1], memory=sys.argv[2], n_ctx=256, verbose=False) as llm:
    llm.create_completion("A heron stood in the shallow water.", max_tokens=24, temperature=0)
    print(llm.stats().peak_rss_bytes)
"""


@pytest.mark.cgroup
@pytest.mark.skipif(cgroup.unavailable() is not None, reason=str(cgroup.unavailable()))
def test_a_table_is_never_in_memory(per_layer):
    """In a cgroup of no more than a budget that the table alone exceeds."""
    table, memory = (
        ModelIndex.read(per_layer).dense[PER_LAYER].nbytes,
        needed(per_layer, n_ctx=256, verbose=False) << 20,
    )
    with cgroup.memory_cgroup(memory) as group:
        done = group.run(
            [sys.executable, "-c", _WRITES, per_layer, str(memory)],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory < table + 100 * MIB


def with_longer_table(path: Path, out: Path, n_rows: int) -> Path:
    """A copy of a qwen4exp model whose n-grams have so many rows, random ones."""
    with ModelFile(path) as model:
        heads = len(unpack(model.metadata["qwen4exp.ple.head_vocab_sizes"]))
        sizes = np.full(heads, n_rows // heads, np.uint64)
        changed = {
            "qwen4exp.ple.head_vocab_sizes": sizes,
            "qwen4exp.ple.head_offsets": np.arange(heads, dtype=np.uint64) * sizes,
        }
        shape = n_rows, model.tensors[PER_LAYER].shape[-1]
    rewritten(
        path,
        out,
        changed,
        arrays={PER_LAYER: np.random.default_rng(0).standard_normal(shape, np.float32)},
    )
    return out


def test_rows_for_n_grams(writer, folder):
    """Several heads for each token, in a table of two hundred thousand rows."""
    path = with_longer_table(
        write_model(writer, folder, "qwen4exp", "Q8_0"), folder / "longer.gguf", 200_000
    )
    model_index = ModelIndex.read(path)
    assert set(model_index.row_tables) == {EMBEDDING, PER_LAYER}
    with open_stock(path) as stock, open_moeoff(path, floor=True) as model:
        np.testing.assert_array_equal(run(model), run(stock))
        assert model.stats().row_table_bytes == sum(
            model_index.dense[name].nbytes for name in (EMBEDDING, PER_LAYER)
        )


def test_a_model_whose_file_was_replaced(demo):
    buffer, context = ExpertBuffer(), Context()
    with contextlib.closing(buffer), contextlib.closing(context):
        context.tensor(F32, 32, 4, name=EMBEDDING)
        with buffer.loading():
            context.allocate(native.buffer_type())
        with pytest.raises(ModelError, match="not in the file as llama.cpp loaded it"):
            buffer.attach(ModelIndex.read(demo))


def test_an_embedding_that_the_user_places_is_planned_in_memory(demo):
    with moeoff.Llama(demo, n_ctx=64, memory="2G", override_tensor="token_embd=CPU") as llm:
        assert llm.stats().row_table_bytes == llm.engine.planned.on_disk == 0
        assert (
            llm.engine.planned.weights
            == memory_sizes(llm).weights
            == ModelIndex.read(demo).dense_bytes
        )


_HANGING_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>
volatile int disk_hangs, n_waits;
long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_getevents && disk_hangs) {
        const struct timespec * timeout = (const struct timespec *) a[4], while_it_does = { 1000, 0 };
        n_waits++;
        nanosleep(timeout ? timeout : &while_it_does, 0);
        return 0;
    }
    long (*next)(long, ...) = (long (*)(long, ...)) dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""
_CANCELLED = """
import ctypes, sys, threading
from pathlib import Path
import numpy as np
from helpers.ggml_api import ABORTED, Backend
from helpers.row_tables import MAPPED, ON_DISK, Rows
from helpers.waiting import wait_until
from moeoff.llamacpp import native
disk = ctypes.CDLL(sys.argv[2])
hangs, n_waits = (ctypes.c_int.in_dll(disk, name) for name in ("disk_hangs", "n_waits"))
backend, ids, status = Backend(), np.arange(0, 120, 9), []
with Rows(Path(sys.argv[1]), 0, (120, 256), len(ids)) as table:
    backend.set_abort_callback(native.should_abort, table.buffer.handle)
    table.prepare(ids)
    hangs.value = 1
    thread = threading.Thread(target=lambda: status.append(table.status(backend, ON_DISK)))
    thread.start()
    wait_until(lambda: n_waits.value > 3)
    table.buffer.set_cancelled(True)
    thread.join(10)
    assert status == [ABORTED], "it still waits" if thread.is_alive() else status
    table.buffer.set_cancelled(False)
    table.buffer.check()
    hangs.value = 0
    for way in (ON_DISK, MAPPED):
        table.compute(backend, way)
    np.testing.assert_array_equal(table.result(ON_DISK), table.result(MAPPED))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")
def test_a_read_that_hangs_is_cancelled(tmp_path):
    """Without an error, and the next graph is right."""
    source, library, table = tmp_path / "disk.c", tmp_path / "disk.so", tmp_path / "table"
    source.write_text(_HANGING_DISK)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-ldl", "-o", library], check=True)
    table.write_bytes(
        np.random.default_rng(1).standard_normal((N_ROWS, N_COLS), np.float32).tobytes()
    )
    path = os.pathsep.join(str(folder) for folder in (ROOT / "tests", ROOT))
    done = subprocess.run([sys.executable, "-c", _CANCELLED, table, library], env=os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
