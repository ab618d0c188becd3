"""Small random models of every MoE architecture that llama.cpp can write, and both ways
of running them.

The files come from llama.cpp's own test-llama-archs (see scripts/build/fork.py): 8
experts of which 2 are used, a vocabulary of 128 tokens without text, 256 positions,
F32.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

import moeoff
from helpers import ggml_api
from helpers.eval_callback import WithCallback
from helpers.files import ROOT
from helpers.logits import Stock, decode_in
from helpers.models import requantize_experts
from moeoff.engine.buffer import ExpertBuffer
from moeoff.gguf.model_index import ModelIndex, is_expert, parse_tensor_name
from moeoff.gguf.quantize import type_from_name
from moeoff.llamacpp import native
from moeoff.system.memory import slot_bytes

# test_the_list_is_complete compares this with what test-llama-archs writes
ARCHITECTURES = (
    "afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek32"
    " deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next gpt-oss granite"
    " granitemoe grok grovemoe hunyuan-moe hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe llada-moe"
    " llama llama4 maple mellum mimo2 minicpm minimax-01 minimax-m2 minimax-m3 mistral3 mistral4"
    " olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp refact rnd1"
    " smallthinker"
).split()
N_VOCAB, N_EXPERT = 128, 8
N_PREFILL, N_STEPS = 48, 16
# the same on both sides, because ggml's sums depend on the batch; a prefill is two
# graphs
OPTIONS = {
    "n_ctx": 128,
    "n_batch": 64,
    "n_ubatch": 32,
    "n_threads": 2,
    "n_threads_batch": 2,
    "logits_all": True,
    "verbose": False,
}
# diffusion models, which see no token but the batch's; llama.cpp wants each batch in
# one graph
WITHOUT_MEMORY = {"llada-moe", "rnd1"}
# files with experts that the architecture's graph never reads: there is nothing to
# offload while it runs
WITHOUT_BLOCK = {"refact"}
# architectures whose gates tell no input: some of their routers are computed outside
# the MoE block, from what it cannot see
ROUTED_OUTSIDE = {"grovemoe", "smallthinker"}


def find_writer() -> Path:
    """test-llama-archs, built at the first use."""
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/build/fork.py", "archs"],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    return Path(run.stdout.splitlines()[-1])


def write_models(writer: Path, folder: Path, architecture: str | None = None) -> None:
    """NAME-moe.gguf, and NAME-dense.gguf where there is such a model, of one
    architecture or all.
    """
    only = ["-a", architecture] if architecture else []
    environment = {**os.environ, "LLAMA_TEST_N_EXPERT": str(N_EXPERT)}
    subprocess.run(
        [writer, *only, "-s", "1", "-o", folder], check=True, env=environment, capture_output=True
    )


def write_model(writer: Path, folder: Path, architecture: str, kind: str) -> Path:
    """The model with F32 experts, or with experts of another type.

    kind: "F32", "Q8_0", or "4-bit". The last is Q4_K where at least one matrix has rows
    of whole blocks of 256 (the others remain F32), else Q4_0.
    """
    write_models(writer, folder, architecture)
    (folder / f"{architecture}-dense.gguf").unlink(missing_ok=True)
    path = folder / f"{architecture}-moe.gguf"
    for name in {"F32": (), "Q8_0": ("Q8_0",), "4-bit": ("Q4_K", "Q4_0")}[kind]:
        out = folder / f"{architecture}-{name}.gguf"
        if requantize_experts(path, out, type_from_name(name)):
            path.unlink()
            return out
        out.unlink()
    assert kind == "F32", f"no expert of {architecture} can be stored as {kind}"
    return path


def options(path: Path) -> dict:
    return (
        {**OPTIONS, "n_ubatch": 64}
        if ModelIndex.read(path).architecture in WITHOUT_MEMORY
        else OPTIONS
    )


def open_stock(path: Path, **more) -> contextlib.closing[Stock]:
    return contextlib.closing(Stock(str(path), **{**options(path), **more}))


def layer_arena(buffer: ExpertBuffer) -> int:
    """Bytes for the largest layer's slices and 25 %, but never for more than 5 in 8 of
    the model's.
    """
    layers: Counter[int] = Counter()
    for info in buffer.tensors:
        layers[info.layer] += slot_bytes(info.nbytes) * info.ne[2]
    return max(min(max(layers.values()) * 5 // 4, buffer.arena_full * 5 // 8), buffer.arena_floor)


def open_moeoff(
    path: Path, *, cls: type[moeoff.Llama] = moeoff.Llama, floor: bool = False, **more
) -> moeoff.Llama:
    """The model in an arena that cannot hold it: one layer and 25 %, or the smallest
    possible.
    """
    model = cls(str(path), expert_memory=1 << 30, **{**options(path), **more})
    buffer = model.engine.buffer
    buffer.set_cache_bytes(buffer.arena_floor if floor else layer_arena(buffer))
    return model


def tokens(n: int = N_PREFILL + N_STEPS) -> list[int]:
    return np.random.default_rng(5).integers(1, N_VOCAB, n).tolist()


def decode(model: llama_cpp.Llama, batch: list[int], position: int) -> np.ndarray:
    """One batch without `Llama.eval`, which wants a model with memory: the bits of all
    logits, uint32 [n_tokens, n_vocab].
    """
    if isinstance(model, moeoff.Llama):
        model.decode_batch(batch, position)
        return model.batch_logits(len(batch)).view(np.uint32).copy()
    return decode_in(model.ctx, batch, position, model.n_vocab()).view(np.uint32)


def run(
    model: llama_cpp.Llama,
    n_prefill: int = N_PREFILL,
    n_steps: int = N_STEPS,
    *,
    gives_back: bool = False,
) -> np.ndarray:
    """Prefill, then one token after the other: the bits of all logits, uint32
    [n_tokens, n_vocab].

    gives_back: what small batches leave of the compute buffer goes back to the system
    between batches.
    """
    text = tokens(n_prefill + n_steps)
    logits = []
    for first, end in [(0, n_prefill), *((i, i + 1) for i in range(n_prefill, len(text)))]:
        logits.append(decode(model, text[first:end], first))
        if gives_back:
            assert native.memory_of_batches(model.context_handle, 8, True) is not None
    return np.concatenate(logits)


def expert_layers(path: Path) -> list[int]:
    """Layers that have routed experts, ascending."""
    return sorted({parse_tensor_name(name).layer for name in ModelIndex.read(path).experts})


@dataclass
class Block:
    """One run of the MoE block, as its ops saw it.

    ids: int32 [n_tokens, n_used]. router_input: float32 [n_tokens, n_embd], the operand
    of the last product that gave router logits, or None if there
        was none since the block before.
    """

    tensors: list[str]
    ids: np.ndarray
    router_input: np.ndarray | None


class Watcher(WithCallback, moeoff.Llama):
    """Notes what the graph's own nodes read; `blocks` has it in the order of computing."""

    def __init__(self, *args, **kwargs):
        self.blocks: list[Block] = []
        self._router_input: np.ndarray | None = None
        super().__init__(*args, **kwargs)
        self.blocks.clear()

    def _watch(self, node: int, ask: bool, _user: object) -> bool:
        tensor = ggml_api.Tensor.from_address(node)
        op = ggml_api.op_name(tensor)
        if op == b"MUL_MAT" and tensor.name.startswith(b"ffn_moe_logits-"):
            if not ask:
                self._router_input = ggml_api.matrix(tensor.src[1].contents)
        elif op == b"MUL_MAT_ID" and is_expert(name := tensor.src[0].contents.name.decode()):
            if not ask:
                self._note(name, ggml_api.matrix(tensor.src[2].contents))
        elif ask:
            return False
        return True

    def _note(self, name: str, ids: np.ndarray) -> None:
        gates = {info.name.decode(): info.gate for info in self.engine.buffer.tensors}
        last = self.blocks[-1] if self.blocks else None
        if last is None or gates[last.tensors[0]] != gates[name] or name in last.tensors:
            self.blocks.append(Block([name], ids, self._router_input))
            self._router_input = None
        else:
            assert np.array_equal(last.ids, ids), f"{name} reads other ids than {last.tensors[0]}"
            last.tensors.append(name)
