"""Vocabularies and architectures that llama.cpp takes and then ends the process over: refused with the reason, by whatever looks at the file."""

import struct

import pytest
from click.testing import CliRunner

from helpers.models import rewritten
from moeoff import Llama, ModelError, MoeoffError, OptionError
from moeoff.cli.main import main
from moeoff.gguf.file import ModelFile
from moeoff.gguf.model_index import ModelIndex
from moeoff.gguf.preflight import preflight
from moeoff.gguf.vocabulary import vocabulary_fault

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MANY = [f"word{i}" for i in range(100)]
RWKV = [rf"\x{byte:02x}" for byte in range(256)]


def pack(value):
    """As a GGUF has it."""
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(pack(text)[4:] for text in value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value)) + value.encode()
    return struct.pack("<I?", 7, value) if isinstance(value, bool) else struct.pack("<II", 4, value)


def fault(model, tokens, **more):
    return vocabulary_fault({f"tokenizer.ggml.{key}": pack(value) for key, value in {"model": model, "tokens": tokens, **more}.items()})


def test_tokens_for_every_byte():
    assert fault("llama", MANY + BYTES) == ""
    assert fault("llama", [token for token in BYTES if token != "<0x41>"] + ["A"]) == ""
    assert "no tokens for 1 of the 256 bytes" in fault("llama", MANY + BYTES[:-1])
    assert "no tokens for 256" in fault("llama", MANY)
    assert fault("rwkv", RWKV) == "" and fault("rwkv", MANY, unknown_token_id=3) == ""
    assert "no tokens for" in fault("rwkv", MANY) and "no tokens for" in fault("rwkv", MANY, unknown_token_id=100)


@pytest.mark.parametrize(
    "model, more, missing",
    [
        ("gemma4", {}, "bos"), ("gemma4", {"bos_token_id": 100}, "bos"), ("gemma4", {"bos_token_id": 2}, ""),
        ("gemma4", {"bos_token_id": 2, "add_eos_token": True}, "eos"), ("gemma4", {"bos_token_id": 2, "add_eos_token": True, "eos_token_id": 3}, ""),
        ("t5", {}, ""), ("t5", {"add_bos_token": True}, "bos"), ("t5", {"add_bos_token": True, "bos_token_id": 0}, ""),
        ("bert", {}, "bos"), ("bert", {"bos_token_id": 1}, "seperator"), ("bert", {"bos_token_id": 1, "seperator_token_id": 1}, ""),
        ("gpt2", {}, ""), ("gpt2", {"add_bos_token": True, "bos_token_id": 500}, ""), ("test", {}, ""), ("unheard-of", {}, ""),
    ],
)  # fmt: skip
def test_tokens_around_a_text(model, more, missing):
    text = fault(model, MANY, **more)
    assert (f"tokenizer.ggml.{missing}_token_id" in text) if missing else not text


def test_a_small_vocabulary():
    assert "bos_token_id" in fault("gpt2", MANY[:5]) and fault("gpt2", MANY[:5], add_bos_token=False) == ""
    assert "eos_token_id" in fault("t5", MANY[:1])


def test_other_faults_are_left_to_llama_cpp(demo):
    assert vocabulary_fault({}) == "" and fault("llama", 5) == "" and fault(7, MANY) == ""
    with ModelFile(demo) as model:
        assert vocabulary_fault(model.metadata) == ""


@pytest.fixture(scope="module")
def wrong(demo, tmp_path_factory):
    """The demo model, whose tokenizer is said to be another one."""
    return rewritten(demo, tmp_path_factory.mktemp("wrong") / "model.gguf", {"tokenizer.ggml.model": "llama"})


def refusal(*command: object) -> str:
    """What a command says that ends with an error."""
    done = CliRunner().invoke(main, [str(argument) for argument in command], prog_name="moeoff")
    assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1, done.output
    return done.stderr


def test_every_command_refuses_it(wrong):
    for command in (["inspect", wrong], ["run", "-m", wrong, "-p", "ä"]):
        assert "no tokens for 162 of the 256 bytes" in refusal(*command)
    with pytest.raises(ModelError, match="of another tokenizer"):
        Llama(wrong, expert_memory="1M")
    with pytest.raises(ModelError, match="of another tokenizer"):
        preflight(ModelIndex.read(wrong))


def test_diffusion_models_are_refused_with_the_reason(demo, tmp_path):
    path, other = (rewritten(demo, tmp_path / f"{name}.gguf", {"general.architecture": name}) for name in ("llada-moe", "rnd1"))
    text = tmp_path / "text"
    text.write_text("Once upon a time. " * 100)
    before, calibrate = sorted(tmp_path.iterdir()), ["calibrate", path, "--text", text]
    for command in (
        ["run", "-m", other, "-p", "x"],
        ["inspect", path],
        ["bench", "-m", path],
        calibrate,
        [*calibrate, "--max-loss", "1%"],
        [*calibrate, "--bits-plan"],
        ["eval", "-m", path, "--text", text],
    ):
        assert f"a diffusion model ({'rnd1' if other in command else 'llada-moe'})" in refusal(*command)
    assert sorted(tmp_path.iterdir()) == before


def test_tokens_that_there_are_not(demo):
    with Llama(demo, expert_memory="1M", n_ctx=64) as llm:
        for call in (lambda: llm.detokenize([1, -1]), lambda: llm.detokenize([llm.n_vocab()])):
            with pytest.raises(OptionError, match="a token that there is not"):
                call()
        assert llm.detokenize([]) == b""
        with pytest.raises(MoeoffError):
            llm.eval([llm.n_vocab()])
        assert llm.create_completion("Hello", max_tokens=2)["choices"]
