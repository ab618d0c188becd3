"""Nine clients of other people's, each asked for the same seven things with its default
settings; and what some of them cannot do, with the reason.

The libraries are imported where they are used: those of the extra nightly belong to
slow clients, which `make test` leaves out. docs/guides/serving.md has the table
(scripts/build/docs.py cli), so this imports nothing that is not there without the
extras.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

WHAT = ("chat", "stream", "tools", "schema", "embeddings", "list", "cancel")
KEY = "none"
SCHEMA = {
    "title": "Answer",
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["metres"]}},
    "required": ["unit"],
}
TOOL = {
    "type": "function",
    "function": {"name": "measure", "description": "Measures the room", "parameters": PARAMETERS},
}
RESULT = "5 by 4"
Calls = list[tuple[str, dict[str, Any]]]


class Client:
    """A client of a server.

    url is the server's, model its name there. `chat` and `stream` return the answer to
    a question, whole and in pieces; `tools` the call, and the answer after its result;
    `schema` JSON text; `embeddings` a vector for each text; `list` the models' names.
    `cancel` ends an answer that has begun.
    """

    cannot: dict[str, str] = {}
    slow = False  # takes long to import, or to start

    def __init__(self, url: str, model: str, folder: Path):
        self.url, self.model, self.folder = url, model, folder

    def user(self, text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]


def _first(pieces: Iterable[str], n: int = 3) -> None:
    """Takes some pieces that say something."""
    for piece in pieces:
        n -= bool(piece)
        if n == 0:
            return
    raise AssertionError("the answer has ended before it was given up")


class _ChatCompletions(Client):
    """OpenAI's objects, as its own library and others have them."""

    def complete(self, **body: Any) -> Any:
        raise NotImplementedError

    def chat(self, text: str) -> str:
        return self.complete(messages=self.user(text)).choices[0].message.content

    def stream(self, text: str) -> Iterator[str]:
        for chunk in self.complete(messages=self.user(text), stream=True):
            yield chunk.choices[0].delta.content or ""

    def tools(self, text: str) -> list[Calls]:
        messages: list[Any] = self.user(text)
        replies = []
        for _ in range(2):
            choice = self.complete(messages=messages, tools=[TOOL]).choices[0]
            assert choice.finish_reason == "tool_calls"
            calls = choice.message.tool_calls
            replies.append(
                [(call.function.name, json.loads(call.function.arguments)) for call in calls]
            )
            messages += [
                choice.message,
                *({"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls),
            ]
        return replies

    def schema(self, text: str) -> str:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        }
        return (
            self.complete(messages=self.user(text), response_format=form).choices[0].message.content
        )


class OpenAI(_ChatCompletions):
    def __init__(self, *args: Any):
        super().__init__(*args)
        import openai

        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY)

    def complete(self, **body: Any) -> Any:
        return self.client.chat.completions.create(model=self.model, **body)

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        return [
            item.embedding
            for item in self.client.embeddings.create(model=self.model, input=texts).data
        ]

    def list(self) -> list[str]:
        return [model.id for model in self.client.models.list()]

    def cancel(self, text: str) -> None:
        with self.complete(messages=self.user(text), stream=True) as stream:
            _first(chunk.choices[0].delta.content for chunk in stream)


class Anthropic(Client):
    cannot = {
        "schema": "llama-server's /v1/messages reads no schema of the answer; a tool's it does",
        "embeddings": "the API has none",
    }

    def __init__(self, *args: Any):
        super().__init__(*args)
        import anthropic

        self.client = anthropic.Anthropic(base_url=self.url, api_key=KEY)

    def ask(self, text: str, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": 4096, "messages": self.user(text)} | more

    def chat(self, text: str) -> str:
        return self.client.messages.create(**self.ask(text)).content[0].text

    def stream(self, text: str) -> Iterator[str]:
        with self.client.messages.stream(**self.ask(text)) as stream:
            yield from stream.text_stream

    def tools(self, text: str) -> list[Calls]:
        tool = {"name": "measure", "description": "Measures the room", "input_schema": PARAMETERS}
        messages, replies = self.user(text), []
        for _ in range(2):
            reply = self.client.messages.create(**self.ask(text, tools=[tool], messages=messages))
            assert reply.stop_reason == "tool_use"
            calls = [block for block in reply.content if block.type == "tool_use"]
            replies.append([(call.name, call.input) for call in calls])
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls
            ]
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results},
            ]
        return replies

    def list(self) -> list[str]:
        return [model.id for model in self.client.models.list()]

    def cancel(self, text: str) -> None:
        with self.client.messages.stream(**self.ask(text)) as stream:
            _first(stream.text_stream)


