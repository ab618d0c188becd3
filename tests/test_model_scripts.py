"""The scripts that make models: demo export, growing, requantizing. Everything starts from the shipped demo
model."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader

from export_demo import export_demo
from grow_model import Growth, grow_model
from helpers.files import DEMO
from moeoff.errors import ModelError, WriteError
from moeoff.gguf.file import ModelFile, Tensor
from moeoff.gguf.quantize import fits, quantize, type_from_name, type_name
from requantize_experts import requantize_experts

TOKENS = [10, 300, 500, 700, 900, 1100, 1300, 1500]
# The first six logits after TOKENS, of the trained arrays in F32 (PyTorch; llama.cpp gives the same to 4e-5 with an F32
# cache).
REFERENCE = np.array([2.792, -7.438, -7.4488, 3.7218, 1.7363, -2.4663])


def evaluate(path: Path, tokens: list[int] = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """(logits f32 [n_tokens, n_vocab], sorted ids of the chosen experts [n_layer, n_tokens, 4]) with an F32 cache."""
    import llama_cpp as llama
    from llama_cpp.llama_cpp import _lib as lib

    # const char * ggml_get_name(const struct ggml_tensor * tensor);
    lib.ggml_get_name.argtypes, lib.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    # void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    lib.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    lib.ggml_backend_tensor_get.restype = None
    chosen: list[np.ndarray] = []

    @llama.ggml_backend_sched_eval_callback
    def on_node(tensor: int, ask: bool, _: object) -> bool:
        wanted = lib.ggml_get_name(tensor).startswith(b"ffn_moe_argsort")
        if wanted and not ask:
            order = np.empty((len(tokens), 32), np.int32)  # all tokens' logits are asked for, so no layer is trimmed
            lib.ggml_backend_tensor_get(tensor, order.ctypes.data, 0, order.nbytes)
            chosen.append(np.sort(order[:, :4]))
        return wanted or not ask

    llama.llama_backend_init()
    log = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(log, None)
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model, f"{path} does not load"
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_threads = params.n_threads_batch = 2
    params.type_k = params.type_v = int(T.F32)
    params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED  # exact to float error only without
    params.cb_eval = on_node
    context = llama.llama_init_from_model(model, params)
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), 4096)).copy()
    finally:
        llama.llama_batch_free(batch)
        llama.llama_free(context)
        llama.llama_model_free(model)
        llama.llama_log_set(llama.llama_log_callback(0), None)
    assert len(chosen) == 12
    return logits, np.stack(chosen)


# the demo model


def test_demo_gives_the_reference_logits():
    logits, _ = evaluate(DEMO)
    assert np.isfinite(logits).all()
    assert np.abs(logits[-1, :6] - REFERENCE).max() < 0.2  # Q8_0; 0.113 measured


def test_demo_tokenizer_and_end():
    from llama_cpp import Llama

    model = Llama(str(DEMO), n_ctx=256, n_threads=2, verbose=False)
    text = "User: a\r\n\n\tb  c — ünïcödé 你好 🎉 ½ don't\nAssistant: <|endoftext|><|im_start|><|im_end|>\x00 "
    tokens = model.tokenize(text.encode(), add_bos=False, special=True)
    assert model.detokenize(tokens, special=True) == text.encode()
    assert {0, 1, 2} < set(tokens) and model.token_eos() == model.token_bos() == 0
    assert model.tokenize(b"User: Hi\nAssistant:") == model.tokenize(b"User: Hi\nAssistant:", add_bos=False)
    reply = model.create_chat_completion([{"role": "user", "content": "How many are 2 and 3?"}], max_tokens=150, temperature=0)
    assert reply["choices"][0]["message"]["content"].strip()
    model.close()


def test_export_makes_the_demo_again(tmp_path):
    """Q8_0 of what Q8_0 gives is the same, so the shipped file must come back byte for byte."""
    arrays = {}
    with ModelFile(DEMO) as model:

        def values(name):
            return model.rows(name).reshape(model.tensors[name].shape)

        arrays |= {"emb.weight": values("token_embd.weight"), "head.weight": values("output.weight")}
        arrays["nf.weight"] = values("output_norm.weight")
        names = {"n1": "attn_norm", "n2": "ffn_norm", "o": "attn_output", "gate": "ffn_gate_inp"}
        names |= {"sg": "ffn_gate_shexp", "su": "ffn_up_shexp", "sd": "ffn_down_shexp"}
        for layer in range(12):
            ours, theirs = f"bl.{layer}", f"blk.{layer}"
            arrays |= {f"{ours}.{a}.weight": values(f"{theirs}.{b}.weight") for a, b in names.items()}
            arrays[f"{ours}.sgate.weight"] = values(f"{theirs}.ffn_gate_inp_shexp.weight")[None]
            for part in ("weight", "bias"):
                arrays[f"{ours}.qkv.{part}"] = np.concatenate([values(f"{theirs}.attn_{x}.{part}") for x in "qkv"])
            for a, b in {"wg": "gate", "wu": "up", "wd": "down"}.items():
                arrays[f"{ours}.{a}"] = values(f"{theirs}.ffn_{b}_exps.weight").transpose(0, 2, 1)
    np.savez(tmp_path / "arrays.npz", **arrays)
    fields = GGUFReader(DEMO).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    special = [{"id": i, "content": tokens[i]} for i in range(3)]
    model = {
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": fields["tokenizer.ggml.merges"].contents(),
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": special}), encoding="utf-8")
    export_demo(tmp_path / "arrays.npz", tmp_path / "tokenizer.json", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == DEMO.read_bytes()
    del arrays["bl.3.wd"]
    np.savez(tmp_path / "arrays.npz", **arrays)
    with pytest.raises(ModelError, match=r"bl\.3\.wd"):
        export_demo(tmp_path / "arrays.npz", tmp_path / "tokenizer.json", tmp_path / "less.gguf")
    assert not (tmp_path / "less.gguf").exists()


# growing


def growth(width: int, ff: int, noise: float = 0.0, **rest) -> Growth:
    return Growth(width, ff, rest.pop("expert_type", T.F32), rest.pop("dense_type", T.F32), noise, **rest)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The demo model's weights in F32 (llama.cpp computes Q8_0 with rounded activations), and what it computes."""
    path = tmp_path_factory.mktemp("plain") / "f32.gguf"
    grow_model(DEMO, path, growth(1, 1))
    return path, *evaluate(path)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_grown_model_computes_the_same(plain, tmp_path, noise):
    source, logits, routing = plain
    grow_model(source, tmp_path / "grown.gguf", growth(2, 2, noise))
    grown_logits, grown_routing = evaluate(tmp_path / "grown.gguf")
    assert np.abs(grown_logits - logits).max() < 5e-5  # 5e-6 measured; logits reach 15
    assert np.array_equal(grown_routing, routing)
    with ModelFile(source) as old, ModelFile(tmp_path / "grown.gguf") as new:
        assert new.value("qwen2moe.embedding_length") == 256 and new.value("qwen2moe.expert_feed_forward_length") == 128
        kept = [key for key in old.metadata if key.startswith("tokenizer.")]
        assert kept and all(new.metadata[key] == old.metadata[key] for key in kept)
        name, share = "blk.3.ffn_down_exps.weight", old.rows("blk.3.ffn_down_exps.weight")[:128] / 2
        tiles = new.rows(name)[:128].reshape(128, 2, 64)
        assert np.allclose(tiles.sum(axis=1), 2 * share, atol=1e-6)
        # the rule: noise of sqrt(F - 1) tile deviations, so sqrt(F) of them in all
        ratio = np.sqrt(((tiles - share[:, None]) ** 2).mean() / share.var(axis=1).mean())
        assert ratio == pytest.approx(noise, abs=0.02)


