"""Files that claim more than they have, or are no files: whatever reads them says so in
one sentence, before it has taken the memory or waited.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import resource
import socket
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import click.testing
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import moeoff
from companions import write_expert_adapter
from helpers.files import DEMO, SMALL_TRACE
from helpers.models import rewritten, with_template
from helpers.processes import own_process, run_python, status_bytes
from moeoff.cli.main import main
from moeoff.engine.opening import plan
from moeoff.errors import ModelError, MoeoffError, OptionError
from moeoff.experts.convert import convert
from moeoff.experts.profile import Profile
from moeoff.experts.sidecar import Sidecar
from moeoff.gguf.file import FileState, ModelFile, unpack
from moeoff.gguf.imatrix import Imatrix
from moeoff.gguf.model_index import ModelIndex, loaded_whole
from moeoff.measure.perplexity import read_windows
from moeoff.measure.precision_search import search_precision
from moeoff.measure.profile_fit import calibrate
from moeoff.options import Config, ServerOptions
from moeoff.routing.trace import Trace
from moeoff.system.arrays import ArchiveError, WrongArrays, read_npz, require_arrays
from moeoff.system.files import open_file, read_file, read_text, require_new
from moeoff.system.memory import MIB, available, parse_size, peak_rss, rss
from mutants import Header, unpacks_to


@pytest.fixture(params=["pipe", "socket", "device", "folder"])
def no_file(request, tmp_path):
    """Path of something that is no file, and the words for it."""
    path = str(tmp_path / request.param)
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "folder":
        os.mkdir(path)
    elif request.param == "device":
        path = "/dev/zero"
        if not stat.S_ISCHR(os.stat(path).st_mode):
            pytest.skip("this machine has no /dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path)
            yield path, "a socket, expected a file"
            return
    yield (
        path,
        {
            "pipe": "a pipe, expected a file",
            "device": "a device, expected a file",
            "folder": "Is a directory",
        }[request.param],
    )


# --- what is read at all ---


def test_more_values_than_any_model_has(tmp_path):
    """llama.cpp would take minutes to look at 100,000."""
    path = rewritten(DEMO, tmp_path / "model.gguf", {f"moeoff.{i}": i for i in range(5000)})
    with pytest.raises(ModelError, match=r"damaged: 50\d\d values, expected at most 4096"):
        ModelFile(path)


def test_what_is_no_file_is_not_waited_for(no_file, tmp_path, demo):
    path, words = no_file
    index = ModelIndex.read(demo)
    readers = [ModelIndex.read, Sidecar, Imatrix.read, Trace.read, read_text, lambda p: Profile.read(p, index), lambda p: moeoff.Llama(demo, profile=p),
               lambda p: moeoff.Llama(demo, experts=p), lambda p: moeoff.Llama(p), lambda p: moeoff.Llama(demo, strategy="score", replay=p),
               loaded_whole, lambda p: plan(Config.make(demo, lora_path=p))]  # fmt: skip
    for read in readers:
        with pytest.raises(MoeoffError, match=words):
            read(path)
    for read in (open_file, lambda p: read_file(p, 100), lambda p: read_npz(p, 100)):
        with pytest.raises(OSError, match=words):
            read(path)


def test_a_text_may_come_from_a_pipe_that_is_open(tmp_path):
    read, write = os.pipe()
    os.write(write, b"one\r\ntwo")
    os.close(write)
    try:
        assert read_text(f"/dev/fd/{read}", newlines=True) == "one\ntwo"
    finally:
        os.close(read)
    text = tmp_path / "text"
    text.write_bytes(b"x" * 100)
    assert read_text(text, 100) == "x" * 100
    with pytest.raises(
        OptionError, match=r"text: cannot be read: it has 0.00 MiB, expected at most"
    ):
        read_text(text, 99)
    read, write = os.pipe()
    os.write(write, b"x" * 101)
    with pytest.raises(OptionError, match="expected at most"):
        read_text(f"/dev/fd/{read}", 100)
    for fd in (read, write):
        os.close(fd)


# --- archives ---


def member(array: np.ndarray, header: bytes | None = None) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    data = out.getvalue()
    if header is None:
        return data
    return (
        data[:8]
        + struct.pack("<H", len(header))
        + header
        + data[10 + struct.unpack_from("<H", data, 8)[0] :]
    )


def archive(path, **members: bytes) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return str(path)


def test_archives(tmp_path):
    path = tmp_path / "a.npz"
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.asfortranarray(np.arange(6).reshape(2, 3)), "c": np.array(True), "d": np.array(["x", "yz"]),
              "e": np.empty((0, 3))}  # fmt: skip
    np.savez_compressed(path, **arrays)
    read = read_npz(path, 10_000)
    assert all(
        np.array_equal(read[name], array) and read[name].dtype == array.dtype
        for name, array in arrays.items()
    )
    assert list(read_npz(path, 10_000, lambda name: name == "b")) == ["b"]
    with pytest.raises(ArchiveError, match="it unpacks to .*, and there is room for"):
        read_npz(path, 100)


def huge() -> bytes:
    return member(
        np.zeros(1), b"{'descr': '<f8', 'fortran_order': False, 'shape': (134217728,), }\n"
    )


@pytest.mark.parametrize("data, words", [
    (member(np.array([None])), "expected numbers"),
    (member(np.zeros(2, ">f4")), "expected numbers"),
    (member(np.zeros(2, "c16")), "expected numbers"),
    (member(np.zeros(2, [("a", "f4")])), "expected numbers"),
    (huge(), "has 8 bytes, expected 1073741824"),
    (member(np.zeros(1), b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }\n"), "has 8 bytes"),
    (member(np.zeros(1), b"(" * 9000), "has a damaged header"),
    (member(np.zeros(4))[:-8], "has 24 bytes, expected 32"),
    (member(np.zeros(2)) + bytes(8), "has 24 bytes, expected 16"),
    (b"no array", "magic"),
    (b"", "magic|EOF|expected"),
], ids=range(11))  # fmt: skip
def test_members_that_are_no_arrays(tmp_path, data, words):
    with pytest.raises(ArchiveError, match=words):
        read_npz(archive(tmp_path / "a.npz", a=data), 1 << 40)


@own_process
def test_archives_are_not_unpacked_beyond_their_room(tmp_path):
    """A gigabyte of zeros is a megabyte in an archive: nothing of it is unpacked where
    there is less room, whatever its table says.
    """
    path = tmp_path / "a.npz"
    path.write_bytes(unpacks_to(Path(archive(path)).read_bytes(), "a", 1 << 30))
    bound = status_bytes("VmData") + 400 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    with pytest.raises(ArchiveError, match="unpacks to 1.00 GiB, and there is room for 100 MiB"):
        read_npz(path, 100 * MIB)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"PK\5\6")
    raw[at + 12 : at + 16] = struct.pack("<I", 1 << 30)  # the length of the table of contents
    path.write_bytes(raw)
    with pytest.raises(ArchiveError):
        read_npz(path, 100)


def test_what_arrays_should_be():
    good = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.uint8)}
    layout = {"a": ("f", (2, "n")), "b": ("i", ("n",), 0, 5)}
    require_arrays(good, layout)
    for wrong, words in (
        ({"a": None}, "'a' is missing"),
        ({"a": np.zeros((2, 3), int)}, "'a' holds int64, expected floating point numbers"),
        ({"a": np.zeros((3, 3))}, r"'a' has the shape \(3, 3\), expected \(2, n\)"),
        ({"b": np.zeros(4, int)}, r"'b' has the shape \(4,\), expected \(3\)"),
        ({"a": np.full((2, 3), np.nan)}, "numbers from nan"),
        ({"a": np.full((2, 3), np.inf)}, "numbers from inf"),
        ({"b": np.full(3, 6)}, "numbers from 6 to 6, expected 0 to 5"),
    ):
        with pytest.raises(WrongArrays, match=words):
            require_arrays(
                {name: array for name, array in (good | wrong).items() if array is not None}, layout
            )


# --- profiles whose arrays are wrong ---


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("tau", np.zeros(2)),
        ("tier", np.zeros(1)),
        ("loss", np.array([np.nan])),
        ("ctx", np.zeros(2, int)),
        ("kl", None),
    ],
)
def test_contracts_with_wrong_arrays(demo, tmp_path, name, wrong):
    from moeoff.budget.loss_contract import Candidate, LossContract

    candidate = Candidate("original", 0.1, 0.5, 0.001, 0.002, 0.001, 0.8)
    good = LossContract(0, 1, 8, 100, 64, (candidate,)).to_section()
    assert LossContract.from_section(good).candidates == (candidate,)
    index, path = ModelIndex.read(demo), tmp_path / "p.npz"
    Profile.write(
        path,
        index,
        {
            "precision": {
                key: array for key, array in (good | {name: wrong}).items() if array is not None
            }
        },
    )
    with pytest.raises(OptionError, match="the measurement is damaged"):
        moeoff.Llama(demo, profile=str(path), max_loss="1%")


@own_process
def test_a_profile_that_leaves_no_room_is_refused(demo, tmp_path):
    index, path = ModelIndex.read(demo), tmp_path / "p.npz"
    Profile.write(path, index, {"popularity": {"counts": np.zeros((1 << 27,), np.int8)}})
    with pytest.raises(
        ModelError,
        match=r"no profile for this budget \(it unpacks to 128 MiB, and there is room for",
    ):
        moeoff.Llama(demo, profile=str(path), strategy="edgemoe", memory=f"{rss() // 2**20 + 80}M")


@own_process
def test_a_calibration_takes_no_more_for_the_profile_that_is_there(demo, tmp_path):
    index, path, text = ModelIndex.read(demo), tmp_path / "p.npz", tmp_path / "text"
    text.write_text("Once upon a time. " * 1000)
    Profile.write(path, index, {"popularity": {"counts": np.zeros((1 << 28,), np.int8)}})
    for fit in (calibrate, functools.partial(search_precision, max_loss=0.01)):
        with pytest.raises(ModelError, match=r"it unpacks to 256 MiB, and there is room for"):
            fit(demo, text=[str(text)], output=path, memory=rss() + 400 * MIB)


def test_pairs_of_experts_are_checked():
    from moeoff.policies.edgemoe import PairCounts

    start = np.array([[0, 1, 1, 1, 9]], np.uint32)
    pairs = {
        "pair_seen": np.zeros((1, 2, 2), int),
        "pair_start": start,
        "pair_expert": np.zeros(1, np.uint8),
        "pair_count": np.ones(1, np.uint16),
    }
    with pytest.raises(WrongArrays, match="points behind the end"):
        PairCounts(pairs, 1, 2)
    start[0, 4] = 1
    PairCounts(pairs, 1, 2)


# --- headers ---


def test_headers_that_are_too_long(tmp_path):
    with pytest.raises(ModelError, match="header is damaged: it is longer than 64 MiB"):
        ModelIndex.read(
            rewritten(DEMO, tmp_path / "a.gguf", {"general.description": "x" * (65 << 20)})
        )
    raw = DEMO.read_bytes()
    path = tmp_path / "b.gguf"
    path.write_bytes(raw[:8] + struct.pack("<q", 1 << 40) + raw[16:])
    with pytest.raises(ModelError, match="1099511627776 tensors, expected at most 65536"):
        ModelIndex.read(path)


def test_long_values_are_not_kept(tmp_path):
    path = rewritten(
        DEMO,
        tmp_path / "a.gguf",
        {
            "general.description": "x" * (20 << 20),
            "general.tags": ["abc"] * 400_000,
            "general.last": 7,
        },
    )
    with ModelFile(path) as whole, ModelFile(path, longest=1000) as short, ModelFile(DEMO) as demo:
        assert (
            whole.tensors == short.tensors == demo.tensors
            and short.n_strings == whole.n_strings == demo.n_strings + 400_000
        )
        assert short.metadata == {
            key: raw for key, raw in whole.metadata.items() if len(raw) <= 1000
        }
        assert (
            unpack(short.metadata["general.last"]) == 7
            and short.data("output_norm.weight").tobytes()
            == demo.data("output_norm.weight").tobytes()
        )
        assert len(whole.metadata["general.description"]) == (20 << 20) + 12


def test_a_header_that_leaves_no_room_is_refused(tmp_path):
    path = rewritten(DEMO, tmp_path / "a.gguf", {"general.description": "x" * (60 << 20)})
    with pytest.raises(
        moeoff.BudgetError,
        match="what its header says takes about 2.. MiB to read, and there is room for",
    ):
        moeoff.Llama(path, memory="200M")


EACH = """
import sys, moeoff
from moeoff.system.memory import peak_rss
for statement in sys.argv[1:]:
    try:
        exec(statement)
        said = ""
    except moeoff.MoeoffError as error:
        said = error
    print(peak_rss() >> 20, said)
