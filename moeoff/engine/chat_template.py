"""The chat template that a model's file holds: a conversation as the tokens that the model was trained to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ..errors import ModelError, Remedy
from .prompt import prompt_tokens

if TYPE_CHECKING:
    from llama_cpp import ChatCompletionRequestMessage

    from .llama import Llama


class Template:
    """
    Raises:
        ModelError: the model holds none, or one that cannot be read.
    """

    def __init__(self, llm: Llama):
        import jinja2
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = llm.metadata.get("tokenizer.chat_template")
        if not template:
            raise ModelError(f"{llm.model_path}: the model has no chat template", Remedy.CONTINUE_TEXT)
        self._refusals = (jinja2.TemplateError, ValueError, TypeError)
        self._llm = llm

        try:
            self._format = Jinja2ChatFormatter(template, eos_token=llm.token_text(llm.token_eos()), bos_token=llm.token_text(llm.token_bos()))
        except jinja2.TemplateError as error:
            raise ModelError(f"{llm.model_path}: its chat template cannot be read: {error}", Remedy.CONTINUE_TEXT) from None

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Of the conversation, up to where the model is to answer. Raises `ModelError` if the template refuses it, `ContextError` if it is far too long."""
        try:
            text = self._format(messages=cast("list[ChatCompletionRequestMessage]", list(messages))).prompt
        except self._refusals as error:  # templates raise on purpose: "system role not supported"
            raise ModelError(f"the model's chat template refuses this conversation: {error}") from None
        return prompt_tokens(self._llm, text, add_bos=False)
