"""Grammars: those that llama.cpp cannot read, or that nothing can follow, are an error;
what follows the others is stock's text.
"""

from __future__ import annotations

import pytest
from llama_cpp import LlamaGrammar

import moeoff
from moeoff.llamacpp.llama import StockLlama

OPTIONS = {"n_ctx": 128, "n_threads": 1, "flash_attn": True, "seed": 7, "verbose": False}
PROMPT = "Tom has 3 apples and buys 4 more."


@pytest.fixture(scope="module")
def llm(demo):
    with moeoff.Llama(demo, expert_memory="1M", **OPTIONS) as llm:
        yield llm


def complete(llm, grammar: str | None = None, temperature: float = 0.0) -> str:
    parsed = LlamaGrammar.from_string(grammar, verbose=False) if grammar is not None else None
    return llm.create_completion(
        PROMPT, max_tokens=12, temperature=temperature, grammar=parsed, seed=3
    )["choices"][0]["text"]


CHAIN = (
    "root ::= a0\n"
    + "".join(f"a{i} ::= a{i + 1}\n" for i in range(100_000))
    + "a100000 ::= [a-z]\n"
)
WRONG = [
    "root ::= (",
    "x ::= y",
    "root ::= root",
    'root ::= "a"{3,1}',
    "root ::= [z-a]",
    "root ::= <[99999999]>",
    "root ::= " + "(" * 200_000,
    CHAIN,
]


@pytest.mark.parametrize("grammar", WRONG, ids=lambda grammar: grammar[:20])
def test_one_that_leads_nowhere_is_an_error(llm, grammar):
    before = complete(llm)
    with pytest.raises(moeoff.MoeoffError, match="grammar"):
        complete(llm, grammar)
    assert complete(llm) == before


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= [0-9]+",
        'root ::= "{3,1}" [a-z]{2,9}',
        'root ::= ("yes" | "no" | " " [a-z]+)+ # {3,1}',
    ],
)
def test_the_text_is_stocks(llm, demo, grammar):
    stock = StockLlama(demo, use_extra_bufts=False, **OPTIONS)
    for temperature in (0.0, 0.9):
        assert complete(llm, grammar, temperature) == complete(stock, grammar, temperature)
    stock.close()


def test_an_adapter_that_cannot_be_read_is_an_error(demo, tmp_path):
    bad = tmp_path / "adapter.gguf"
    bad.write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(moeoff.ModelError, match=r"adapter\.gguf: the GGUF header is damaged"):
        moeoff.Llama(demo, expert_memory="1M", lora_path=str(bad), **OPTIONS)
    with pytest.raises(moeoff.ModelError, match=r"its adapter .*demo-moe-q8_0\.gguf: "):
        moeoff.Llama(demo, expert_memory="1M", lora_path=demo, **OPTIONS)