"""


def texts_and_peaks(*statements: str) -> list[tuple[str, int]]:
    """Return what each expression, one after the other, says of files that ask for too
    much, and the process's peak until then in MiB. A use of freed memory ends the
    process, at its end, too.
    """
    lines = run_python(EACH, *statements, MALLOC_PERTURB_="165").splitlines()
    return [(text, int(peak)) for peak, _, text in (line.partition(" ") for line in lines)]


def with_hole(source: str, out) -> str:
    """A file with a string of 1 GiB in its header, which takes no room on the disk."""
    with ModelFile(source) as file:
        header = Header(file.header())
    header.with_string("some.text", 1 << 30).write(out, header.whole, b"")
    return str(out)


def test_adapters_that_ask_for_too_much(demo, tmp_path):
    """llama.cpp takes several times what a header has, and the weights: 2,113 MiB of
    300 for the string of 1 GiB.
    """
    small = write_expert_adapter(demo, tmp_path / "small.gguf")
    large = write_expert_adapter(demo, tmp_path / "large.gguf", rank=240)
    long = rewritten(small, tmp_path / "long.gguf", {"general.description": "x" * (60 << 20)})
    expected = {with_hole(small, tmp_path / "hole.gguf"): "header is damaged: it is longer than", long: "a budget of 200 MiB is too small",
                large: "a budget of 200 MiB is too small", small: ""}  # fmt: skip
    lines = texts_and_peaks(
        *(
            f'moeoff.Llama({demo!r}, n_ctx=256, memory="200M", lora_path={str(path)!r})'
            for path in expected
        )
    )
    assert (
        all(words in text for words, (text, _) in zip(expected.values(), lines, strict=True))
        and lines[-1][0] == ""
        and lines[-2][1] < 200
    )
    assert os.path.getsize(large) > 100 << 20


def test_an_adapter_that_cannot_be_computed_with(demo, tmp_path):
    """llama.cpp takes it, and the first batch calls a null pointer."""
    path = tmp_path / "adapter.gguf"
    write_expert_adapter(demo, path)
    for key in (b"adapter.lora.alpha", b"adapter.type"):
        data = bytearray(path.read_bytes())
        struct.pack_into("<I", data, data.index(key) + len(key), 4)
        (tmp_path / "typed.gguf").write_bytes(data)
        with pytest.raises(ModelError, match=f"typed.gguf: '{key.decode()}' is no|is damaged"):
            moeoff.Llama(demo, n_ctx=128, lora_path=str(tmp_path / "typed.gguf"))
    data, name = bytearray(path.read_bytes()), b"blk.0.ffn_down_exps.weight.lora_b"
    at = data.index(name) + len(name) + 4 + 3 * 8  # number of dimensions, dimensions
    assert data[at : at + 4] == struct.pack("<I", GGMLQuantizationType.F32)
    data[at : at + 4] = struct.pack("<I", GGMLQuantizationType.I32)
    path.write_bytes(data)
    with pytest.raises(ModelError, match="cannot compute: .*lora_b' is stored as I32"):
        moeoff.Llama(demo, n_ctx=128, lora_path=str(path))


def test_headers_of_what_a_server_loads(demo, tmp_path):
    """Headers are checked before anything is planned, because planning reads them, too."""
    from moeoff.server.extra_models import extra_models

    path = rewritten(DEMO, tmp_path / "a.gguf", {"general.description": "x" * (60 << 20)})
    words = "what its header says takes about 2.. MiB to read, and there is room for"
    models = (f"{path!r}", f"{demo!r}, draft={path!r}", f"{demo!r}, mmproj={path!r}")
    lines = texts_and_peaks(*(f'moeoff.Server({model}, port=0, memory="200M")' for model in models))
    assert all(re.search(words, text) and peak < 200 for text, peak in lines) and len(lines) == 3, (
        lines
    )
    index = ModelIndex.read(demo)
    usual, long = (
        extra_models(index, 256, Config.make(demo, draft=draft), ServerOptions(), 2 << 30)[0]
        for draft in (demo, path)
    )
    assert long - usual > 3.9 * (60 << 20)


@own_process
def test_numbers_that_llama_cpp_writes_out(tmp_path):
    """Each array as a text, for its log, whoever reads it."""
    path = rewritten(
        DEMO, tmp_path / "a.gguf", {"some.numbers": np.full(60_000, np.float64(-1e308))}
    )
    with moeoff.Llama(str(DEMO), memory="2G", n_ctx=64) as llm:
        usual = llm.engine.model_index.header_memory
    before = peak_rss()
    with moeoff.Llama(path, memory="2G", n_ctx=64) as llm:
        assert peak_rss() - before <= llm.engine.model_index.header_memory - usual + (2 << 20)


@own_process
def test_what_a_model_was_trained_for_takes_no_memory(tmp_path):
    """llama_cpp makes room for so many tokens, each time that it reads a text: 4 GiB
    here.
    """
    path = rewritten(DEMO, tmp_path / "a.gguf", {"qwen2moe.context_length": 1 << 30})
    with (
        moeoff.Llama(path, memory="300M", n_ctx=256) as llm,
        moeoff.Llama(str(DEMO), memory="600M", n_ctx=256) as other,
    ):
        for text in (b"", b"Once upon a time", "\u00e4\u4e2d".encode() * 500):
            assert llm.tokenize(text) == other.tokenize(text)
            assert other.tokenize(text) == other.tokenizer_.tokenize(text, True, False)
        one, two = (m.create_completion("Once", max_tokens=4)["choices"] for m in (llm, other))
        assert one[0]["text"] == two[0]["text"]
    assert peak_rss() < 600 * MIB  # both models, pytest and its imports


# --- contexts ---


@pytest.mark.parametrize("n_ctx", [8, 256, 300])
def test_a_context_of_any_length_can_be_filled(demo, n_ctx):
    """llama.cpp rounds up to 256; llama_cpp's list of tokens has to follow."""
    with moeoff.Llama(demo, n_ctx=n_ctx, expert_memory="4M") as llm:
        full = -(-n_ctx // 256) * 256
        assert llm.n_ctx() == full == len(llm.input_ids)
        tokens = [1 + i % 4000 for i in range(full - 2)]
        assert (
            llm.create_completion(tokens, max_tokens=9, temperature=0)["usage"]["completion_tokens"]
            == 2
        )
        with pytest.raises(ValueError, match=f"context window of {full}"):
            llm.create_completion([*tokens, 5, 5], max_tokens=1)


def test_logits_of_all_tokens_of_a_rounded_context(demo):
    with moeoff.Llama(demo, n_ctx=200, expert_memory="4M", logits_all=True) as llm:
        llm.eval([1 + i for i in range(250)])
        assert llm.scores.shape[0] == 256 and np.isfinite(llm.scores[:250]).all()


# --- traces, texts ---


def test_damaged_traces(tmp_path):
    head = {
        "name": "x",
        "n_used": 1,
        "tensors": [{"gate": 0, "layer": 0, "matrix": 0, "n_experts": 1 << 40, "nbytes": 1}],
    }
    for header, length in (
        (json.dumps(head), None),
        ("{}", None),
        ("{}", 1 << 31),
        (json.dumps(head | {"tensors": []}), None),
    ):
        path = tmp_path / "a.trace"
        path.write_bytes(
            b"MOEOFFTR" + struct.pack("<II", 7, length or len(header)) + header.encode()
        )
        with pytest.raises(OptionError, match="header is damaged"):
            Trace.read(path)


def test_a_trace_larger_than_memory_is_refused(tmp_path):
    path = tmp_path / "large.trace"
    path.write_bytes(SMALL_TRACE.read_bytes() + b"\xff" * 64)  # a damaged record ends it
    os.truncate(path, available())  # zeros that take no space
    with pytest.raises(OptionError, match=r"needs about .* GiB of memory, .* are free"):
        Trace.read(path)


def test_texts_that_are_too_long(tmp_path, monkeypatch):
    text = tmp_path / "text"
    with open(text, "wb") as file:
        file.truncate(17 << 20)

    class Reader:
        def adds_bos(self) -> bool:
            return False

        def token_bos(self) -> int:
            return 0

    with pytest.raises(OptionError, match="it has 17 MiB, expected at most 16 MiB"):
        read_windows(Reader(), [text], 64)


# --- what would be overwritten ---


def test_an_output_is_no_input(tmp_path):
    model, link, hard, other = (tmp_path / name for name in ("model", "link", "hard", "other"))
    model.write_bytes(b"x")
    link.symlink_to(model)
    hard.hardlink_to(model)
    for name in (model, link, hard, tmp_path / "." / "model"):
        with pytest.raises(
            OptionError, match=r"--out .* would replace .*model, which is in use: give another name"
        ):
            require_new(name, [None, model], "--out")
    with pytest.raises(OptionError, match="would replace"):
        require_new(other, [tmp_path / "x" / ".." / "other"], "--out")  # neither is there yet
    os.mkfifo(pipe := tmp_path / "pipe")  # nothing is lost in it, nor in /dev/null
    for name in (other, None, pipe):
        require_new(name, [model, None, pipe], "--out")


@pytest.mark.parametrize("args", [["run", "-p", "x", "-n", "1", "--stats-json"], ["run", "-p", "x", "--trace"], ["calibrate", "-o"], ["convert", "--force", "-o"]],
                         ids=lambda args: f"{args[0]} {args[-1]}")  # fmt: skip
def test_no_command_replaces_the_model(demo, tmp_path, args):
    runner, alias = click.testing.CliRunner(), tmp_path / "alias"
    alias.symlink_to(demo)
    before = FileState.read(demo)
    done = runner.invoke(
        main,
        [*args, str(alias), *([demo] if args[0] in ("calibrate", "convert") else ["-m", demo])],
        prog_name="moeoff",
    )
    assert (
        done.exit_code == 1
        and "would replace" in done.stderr
        and len(done.stderr.splitlines()) == 1
    ), done.output
    assert FileState.read(demo) == before and alias.is_symlink()


def test_a_sidecar_replaces_nothing_but_files(demo, tmp_path):
    """A device would be gone for the whole machine."""
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(OptionError, match="is no regular file"):
        convert(demo, output=path, tiers="original", force=True)
    assert stat.S_ISFIFO(path.stat().st_mode) and list(tmp_path.iterdir()) == [path]


# --- what is said ---


def test_messages_are_one_printable_line_of_bounded_length(demo, invoke, tmp_path):
    error = OptionError("a\nError: forged\x1b[2J\u2028b\udcff" + "x" * 10_000_000 + "the end")
    assert (
        str(error).isprintable()
        and len(str(error)) < 2100
        and str(error).startswith("a Error: forged\\x1b[2J")
        and str(error).endswith("the end")
    )
    path = with_template(
        demo, tmp_path / "t.gguf", "{{ raise_exception('no\nError: forged\n' + 'x' * 100000) }}"
    )
    refused = invoke("run", path, "-p", "x").stderr.removesuffix("\n")
    assert refused.isprintable() and len(refused) < 2200 and "chat template" in refused


def test_a_system_that_does_not_show_its_processes(monkeypatch):
    """As a container without /proc."""
    whole = open

    def hidden(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return whole(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", hidden)
    for ask in (rss, available, lambda: parse_size("50%")):
        with pytest.raises(
            OptionError, match="this system does not say how much memory .*is /proc mounted"
        ):
            ask()
    assert peak_rss() > 0


@pytest.mark.parametrize(
    "how, words", [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")]
)
def test_standard_output_that_cannot_be_written(how, words):
    """One sentence, also for what click prints by itself."""
    if "/dev" in how and not stat.S_ISCHR(os.stat("/dev/full").st_mode):
        pytest.skip("this machine has no /dev/full")
    for command in ("--help", f"inspect --probe off {DEMO}"):
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m moeoff.cli {command} {how}"],
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (
            1,
            f"Error: standard output cannot be written: {words}\n",
        )


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path):
    code = (
        "from moeoff.cli.options import open_standard_streams as o; o(); import os; f ="
        " open(os.devnull); print(f.fileno(), file=open('{}', 'w'))"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec {sys.executable} -c "{code.format(tmp_path / "n")}" <&- >&- 2>&-']
    )
    assert done.returncode == 0 and int((tmp_path / "n").read_text()) > 2
