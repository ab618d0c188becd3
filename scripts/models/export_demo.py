"""Export the trained reference MoE (arrays in an .npz file, a tokenizer.json) as a qwen2moe GGUF.

Experts and dense matrices get the types asked for; norms, biases and the small gates stay F32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from moeoff.cli.options import errors_as_sentences
from moeoff.errors import ModelError
from moeoff.files import atomic_file
from moeoff.gguf.quantize import quantize, type_from_name

__all__ = ["export_demo"]

N_LAYER, N_EMBD, N_HEAD, N_FF_SHEXP = 12, 128, 4, 128
N_EXPERT, N_EXPERT_USED, N_FF_EXP = 32, 4, 64
N_CTX_TRAIN, ROPE_BASE, NORM_EPS = 256, 10000.0, 1e-6

# The form of the model's training text. There is no system role in it; a system message becomes the first lines of the
# text. The prompt ends at the colon: the space belongs to the answer's first token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ 'User: ' + (message['content'] | trim) + '\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ 'Assistant: ' + (message['content'] | trim) + '\\n' }}"
    "{%- else -%}{{ (message['content'] | trim) + '\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
DESCRIPTION = (
    "A small mixture of experts with learned routing, trained from scratch by the moeoff authors on about 9.8 million tokens: "
    "GSM8K questions and answers, public-domain prose, the code of Python's standard library. "
    "It writes fluent-looking text, not right answers."
)
LICENSE_NOTES = "MIT (weights); training text: GSM8K (MIT), public-domain prose, Python's standard library (PSF)"


def export_demo(
    arrays: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    out: str | os.PathLike[str],
    expert_type: int = GGMLQuantizationType.Q8_0,
    dense_type: int = GGMLQuantizationType.Q8_0,
    overwrite: bool = False,
) -> None:
    """Write `out` from the arrays' .npz file and tokenizer.json.

    Raises ModelError for arrays that are missing or of a wrong shape, or types that do not fit, WriteError for an existing
    `out` (unless overwrite).
    """
    with atomic_file(out, overwrite=overwrite) as file, np.load(arrays) as ref:
        writer = GGUFWriter(file.name, "qwen2moe")
        _add_metadata(writer, {int(expert_type), int(dense_type)})
        _add_tokenizer(writer, json.loads(Path(tokenizer).read_text(encoding="utf-8")))
        types = {"expert": int(expert_type), "dense": int(dense_type), "plain": int(GGMLQuantizationType.F32)}
        for name, kind, values in _tensors(ref):
            if values.ndim == 1:
                writer.add_tensor(name, values)
                continue
            data = quantize(values.reshape(-1, values.shape[-1]), types[kind])
            # gguf-py wants the shape in bytes when the data are bytes
            writer.add_tensor(name, data.reshape(*values.shape[:-1], -1), raw_dtype=GGMLQuantizationType(types[kind]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_metadata(writer: GGUFWriter, types: set[int]) -> None:
    writer.add_type("model")
    writer.add_name("moeoff demo MoE")
    writer.add_author("the moeoff authors")
    writer.add_description(DESCRIPTION)
    writer.add_license("mit")
    writer.add_license_name(LICENSE_NOTES)
    writer.add_size_label("32x0.3M")
    writer.add_languages(["en"])
    writer.add_quantization_version(2)
    file_types = {frozenset({0}): LlamaFileType.ALL_F32, frozenset({8}): LlamaFileType.MOSTLY_Q8_0}
    if frozenset(types) in file_types:  # absent, llama.cpp derives it from the tensors
        writer.add_file_type(file_types[frozenset(types)])
    writer.add_block_count(N_LAYER)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF_SHEXP)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_EXPERT_USED)
    writer.add_expert_feed_forward_length(N_FF_EXP)
    writer.add_expert_shared_feed_forward_length(N_FF_SHEXP)


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict) -> None:
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise ModelError("the tokenizer's ids are not 0 to n-1")
    end = special["<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(ref: np.lib.npyio.NpzFile) -> Iterator[tuple[str, str, np.ndarray]]:
    """(GGUF name, kind, f32 values) of every tensor, in file order."""

    def array(name: str, *shape: int) -> np.ndarray:
        if name not in ref or ref[name].shape != shape:
            raise ModelError(f"expected array {name} of shape {shape}, found {ref[name].shape if name in ref else 'none'}")
        return ref[name].astype(np.float32)

    def experts(name: str, n_in: int, n_out: int) -> np.ndarray:
        return np.ascontiguousarray(array(name, N_EXPERT, n_in, n_out).transpose(0, 2, 1))

    n_vocab = len(ref["emb.weight"])
    yield "token_embd.weight", "dense", array("emb.weight", n_vocab, N_EMBD)
    yield "output_norm.weight", "plain", array("nf.weight", N_EMBD)
    yield "output.weight", "dense", array("head.weight", n_vocab, N_EMBD)
    for layer in range(N_LAYER):
        ours, theirs = f"bl.{layer}", f"blk.{layer}"
        yield f"{theirs}.attn_norm.weight", "plain", array(f"{ours}.n1.weight", N_EMBD)
        qkv = np.split(array(f"{ours}.qkv.weight", 3 * N_EMBD, N_EMBD), 3)
        biases = np.split(array(f"{ours}.qkv.bias", 3 * N_EMBD), 3)
        for letter, weight, bias in zip("qkv", qkv, biases, strict=True):
            yield f"{theirs}.attn_{letter}.weight", "dense", weight
            yield f"{theirs}.attn_{letter}.bias", "plain", bias
        yield f"{theirs}.attn_output.weight", "dense", array(f"{ours}.o.weight", N_EMBD, N_EMBD)
        yield f"{theirs}.ffn_norm.weight", "plain", array(f"{ours}.n2.weight", N_EMBD)
        yield f"{theirs}.ffn_gate_inp.weight", "plain", array(f"{ours}.gate.weight", N_EXPERT, N_EMBD)
        yield f"{theirs}.ffn_gate_exps.weight", "expert", experts(f"{ours}.wg", N_EMBD, N_FF_EXP)
        yield f"{theirs}.ffn_up_exps.weight", "expert", experts(f"{ours}.wu", N_EMBD, N_FF_EXP)
        yield f"{theirs}.ffn_down_exps.weight", "expert", experts(f"{ours}.wd", N_FF_EXP, N_EMBD)
        yield f"{theirs}.ffn_gate_inp_shexp.weight", "plain", array(f"{ours}.sgate.weight", 1, N_EMBD)[0]
        yield f"{theirs}.ffn_gate_shexp.weight", "dense", array(f"{ours}.sg.weight", N_FF_SHEXP, N_EMBD)
        yield f"{theirs}.ffn_up_shexp.weight", "dense", array(f"{ours}.su.weight", N_FF_SHEXP, N_EMBD)
        yield f"{theirs}.ffn_down_shexp.weight", "dense", array(f"{ours}.sd.weight", N_EMBD, N_FF_SHEXP)


@click.command()
@click.argument("arrays", metavar="REF.npz")
@click.argument("tokenizer", metavar="TOKENIZER.json")
@click.option("-o", "--out", metavar="OUT.gguf", required=True)
@click.option("--expert-type", default="Q8_0", show_default=True, help="ggml type of the routed experts.")
@click.option("--dense-type", default="Q8_0", show_default=True, help="ggml type of the other matrices.")
@click.option("--overwrite", is_flag=True, help="Replace OUT.gguf if it exists.")
@errors_as_sentences
def main(arrays: str, tokenizer: str, out: str, expert_type: str, dense_type: str, overwrite: bool) -> None:
    """Writes the demo model from its trained arrays."""
    export_demo(arrays, tokenizer, out, type_from_name(expert_type), type_from_name(dense_type), overwrite)


if __name__ == "__main__":
    main()