class Ollama(Client):
    def __init__(self, *args: Any):
        super().__init__(*args)
        import ollama

        self.client = ollama.Client(self.url)

    def chat(self, text: str) -> str:
        return self.client.chat(self.model, self.user(text)).message.content

    def stream(self, text: str) -> Iterator[str]:
        for part in self.client.chat(self.model, self.user(text), stream=True):
            yield part.message.content

    def tools(self, text: str) -> list[Calls]:
        messages: list[Any] = self.user(text)
        replies = []
        for _ in range(2):
            message = self.client.chat(self.model, messages, tools=[TOOL]).message
            calls = message.tool_calls or []
            replies.append([(call.function.name, dict(call.function.arguments)) for call in calls])
            messages += [
                message,
                *(
                    {"role": "tool", "tool_name": call.function.name, "content": RESULT}
                    for call in calls
                ),
            ]
        return replies

    def schema(self, text: str) -> str:
        return self.client.chat(self.model, self.user(text), format=SCHEMA).message.content

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        return [list(vector) for vector in self.client.embed(self.model, texts).embeddings]

    def list(self) -> list[str]:
        return [model.model for model in self.client.list().models]

    def cancel(self, text: str) -> None:
        with contextlib.closing(
            self.client.chat(self.model, self.user(text), stream=True)
        ) as stream:
            _first(part.message.content for part in stream)


class _LangChain(Client):
    """The common part of LangChain's two clients."""

    slow = True
    chat_model: Any

    def chat(self, text: str) -> str:
        return self.chat_model.invoke(text).content

    def stream(self, text: str) -> Iterator[str]:
        for piece in self.chat_model.stream(text):
            yield piece.content

    def tools(self, text: str) -> list[Calls]:
        from langchain_core.messages import HumanMessage, ToolMessage

        model = self.chat_model.bind_tools([TOOL])
        messages: list[Any] = [HumanMessage(text)]
        replies = []
        for _ in range(2):
            message = model.invoke(messages)
            replies.append([(call["name"], call["args"]) for call in message.tool_calls])
            messages += [
                message,
                *(ToolMessage(RESULT, tool_call_id=call["id"]) for call in message.tool_calls),
            ]
        return replies

    def schema(self, text: str) -> str:
        return json.dumps(self.chat_model.with_structured_output(SCHEMA).invoke(text))

    def cancel(self, text: str) -> None:
        with contextlib.closing(self.chat_model.stream(text)) as stream:
            _first(piece.content for piece in stream)


class LangChainOpenAI(_LangChain):
    cannot = {"list": "it has no list of models"}

    def __init__(self, *args: Any):
        super().__init__(*args)
        import langchain_openai

        self.chat_model = langchain_openai.ChatOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, model=self.model
        )

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        from langchain_openai import OpenAIEmbeddings

        # else it sends OpenAI's own tokens in the place of the text, whose numbers mean
        # other words to this model
        return OpenAIEmbeddings(
            base_url=f"{self.url}/v1",
            api_key=KEY,
            model=self.model,
            check_embedding_ctx_length=False,
        ).embed_documents(texts)


class LangChainOllama(_LangChain):
    cannot = {"list": "it has no list of models"}

    def __init__(self, *args: Any):
        super().__init__(*args)
        import langchain_ollama

        self.chat_model = langchain_ollama.ChatOllama(base_url=self.url, model=self.model)

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        from langchain_ollama import OllamaEmbeddings

        return OllamaEmbeddings(base_url=self.url, model=self.model).embed_documents(texts)


