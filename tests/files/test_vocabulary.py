"""Vocabularies and architectures that llama.cpp takes and then ends the process over:
refused with the reason, by whatever looks at the file.
"""

import pytest
from click.testing import CliRunner

from helpers.models import rewritten
from moeoff import Llama, ModelError, MoeoffError, OptionError
from moeoff.cli.main import main


@pytest.fixture(scope="module")
def wrong(demo, tmp_path_factory):
    """The demo model, whose tokenizer is said to be another one."""
    return rewritten(
        demo, tmp_path_factory.mktemp("wrong") / "model.gguf", {"tokenizer.ggml.model": "llama"}
    )


@pytest.mark.parametrize(
    "model, more, message",
    [
        ("rwkv", {}, r"no token for byte 0x\w\w, which its tokenizer \(rwkv\) needs"),
        ("gemma4", {"bos_token_id": 1 << 20}, "puts a BOS token around every text"),
        (
            "t5",
            {"bos_token_id": 1 << 20, "add_bos_token": True},
            "puts a BOS token around every text",
        ),
    ],
)
def test_a_tokenizer_that_lacks_tokens(demo, tmp_path, model, more, message):
    path = rewritten(
        demo,
        tmp_path / "model.gguf",
        {f"tokenizer.ggml.{name}": value for name, value in ({"model": model} | more).items()},
    )
    with pytest.raises(ModelError, match=message):
        Llama(path, expert_memory="1M")


def refusal(*command: object) -> str:
    """Return the message of a command that ends with an error."""
    done = CliRunner().invoke(main, [str(argument) for argument in command], prog_name="moeoff")
    assert done.exit_code == 1 and len(done.stderr.strip().splitlines()) == 1, done.output
    return done.stderr


def test_every_command_refuses_it(wrong):
    for command in (["inspect", wrong], ["run", "-m", wrong, "-p", "ä"]):
        assert "no token for byte 0x00, which its tokenizer (llama) needs" in refusal(*command)


def test_diffusion_models_are_refused_with_the_reason(demo, tmp_path):
    path, other = (
        rewritten(demo, tmp_path / f"{name}.gguf", {"general.architecture": name})
        for name in ("llada-moe", "rnd1")
    )
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
        assert f"a diffusion model ({'rnd1' if other in command else 'llada-moe'})" in refusal(
            *command
        )
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
