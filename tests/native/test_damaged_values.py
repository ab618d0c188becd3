"""Damaged values in files with right shapes and types: tables of experts, numbers,
adapters for another model; and ggml's assertions while several threads compute.
"""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import moeoff
from helpers.files import DEMO
from helpers.models import rewritten
from moeoff.gguf.file import ModelFile
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.preflight import preflight

N_EXPERT, N_EMBD, N_FF = 32, 128, 64  # of the demo model


def test_threads_that_meet_an_assertion_end_the_process_with_one_sentence() -> None:
    """By itself ggml forks a debugger in each of them, which wait for each other."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from moeoff.llamacpp import native
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda i: native.lib.ggml_abort(b"ops.cpp", 1, b"GGML_ASSERT(%s) failed", b"x"), range(4)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == -6
    assert (
        done.stderr
        == "llama.cpp ends this process, as something that it relies on does not hold: ops.cpp:1:"
        " GGML_ASSERT(x) failed\n"
    )


@pytest.mark.parametrize("expert", [-1, N_EXPERT, 1_000_000, 0])
def test_a_table_that_names_experts_that_are_not(expert: int, tmp_path: Path) -> None:
    """deepseek4's: llama.cpp's threads meet an assertion over it."""
    table = np.full((7, 2), expert, np.int32)
    index = ModelIndex.read(
        rewritten(DEMO, tmp_path / "table.gguf", arrays={"blk.0.ffn_gate_tid2eid.weight": table})
    )
    if expert == 0:
        return preflight(index)
    with pytest.raises(
        moeoff.ModelError,
        match=(
            rf"blk.0.ffn_gate_tid2eid.weight names expert {expert}, expected 0 to 31: the file is"
            r" damaged"
        ),
    ):
        preflight(index)


@pytest.mark.parametrize("name", ["blk.5.ffn_gate_inp.weight", "blk.5.ffn_norm.weight"])
def test_a_router_of_numbers_that_are_not_finite(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It computes as stock does, with a sentence; nothing is predicted for it."""
    with ModelFile(DEMO) as file:
        shape = file.tensors[name].shape
    path = rewritten(DEMO, tmp_path / "nan.gguf", arrays={name: np.full(shape, np.nan, np.float32)})
    with moeoff.Llama(path, expert_memory="300K", n_ctx=64, verbose=False) as llm:
        assert llm.create_completion("The sea", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert capfd.readouterr().err.count(f"{path}: {name} holds numbers that are not finite") == 1


@pytest.mark.parametrize(
    "a, b",
    [
        ((16, 4, N_EMBD), (16, N_FF, 4)),
        ((N_EXPERT, 4, N_EMBD), (16, N_FF, 4)),
        ((16, 4, N_EMBD), (N_EXPERT, N_FF, 4)),
        ((4, N_EMBD), (N_FF, 4)),
        ((1, 4, N_EMBD), (1, N_FF, 4)),
        ((N_EXPERT, 4, N_FF), (N_EXPERT, N_FF, 4)),
        ((N_EXPERT, 4, N_EMBD), (N_EXPERT, N_FF, 3)),
    ],
)
def test_an_adapter_of_other_shapes_than_the_model(
    a: tuple[int, ...], b: tuple[int, ...], tmp_path: Path
) -> None:
    path = str(tmp_path / "adapter.gguf")
    writer = gguf.GGUFWriter(path, ModelIndex.read(DEMO).architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for suffix, shape in (("a", a), ("b", b)):
        writer.add_tensor(
            f"blk.3.ffn_up_exps.weight.lora_{suffix}", np.full(shape, 0.1, np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        moeoff.ModelError,
        match=r"tensor (of )?'blk\.3\.ffn_up_exps\.weight' (has incorrect shape|is not transposed)",
    ):
        moeoff.Llama(str(DEMO), n_ctx=64, expert_memory="4M", lora_path=path)
