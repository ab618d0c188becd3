"""A chat template is the model file's: it calls nothing, and takes neither for ever nor all memory."""

from __future__ import annotations

import resource

import jinja2
import pytest

import moeoff
from helpers.chat_templates import with_template
from moeoff import chat_sandbox
from moeoff.chat_sandbox import ChatSandbox

HOSTILE = {
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ i * j }}{% endfor %}{% endfor %}": "it takes longer than",
    "{{ 10 ** (10 ** 10) }}": "too large",
    "{% set ns = namespace(x=3) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}": "too large",
    "{{ 'x'.center(10 ** 10) }}": "too much memory",
    "{{ 'x' | center(10000000000) }}": "too much memory",
    "{{ 'x' * 10 ** 11 }}": "too much memory",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": "too much memory|takes longer",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}": "RecursionError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ lipsum.__globals__['os'].popen('id').read() }}": "unsafe",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile(template, monkeypatch):
    monkeypatch.setattr(chat_sandbox, "SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(jinja2.TemplateError, match=HOSTILE[template]):
        ChatSandbox().from_string(template).render(messages=[])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_ordinary():
    made = ChatSandbox().from_string("{% for m in messages %}<{{ m.role * 2 }}>{{ m['content'] | trim }}{% endfor %}{{ 3 * 4 }}")
    assert made.render(messages=[{"role": "user", "content": " Hi "}]) == "<useruser>Hi12"


@pytest.mark.parametrize("template, words", [(next(iter(HOSTILE)), "it takes longer than"), ("{{ 'x'.center(10 ** 10) }}", "too much memory")])
def test_a_model_does_not_hang_over_it(demo, tmp_path, monkeypatch, template, words):
    monkeypatch.setattr(chat_sandbox, "SECONDS", 0.5)
    path = with_template(demo, tmp_path / "model.gguf", template)
    with moeoff.Llama(path, expert_memory="1M", n_ctx=128) as llm:  # a text can still be continued
        assert llm.create_completion("Once", max_tokens=2)["choices"]
        with pytest.raises(jinja2.TemplateError, match=words):
            llm.create_chat_completion([{"role": "user", "content": "Hi"}])