class LiteLLM(_ChatCompletions):
    slow = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        # else it asks the network for prices when it is imported
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        self.module = litellm
        self.where = {"model": f"openai/{self.model}", "api_base": f"{self.url}/v1", "api_key": KEY}

    def complete(self, **body: Any) -> Any:
        return self.module.completion(**self.where, **body)

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        return [item["embedding"] for item in self.module.embedding(**self.where, input=texts).data]

    def list(self) -> list[str]:
        names = self.module.get_valid_models(
            check_provider_endpoint=True,
            custom_llm_provider="openai",
            api_key=KEY,
            api_base=self.where["api_base"],
        )
        return [name.removeprefix("openai/") for name in names]

    def cancel(self, text: str) -> None:
        stream = self.complete(messages=self.user(text), stream=True)
        with contextlib.closing(stream.completion_stream):
            _first(chunk.choices[0].delta.content for chunk in stream)


class LLM(Client):
    """The program, as a person runs it, with the server in its file of other models."""

    slow = True
    cannot = {
        "embeddings": "its models of OpenAI's kind take no address for embeddings",
        "list": "it lists the models of its own file, and asks no server",
    }

    def __init__(self, *args: Any):
        super().__init__(*args)
        import llm  # noqa: F401

        more = {
            "model_id": self.model,
            "model_name": self.model,
            "api_base": f"{self.url}/v1",
            "supports_tools": True,
            "supports_schema": True,
        }
        # which is YAML, too
        (self.folder / "extra-openai-models.yaml").write_text(json.dumps([more]))
        self.environment = os.environ | {"LLM_USER_PATH": str(self.folder)}

    def command(self, *args: str) -> list[str]:
        return [os.path.join(os.path.dirname(sys.executable), "llm"), "-m", self.model, *args]

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=check,
            stdin=subprocess.DEVNULL,
        )

    def chat(self, text: str) -> str:
        return self.run("--no-stream", text).stdout

    def stream(self, text: str) -> Iterator[str]:
        with subprocess.Popen(
            self.command(text),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as process:
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                yield piece.decode()
        assert process.returncode == 0

    def tools(self, text: str) -> list[Calls]:
        """It calls by itself, and gives up with an error what goes on calling."""
        code = (
            "from typing import Literal as _L\ndef measure(unit: _L['metres']) -> str:\n   "
            f" 'Measures the room'\n    return {RESULT!r}\n"
        )
        done = self.run("--functions", code, "--td", "--no-stream", text, check=False)
        calls = (
            line.removeprefix("Tool call: ").partition("(")
            for line in done.stderr.splitlines()
            if line.startswith("Tool call: ")
        )
        return [[(name, json.loads(args.rstrip(")").replace("'", '"')))] for name, _, args in calls]

    def schema(self, text: str) -> str:
        return self.run("--schema", json.dumps(SCHEMA), text).stdout

    def cancel(self, text: str) -> None:
        with subprocess.Popen(
            self.command(text),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            _first(iter(lambda: os.read(process.stdout.fileno(), 1 << 16), b""))
            process.send_signal(signal.SIGINT)
            process.stdout.read()


class OpenWebUI(Client):
    """The requests that its backend sends to a connection of OpenAI's kind:
    routers/openai.py, retrieval/utils.py. A chat is always streamed; titles and tags
    are not.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        import httpx

        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=f"{self.url}/v1", headers=headers, timeout=300)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": self.model} | body)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(
            "application/json"
        ), answer.text
        return answer.json()

    def deltas(self, **body: Any) -> Iterator[dict[str, Any]]:
        sent = {
            "stream": True,
            "model": self.model,
            "stream_options": {"include_usage": True},
        } | body
        with self.http.stream("POST", "/chat/completions", json=sent) as answer:
            assert (
                answer.status_code == 200 and "text/event-stream" in answer.headers["content-type"]
            )
            for line in answer.iter_lines():
                if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                    yield choices[0]["delta"]

    def chat(self, text: str) -> str:
        return self.post("/chat/completions", messages=self.user(text), stream=False)["choices"][0][
            "message"
        ]["content"]

    def stream(self, text: str) -> Iterator[str]:
        for delta in self.deltas(messages=self.user(text)):
            yield delta.get("content") or ""

    def tools(self, text: str) -> list[Calls]:
        """Use Open WebUI's "native" function calling."""
        messages, replies = self.user(text), []
        for _ in range(2):
            calls: dict[int, dict[str, Any]] = {}
            for delta in self.deltas(messages=messages, tools=[TOOL]):
                for part in delta.get("tool_calls") or []:
                    if part["index"] in calls:
                        calls[part["index"]]["function"]["arguments"] += part["function"][
                            "arguments"
                        ]
                    else:
                        calls[part["index"]] = part
            made = list(calls.values())
            replies.append(
                [
                    (call["function"]["name"], json.loads(call["function"]["arguments"]))
                    for call in made
                ]
            )
            messages += [{"role": "assistant", "content": "", "tool_calls": made}]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in made
            ]
        return replies

    def schema(self, text: str) -> str:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        }
        return "".join(
            delta.get("content") or ""
            for delta in self.deltas(messages=self.user(text), response_format=form)
        )

    def embeddings(self, texts: list[str]) -> list[list[float]]:
        return [item["embedding"] for item in self.post("/embeddings", input=texts)["data"]]

    def list(self) -> list[str]:
        return [model["id"] for model in self.http.get("/models").json()["data"]]

    def cancel(self, text: str) -> None:
        with contextlib.closing(self.deltas(messages=self.user(text))) as deltas:
            _first(delta.get("content") for delta in deltas)