def test_quantized_growth_keeps_most_routes(plain, tmp_path):
    grow_model(DEMO, tmp_path / "q.gguf", growth(2, 4, 1.0, expert_type=T.Q4_K, dense_type=T.Q8_0))
    _, routing = evaluate(tmp_path / "q.gguf")
    shared = [len(set(a) & set(b)) for a, b in zip(routing.reshape(-1, 4), plain[2].reshape(-1, 4), strict=True)]
    assert np.mean(shared) / 4 > 0.8
    with ModelFile(tmp_path / "q.gguf") as model:
        assert model.tensors["blk.0.ffn_down_exps.weight"].type == T.Q4_K
        assert model.tensors["blk.0.attn_q.weight"].type == T.Q8_0 and model.tensors["blk.0.ffn_gate_inp.weight"].type == T.F32


def test_growing_is_reproducible(tmp_path):
    def grown(name: str, seed: int, threads: int) -> bytes:
        grow_model(DEMO, tmp_path / name, growth(2, 2, 1.0, expert_type=T.Q4_0, dense_type=T.Q4_0, seed=seed), threads=threads)
        return (tmp_path / name).read_bytes()

    first = grown("a", 1, 2)
    assert first == grown("b", 1, 1)
    assert first != grown("c", 2, 2)


def test_growing_refuses(tmp_path):
    with pytest.raises(ModelError, match="256"):
        grow_model(DEMO, tmp_path / "x.gguf", growth(2, 2, expert_type=T.Q4_K))  # 2 x 64 values in a row of down
    with pytest.raises(ModelError, match="at least 1"):
        growth(0, 2)
    with pytest.raises(ModelError, match="negative"):
        growth(2, 2, -1.0)
    assert list(tmp_path.iterdir()) == []


# requantizing


@pytest.mark.parametrize("type", [T.Q4_0, T.MXFP4, type_from_name("Q2_0"), T.F16], ids=type_name)
def test_requantize_touches_only_experts(tmp_path, type):
    out = tmp_path / "out.gguf"
    done = requantize_experts(DEMO, out, type)
    assert len(done.changed) == 36 and done.left == ()
    with ModelFile(DEMO) as old, ModelFile(out) as new:
        assert list(old.metadata.items()) == list(new.metadata.items()) and list(old.tensors) == list(new.tensors)
        for name, tensor in old.tensors.items():
            if name in done.changed:
                assert new.tensors[name] == Tensor(name, tensor.shape, type)
                assert np.array_equal(new.data(name), quantize(old.rows(name), type))
            else:
                assert new.tensors[name] == tensor and np.array_equal(new.data(name), old.data(name))
    logits, _ = evaluate(out)
    assert np.isfinite(logits).all()


def test_requantize_leaves_what_does_not_fit(tmp_path):
    assert not fits(T.Q4_K, 64) and not fits(T.Q4_K, 128)
    done = requantize_experts(DEMO, tmp_path / "out.gguf", T.Q4_K)
    assert done.changed == () and len(done.left) == 36
    assert (tmp_path / "out.gguf").read_bytes() == DEMO.read_bytes()
    with pytest.raises(WriteError, match="exists"):
        requantize_experts(DEMO, tmp_path / "out.gguf", T.Q4_K)
    grow_model(DEMO, tmp_path / "half.gguf", growth(2, 1, expert_type=T.F16, dense_type=T.Q8_0))
    done = requantize_experts(tmp_path / "half.gguf", tmp_path / "half-iq.gguf", T.IQ2_XXS)  # needs an imatrix: gets a flat one
    assert len(done.changed) == 24 and all("down" in name for name in done.left) and len(done.left) == 12
