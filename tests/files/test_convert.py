"""Converting and verifying: every shape, type and shard; damaged sidecars; and what
interrupts a builder.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.files import COMMAND
from helpers.processes import own_process
from helpers.refusals import parse_options, refusals, refused
from helpers.waiting import wait_until
from model_writer import ModelWriter
from moeoff import ModelError, OptionError
from moeoff.experts import convert as module
from moeoff.experts.convert import convert
from moeoff.experts.sidecar import ALIGNMENT, Sidecar, hash64
from moeoff.experts.tiers import lower_type, nearest
from moeoff.experts.verify import verify
from moeoff.gguf.file import ModelFile, Tensor, unpack
from moeoff.gguf.imatrix import Imatrix
from moeoff.gguf.quantize import fits, quantize, row_bytes, type_from_name, type_name
from moeoff.system.memory import peak_rss
from mutants import mutate

SOURCES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q6_K")
TARGETS = (
    "original",
    "auto",
    "Q2_K",
    "Q3_K",
    "Q4_0",
    "Q8_0",
    "F16",
    "MXFP4",
    "IQ4_XS",
    "Q2_0",
    "NVFP4",
)


def write_model(
    folder: Path,
    *,
    n_layer=2,
    n_expert=3,
    n_ff=5,
    n_cols=64,
    down_cols=64,
    type="F16",
    n_parts=1,
    seed=0,
) -> Path:
    """A GGUF of routed experts and little else, in one file or several; weights are
    normal.
    """
    rng = np.random.default_rng(seed)
    tensors, data = (
        [Tensor("token_embd.weight", (7, 32), 0)],
        [rng.normal(size=(7, 32)).astype(np.float32).view(np.uint8)],
    )
    for layer in range(n_layer):
        for matrix, rows, cols in (
            ("gate", n_ff, n_cols),
            ("down", n_cols, down_cols),
            ("up", n_ff, n_cols),
        ):
            kind = type_from_name(type)
            kind = kind if fits(kind, cols) else type_from_name("F16")
            tensors.append(
                Tensor(f"blk.{layer}.ffn_{matrix}_exps.weight", (n_expert, rows, cols), kind)
            )
            data.append(quantize(rng.normal(size=(n_expert * rows, cols)).astype(np.float32), kind))
    cuts = [len(tensors) * i // n_parts for i in range(n_parts + 1)]
    base = {
        "general.architecture": "qwen3moe",
        "qwen3moe.expert_count": n_expert,
        "qwen3moe.expert_used_count": 1,
    }
    paths = []
    for part in range(n_parts):
        split = (
            {"split.no": struct.pack("<IH", 2, part), "split.count": struct.pack("<IH", 2, n_parts)}
            if n_parts > 1
            else {}
        )
        paths.append(
            folder / (f"m-{part + 1:05d}-of-{n_parts:05d}.gguf" if n_parts > 1 else "m.gguf")
        )
        with ModelWriter(
            paths[-1],
            (base if part == 0 else {}) | split,
            tensors[cuts[part] : cuts[part + 1]],
            overwrite=True,
        ) as writer:
            for piece in data[cuts[part] : cuts[part + 1]]:
                writer.write(piece)
    return paths[0]


def leftovers(folder: Path) -> list[str]:
    return sorted(
        p.name for p in folder.iterdir() if not p.name.startswith("m") or "experts" in p.name
    )


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    n_expert=st.integers(1, 5),
    n_ff=st.integers(1, 9),
    n_cols=st.sampled_from([32, 64, 96, 256, 1408]),
    down_cols=st.sampled_from([32, 256, 352]),
    type=st.sampled_from(SOURCES),
    tiers=st.lists(st.sampled_from(TARGETS), min_size=1, max_size=3, unique=True),
    n_parts=st.integers(1, 4),
    threads=st.integers(1, 4),
    piece=st.sampled_from([1, 300, 5000, 1 << 20]),
)
def test_every_slice_is_what_the_quantizer_makes(
    tmp_path, monkeypatch, n_expert, n_ff, n_cols, down_cols, type, tiers, n_parts, threads, piece
):
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    for name in ("_PIECE_VALUES", "_PIECE_BYTES"):
        monkeypatch.setattr(module, name, piece)
    model = write_model(
        tmp_path,
        n_expert=n_expert,
        n_ff=n_ff,
        n_cols=n_cols,
        down_cols=down_cols,
        type=type,
        n_parts=n_parts,
    )
    made = convert(model, tiers=",".join(tiers), threads=threads)
    assert verify(made.path).model == str(model)
    sidecar = Sidecar(made.path)
    assert os.path.getsize(made.path) == made.n_bytes and made.n_experts == 2 * n_expert
    sources = {}
    for part in tmp_path.glob("m*.gguf"):
        if ".experts" not in part.name:
            with ModelFile(part) as file:
                sources |= {
                    n: (t, file.data(n).copy(), file.rows(n)) for n, t in file.tensors.items()
                }
    assert len(sidecar.slices) == 2 * 3 * n_expert * len(tiers)
    with open(made.path, "rb") as file:
        for (name, expert, tier), s in sidecar.slices.items():
            tensor, data, values = sources[name]
            rows = slice(expert * tensor.shape[1], (expert + 1) * tensor.shape[1])
            of_tier = (
                {"original": tensor.type, "auto": lower_type(tensor.type)}.get(tier)
                if tier in ("original", "auto")
                else type_from_name(tier)
            )
            held = nearest(of_tier, tensor.shape[2])
            if tier == "auto" and row_bytes(held, 256) >= row_bytes(tensor.type, 256):
                held = tensor.type
            assert s.type == held and s.offset % ALIGNMENT == 0 and s.shape == tensor.shape[1:]
            expected = data[rows] if s.type == tensor.type else quantize(values[rows], s.type)
            assert os.pread(file.fileno(), s.nbytes, s.offset) == expected.tobytes()
            assert s.hash == hash64(expected.tobytes())
            assert sidecar.source_hashes[name, expert] == hash64(data[rows].tobytes())


def test_nearest_and_lower_types():
    name = lambda type, cols: type_name(nearest(type_from_name(type), cols))  # noqa: E731
    assert (
        name("Q2_K", 1408) == "Q2_0"
        and name("Q2_K", 512) == "Q2_K"
        and name("Q6_K", 1408) == "Q5_1"
    )
    assert (
        name("Q4_K", 32) == "IQ4_NL"
        and name("Q2_K", 32) == "IQ4_NL"
        and name("Q8_0", 17) == "F16"
        and name("F32", 17) == "F32"
    )
    assert [
        type_name(lower_type(type_from_name(t))) for t in ("Q4_K", "Q8_0", "MXFP4", "Q2_K")
    ] == ["Q2_K", "Q4_0", "Q2_K", "Q2_K"]


# --- damage ---


@pytest.mark.parametrize("n, seed", [(200, 1), pytest.param(10_000, 2, marks=pytest.mark.slow)])
def test_fuzz(tmp_path, n, seed):
    model = write_model(tmp_path, n_layer=1, n_expert=2, n_ff=3)
    path = convert(model, tiers="original,Q2_0").path
    good = Path(path).read_bytes()
    slices = Sidecar(path).slices
    weights = lambda data: [data[s.offset : s.offset + s.nbytes] for s in slices.values()]  # noqa: E731
    original, rng, undetected = weights(good), random.Random(seed), 0
    for i in range(n):
        data = mutate(good, rng)
        Path(path).write_bytes(data)
        try:
            verify(path)
        except ModelError as error:
            assert path in str(error) and "\n" not in str(error)
            continue
        undetected += 1
        # padding between slices
        assert weights(data) == original and Sidecar(path).slices == slices, (seed, i)
    assert undetected < n / 2


def test_verify_names_the_model_that_changed(tmp_path):
    model = write_model(tmp_path, n_ff=200)
    path = convert(model, tiers="Q2_0").path
    with ModelFile(model) as file:
        offset = (
            file.offset("blk.1.ffn_up_exps.weight")
            + file.tensors["blk.1.ffn_up_exps.weight"].n_bytes
            - 1
        )
    with open(model, "r+b") as file:  # one byte where no sample is taken
        file.seek(offset)
        file.write(b"\x5a")
    with pytest.raises(ModelError, match=r"blk.1.ffn_up_exps.weight, expert 2 changed since"):
        verify(path)
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(path, tmp_path / "elsewhere" / "x.gguf")
    assert verify(moved).model is None
    with pytest.raises(ModelError, match="cannot be read"):
        verify(tmp_path / "none.gguf")


# --- what interrupts ---


def test_refuses_to_overwrite(tmp_path):
    model = write_model(tmp_path)
    path = convert(model).path
    before = Path(path).read_bytes()
    with pytest.raises(OptionError, match="force=True"):
        convert(model)
    convert(model, tiers="original", force=True)
    assert Path(path).read_bytes() != before
    with pytest.raises(OptionError, match="would replace .*m.gguf, which is in use"):
        convert(model, output=model, force=True)
    with pytest.raises(ModelError, match="a sidecar, not a model"):
        convert(path)
    with pytest.raises(OptionError, match="no such folder"):
        convert(model, output=tmp_path / "no" / "x.gguf")


def test_dry_run_writes_nothing(tmp_path):
    model = write_model(tmp_path)
    plan = convert(model, tiers="original,Q4_0", dry_run=True)
    assert leftovers(tmp_path) == []
    sidecar = convert(model, tiers="original,Q4_0")
    assert (sidecar.n_bytes, sidecar.tiers) == (plan.n_bytes, plan.tiers)


def test_bad_options(tmp_path):
    model = write_model(tmp_path, n_cols=256)
    for row in refusals("convert"):
        given_options, code, words = row.values
        with refused(code, words):
            convert(model, **parse_options(given_options))
    for plan, message in [
        ("[]", "expected"),
        ("{", "not JSON"),
        ('{"layers": {"9": "Q4_0"}}', "'9' has no"),
        ('{"layers": {"0": {"3": "Q4_0"}}}', "0 to 2"),
        # more digits than Python makes a number of
        ('{"layers": {"%s": "Q4_0"}}' % ("9" * 5000), "9' has no"),
        ('{"layers": {"0": {"%s": "Q4_0"}}}' % ("9" * 5000), "0 to 2"),
        ('{"default": "x"}', "expected a ggml type"),
        ('{"default": 3}', "found 3"),
    ]:
        (tmp_path / "m.json").write_text(plan)
        with pytest.raises(OptionError, match=message):
            convert(model, bits=tmp_path / "m.json")
    assert leftovers(tmp_path) == []


def test_values_that_are_not_finite(tmp_path):
    model = write_model(tmp_path)
    with ModelFile(model) as file:
        offset = file.offset("blk.1.ffn_down_exps.weight")
    with open(model, "r+b") as file:
        file.seek(offset)
        file.write(struct.pack("<e", float("nan")))
    with pytest.raises(ModelError, match="expert 0 of blk.1.ffn_down_exps.weight: cannot quantize"):
        convert(model)
    assert leftovers(tmp_path) == []
    convert(model, tiers="original")


def start(model: Path, *options: str, **kwargs) -> subprocess.Popen:
    command = [COMMAND, "convert", str(model), "--tiers", "original,IQ4_XS", *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **kwargs)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("large"), n_layer=2, n_expert=6, n_ff=768, n_cols=512, down_cols=768
    )


@pytest.fixture
def large(large_model, tmp_path) -> Path:
    os.link(large_model, tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def wait_for_part(folder: Path, n_jobs: int = 0) -> None:
    """Until something is written, and the journal knows of so many slices."""
    part, journal = folder / ".m.experts.gguf.part", folder / ".m.experts.gguf.part.journal"
    wait_until(lambda: part.exists() and part.stat().st_blocks >= 100)
    wait_until(
        lambda: not n_jobs or (journal.exists() and journal.stat().st_size >= 32 + 28 * n_jobs)
    )


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(large, tmp_path, sign):
    with start(large) as process:
        wait_for_part(tmp_path)
        process.send_signal(sign)
        error = process.stderr.read()
    assert process.returncode == 130 and error == "interrupted: nothing was written\n"
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_resume(large, tmp_path, sign):
    expected = Path(
        convert(large, tiers="original,IQ4_XS", output=tmp_path / "m-whole.gguf").path
    ).read_bytes()
    with start(large, "--resume") as process:
        wait_for_part(tmp_path, 10)
        process.send_signal(sign)
        assert process.stderr.read() == (
            "interrupted: repeat with --resume to continue\n" if sign == signal.SIGINT else ""
        )
    part = tmp_path / ".m.experts.gguf.part"
    assert part.exists() and not (tmp_path / "m.experts.gguf").exists()
    with open(part, "r+b") as file:  # a crash may lose what the journal claims
        file.seek(ALIGNMENT * 40)
        file.write(bytes(4096))
    seen = []
    made = convert(
        large, tiers="original,IQ4_XS", resume=True, progress=lambda n, total: seen.append(n)
    )
    assert Path(made.path).read_bytes() == expected
    assert seen[0] > 0 and not part.exists() and leftovers(tmp_path) == ["m.experts.gguf"]


def test_resume_of_another_conversion_starts_over(large, tmp_path):
    with start(large, "--resume") as process:
        wait_for_part(tmp_path)
        process.send_signal(signal.SIGKILL)
    seen = []
    made = convert(large, tiers="Q4_0", resume=True, progress=lambda n, total: seen.append(n))
    assert seen[0] == 0 and verify(made.path).tiers == ("Q4_0",)
    assert leftovers(tmp_path) == ["m.experts.gguf"]


def test_one_conversion_at_a_time(large, tmp_path):
    with start(large) as process:
        wait_for_part(tmp_path)
        process.send_signal(signal.SIGSTOP)  # it has not ended before the other one begins
        try:
            with pytest.raises(OptionError, match="another conversion"):
                convert(large)
        finally:
            process.send_signal(signal.SIGCONT)
    assert process.returncode == 0 and verify(tmp_path / "m.experts.gguf").tiers == (
        "original",
        "IQ4_XS",
    )


def test_a_disk_too_small(large, tmp_path, monkeypatch):
    """Refused at once where the room is known; and where writing fails on the way,
    nothing is left. (A disk that is full: scripts/faults/faults.py disk.)
    """
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
        with pytest.raises(OptionError, match="make room"):
            convert(large)

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    with start(large, preexec_fn=limit) as process:
        error = process.stderr.read()
    assert process.returncode == 1 and "File too large" in error and "Traceback" not in error
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    "mode, message",
    [
        (0o600, "m.gguf: cannot be read: Permission denied"),
        (0o644, "m.experts.gguf: nothing can be written in"),
    ],
)
def test_without_rights(mode, message):
    """Not root's: a model that cannot be read, a folder that cannot be written."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        model = write_model(folder)
        model.chmod(mode)
        code = (
            "import os; from moeoff.experts.convert import convert; os.setgroups([]);"
            f" os.setuid(65534); convert({str(model)!r}, tiers='original')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert message in done.stderr.splitlines()[-1]
        assert leftovers(folder) == []


# --- importance matrices ---


@pytest.mark.parametrize("form", ["gguf", "binary"])
def test_imatrix(tmp_path, form):
    model = write_model(tmp_path, n_cols=256, down_cols=256)
    rng = np.random.default_rng(3)
    with ModelFile(model) as file:
        shapes = {n: t.shape for n, t in file.tensors.items() if "exps" in n}
        values = {n: file.rows(n) for n in shapes}
    sums = {n: rng.uniform(0.1, 9, (s[0], s[2])).astype(np.float32) for n, s in shapes.items()}
    path = tmp_path / "m.imatrix"
    if form == "gguf":
        tensors = [
            t
            for n, s in sums.items()
            for t in (Tensor(f"{n}.in_sum2", s.shape, 0), Tensor(f"{n}.counts", (len(s), 1), 0))
        ]
        with ModelWriter(path, {"general.type": "imatrix"}, tensors) as writer:
            for s in sums.values():
                writer.write(s.view(np.uint8))
                writer.write(np.full((len(s), 1), 4, np.float32).view(np.uint8))
    else:
        parts = [struct.pack("<i", len(sums))]
        for n, s in sums.items():
            parts += [
                struct.pack("<i", len(n)),
                n.encode(),
                struct.pack("<ii", 4, s.size),
                s.tobytes(),
            ]
        path.write_bytes(b"".join(parts))
    made = convert(model, tiers="IQ2_XXS,Q2_K", imatrix=path)
    sidecar = Sidecar(made.path)
    with ModelFile(made.path) as header:
        assert "m.imatrix" in unpack(header.metadata["moeoff.quantized"])
    with open(made.path, "rb") as file:
        for (name, expert, _), s in sidecar.slices.items():
            rows = values[name].reshape(shapes[name])[expert]
            expected = quantize(rows, s.type, sums[name][expert] / 4)
            assert os.pread(file.fileno(), s.nbytes, s.offset) == expected.tobytes()
    other = write_model(tmp_path, n_cols=512, down_cols=256)
    with pytest.raises(ModelError, match="matrix of another model"):
        convert(other, tiers="Q2_K", imatrix=path, force=True)
    # each matrix ends where it begins
    endless = struct.pack("<ii4sii", 1 << 30, 4, b"name", 1, -4) + bytes(64)
    for junk in (
        b"",
        b"GGUF",
        b"\x05\x00\x00\x00\xff\xff\xff\xff",
        b"\x01\x00\x00\x00" + bytes(12),  # without a name
        path.read_bytes()[:-100],
        endless,
    ):
        (tmp_path / "m.junk").write_bytes(junk)
        with pytest.raises(ModelError, match="m.junk"):
            Imatrix.read(tmp_path / "m.junk")


@own_process
def convert_in_little_memory(model, folder):
    convert(model, tiers="F16,Q4_0,original", output=folder / "warm.gguf", dry_run=True)
    before = peak_rss()
    convert(model, tiers="F16,Q4_0,original")
    assert peak_rss() - before < 100 << 20


def test_memory_is_bounded(tmp_path):
    """An expert's matrix of 48 MB goes through in pieces."""
    model = write_model(
        tmp_path, n_layer=1, n_expert=1, n_ff=6144, n_cols=2048, down_cols=6144, type="F32"
    )
    convert_in_little_memory(model, tmp_path)