class Page(Client):
    """llama-server's web page, in a headless Chromium."""

    slow = True
    cannot = {
        "tools": "it calls those of servers of its own protocol (MCP), of which there is none here",
        "schema": "it asks for text",
        "embeddings": "it asks for text",
        "list": "it shows the one model that is served",
    }

    def __init__(self, *args: Any):
        super().__init__(*args)
        import httpx

        from helpers.browser import find_browser

        if (program := find_browser()) is None:
            raise ImportError("no Chromium on PATH")
        if httpx.get(self.url, timeout=300).status_code == 404:
            raise ImportError("the server was built without its web page, which wants npm")
        self.program = program

    @contextlib.contextmanager
    def conversation(self) -> Iterator[Any]:
        from helpers.browser import Browser, Chat

        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            Browser(self.program, Path(profile)) as browser,
        ):
            yield Chat(browser, self.url)

    def chat(self, text: str) -> str:
        with self.conversation() as chat:
            chat.ask(text)
            return chat.read()

    def stream(self, text: str) -> Iterator[str]:
        """Lengths of what was seen are all that there is of the pieces."""
        with self.conversation() as chat:
            chat.slow_down(20_000)  # an answer of about 20 KB, which else takes 0.1 s
            chat.ask(text)
            seen = chat.watch()
            answer = chat.read()
        for start, end in zip([0, *seen], [*seen, len(answer)]):
            yield answer[start:end]

    def cancel(self, text: str) -> None:
        with self.conversation() as chat:
            chat.ask(text)
            chat.stop_after(20)


CLIENTS: dict[str, type[Client]] = {
    "openai": OpenAI, "anthropic": Anthropic, "ollama": Ollama, "langchain-openai": LangChainOpenAI, "langchain-ollama": LangChainOllama,
    "litellm": LiteLLM, "llm": LLM, "Open WebUI": OpenWebUI, "the web page": Page,
}  # fmt: skip


def table() -> str:
    """In Markdown, with the reasons below it; without what all can do."""
    names = {
        "tools": "tools",
        "schema": "JSON schema",
        "embeddings": "embeddings",
        "list": "list of models",
    }
    some = [what for what in WHAT if any(what in kind.cannot for kind in CLIENTS.values())]
    rows, reasons = [], []
    for name, kind in CLIENTS.items():
        cells = []
        for what in some:
            if what in kind.cannot:
                if kind.cannot[what] not in reasons:
                    reasons.append(kind.cannot[what])
                cells.append(f"no ({reasons.index(kind.cannot[what]) + 1})")
            else:
                cells.append("yes")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| | {' | '.join(names[what] for what in some)} |\n|---|{'---|' * len(some)}\n"
    return (
        head
        + "\n".join(rows)
        + "\n\n"
        + "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
        + "\n"
    )


# A template with thoughts that a request can switch off.
THINKS = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# Thoughts in a channel of their own, as gpt-oss has them.
CHANNELS = """{%- for m in messages %}<|start|>{{ m.role }}
{%- if m.role == "assistant" %}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final{% endif %}
{#- #}<|message|>{{ m.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
