"""`moeoff serve` as OpenAI's own client sees it. The answers are compared with those of the model alone, temperature 0."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.waiting import wait_until

openai = pytest.importorskip("openai", reason="the client comes with the test extra")
httpx = pytest.importorskip("httpx")

COMMAND = os.path.join(os.path.dirname(sys.executable), "moeoff")
KEY = "not-a-secret"
PROMPTS = [f"Tom has {n} apples and buys {n + 2} more. How many apples has he?" for n in range(3, 11)]


class Server:
    """A running `moeoff serve` on a free port."""

    def __init__(self, *args: str):
        self.process = subprocess.Popen(
            [COMMAND, "serve", "--no-warm", "--port", "0", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        for line in self.process.stderr:  # llama.cpp's remarks come first
            match = re.search(r"on (http://\S+)/v1", line)
            if match:
                self.url = match[1]
                return
        raise RuntimeError("moeoff serve ended before it served")

    def client(self, key: str = KEY) -> "openai.OpenAI":
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def get(self, path: str, key: str | None = KEY) -> "httpx.Response":
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=30)

    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in self.get("/metrics").text.splitlines() if not line.startswith("#"))}

    def stop(self, sig: int) -> tuple[int, str]:
        self.process.send_signal(sig)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err


@pytest.fixture(scope="module")
def server(demo):
    server = Server("-m", demo, "--api-key", KEY, "--expert-memory", "4M", "-c", "512", "--alias", "demo")
    yield server
    code, text = server.stop(signal.SIGTERM)
    assert code == 0 and "Traceback" not in text


@pytest.fixture(scope="module")
def alone(demo):
    """Answers of the model by itself, one after the other."""
    import moeoff

    with moeoff.Llama(demo, expert_memory="4M", n_ctx=512, flash_attn=True) as llm:
        yield lambda **request: llm.create_chat_completion(**request)["choices"][0]["message"]["content"]


def ask(text: str, **more) -> dict:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24, **more}


def local(request: dict) -> dict:
    return {key: value for key, value in request.items() if key not in ("model", "stream")}


def test_completion_with_usage_and_stats(server):
    answer = server.client().completions.create(model="demo", prompt="Once upon a time", max_tokens=12, temperature=0)
    assert answer.choices[0].text and answer.usage.completion_tokens == 12
    stats = answer.model_extra["moeoff"]
    assert stats["hits"] + stats["misses"] > 0 and 0 <= stats["hit_rate"] <= 1
    assert stats["bytes_read"] > 0 and stats["stall_seconds"] >= 0


def test_chat(server, alone):
    request = ask(PROMPTS[0])
    answer = server.client().chat.completions.create(**request)
    assert answer.choices[0].message.content == alone(**local(request))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert set(answer.model_extra["moeoff"]) == {
        "hit_rate",
        "hits",
        "misses",
        "bytes_read",
        "stall_seconds",
        "tier",
        "served_low",
        "skipped",
        "max_loss",
        "estimated_loss",
    }


def test_streaming(server, alone):
    request = ask(PROMPTS[1], stream=True)
    plain = server.client().chat.completions.create(**ask(PROMPTS[1]))
    chunks = list(server.client().chat.completions.create(**request))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content == alone(**local(request))
    assert len(chunks) > 5 and chunks[-1].choices[0].finish_reason
    assert [chunk.usage for chunk in chunks if chunk.usage] == [plain.usage]
    assert chunks[-1].model_extra["moeoff"]["hits"] > 0


def test_usage_in_a_chunk_of_its_own_where_the_client_asks_for_it(server):
    chunks = list(server.client().chat.completions.create(**ask(PROMPTS[1], stream=True, stream_options={"include_usage": True})))
    assert chunks[-1].choices == [] and chunks[-2].choices[0].finish_reason
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens >= len(chunks) - 4 and chunks[-1].model_extra["moeoff"]["hits"] > 0


def test_eight_clients_at_once(server, alone):
    def one(prompt: str) -> str:
        client = server.client()
        if PROMPTS.index(prompt) % 2:
            return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask(prompt, stream=True)))
        return client.chat.completions.create(**ask(prompt)).choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, PROMPTS))
    assert answers == [alone(**local(ask(prompt))) for prompt in PROMPTS]


def test_models_and_health_do_not_wait_for_an_answer(server):
    stream = server.client().chat.completions.create(**ask(PROMPTS[2], stream=True, max_tokens=200))
    next(stream)
    assert [model.id for model in server.client().models.list()] == ["demo"]
    assert server.get("/health", key=None).json() == {"status": "ok"}
    stream.close()


def test_client_that_hangs_up(server, alone):
    stream = server.client().chat.completions.create(**ask("Count to a thousand.", stream=True, max_tokens=400))
    for _ in range(3):
        next(stream)
    stream.close()
    before = server.metrics()
    answer = server.client().chat.completions.create(**ask(PROMPTS[3]))
    assert answer.choices[0].message.content == alone(**local(ask(PROMPTS[3])))
    assert server.metrics()['moeoff_tokens_total{kind="completion"}'] - before['moeoff_tokens_total{kind="completion"}'] < 200


def test_client_that_hangs_up_before_its_turn_is_not_answered(server):
    """Also without streaming: the answer ends at the next token, and what waited behind it is dropped."""
    host, port = server.url.removeprefix("http://").split(":")
    before = server.metrics()
    body = json.dumps(ask("Tell me a long story.", max_tokens=400))
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(socket.create_connection((host, int(port)))).sendall(request.encode())
        arrived = before["moeoff_requests_total"] + 4
        wait_until(lambda: (now := server.metrics())["moeoff_requests_total"] + now["moeoff_requests_waiting"] >= arrived)
    assert server.client().chat.completions.create(**ask(PROMPTS[4], max_tokens=2)).choices[0].message.content is not None
    after = server.metrics()
    assert after['moeoff_tokens_total{kind="completion"}'] - before['moeoff_tokens_total{kind="completion"}'] < 800
    assert after["moeoff_requests_waiting"] == 0


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/openapi.json"])
def test_wrong_key(server, path):
    with pytest.raises(openai.AuthenticationError, match="wrong API key"):
        server.client("wrong").chat.completions.create(**ask("x"))
    assert server.get(path, key=None).status_code == server.get(path, key="wrong").status_code == 401
    assert server.get(path).status_code == 200


def test_prompt_longer_than_the_context(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(**ask("word " * 2000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIError, match="exceed context window"):
        list(server.client().chat.completions.create(**ask("word " * 2000, stream=True)))
    with pytest.raises(openai.BadRequestError, match="--logprobs"):
        server.client().chat.completions.create(**ask("x", logprobs=True, top_logprobs=2))
    assert server.client().chat.completions.create(**ask("x", max_tokens=2)).usage.completion_tokens == 2


def test_metrics(server):
    before = server.metrics()
    answer = server.client().chat.completions.create(**ask(PROMPTS[5]))
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    stats = answer.model_extra["moeoff"]
    assert grown['moeoff_tokens_total{kind="prompt"}'] == answer.usage.prompt_tokens
    assert grown['moeoff_tokens_total{kind="completion"}'] == answer.usage.completion_tokens
    assert grown["moeoff_expert_hits_total"] == stats["hits"] and grown["moeoff_expert_misses_total"] == stats["misses"]
    assert grown["moeoff_expert_read_bytes_total"] == stats["bytes_read"] and grown["moeoff_requests_total"] == 1
    assert after["moeoff_arena_bytes"] == 4 << 20 and after["moeoff_resident_memory_bytes"] > 20 << 20
    text = server.get("/metrics").text
    names = set(re.findall(r"^(moeoff_\w+)", text, re.MULTILINE))
    assert names == set(re.findall(r"^# TYPE (\w+) (?:counter|gauge)$", text, re.MULTILINE))
    assert {"moeoff_expert_evictions_total", "moeoff_stall_seconds_total", "moeoff_budget_bytes"} <= names


@pytest.mark.parametrize("sig, expected", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_shutdown_cuts_the_answer_and_ends_cleanly(demo, sig, expected):
    server = Server("-m", demo, "-c", "2000", "--strategy", "on-demand")
    reasons, refused = [], []
    started = threading.Event()

    def stream() -> None:
        for chunk in server.client().chat.completions.create(**ask("Count to a thousand.", stream=True, max_tokens=1800, logit_bias={})):
            started.set()
            reasons.append(chunk.choices[0].finish_reason)

    def wait() -> None:
        try:
            server.client().chat.completions.create(**ask("Hello?"))
        except openai.InternalServerError as error:
            refused.append(error.status_code)

    threads = [threading.Thread(target=stream)]
    threads[0].start()
    assert started.wait(30)
    threads.append(threading.Thread(target=wait))
    threads[1].start()
    wait_until(lambda: server.metrics()["moeoff_requests_waiting"] or not threads[1].is_alive())
    code, text = server.stop(sig)
    for thread in threads:
        thread.join(30)
    assert code == expected and "Traceback" not in text and "Error" not in text
    assert reasons[-1] and len(reasons) < 1700  # the stream was cut, with a proper end
    assert refused in ([503], [])  # [] if the model had said all it had to say


def test_companion(demo, tmp_path):
    """A lower tier answers as the model alone does in it; damage is this request's error, and the server goes on."""
    import moeoff
    from moeoff.companion.convert import convert
    from moeoff.companion.file import Companion

    path = convert(demo, tiers="Q4_0", output=tmp_path / "demo.experts.gguf").path
    with moeoff.Llama(demo, experts=path, tier="Q4_0", expert_memory="4M", n_ctx=512, flash_attn=True) as llm:
        expected = llm.create_chat_completion(**local(ask(PROMPTS[0])))["choices"][0]["message"]["content"]
    server = Server("-m", demo, "-c", "512", "--expert-memory", "4M", "--experts", path, "--tier", "q4_0", "--verify-reads")
    answer = server.client().chat.completions.create(**ask(PROMPTS[0]))
    assert answer.choices[0].message.content == expected
    good = (tmp_path / "demo.experts.gguf").read_bytes()
    bad = bytearray(good)
    for s in Companion(path).slices.values():
        bad[s.offset] ^= 1
    with open(path, "r+b") as file:
        file.write(bad)
    with pytest.raises(openai.InternalServerError, match="not the ones that were converted"):
        server.client().chat.completions.create(**ask(PROMPTS[1]))
    with open(path, "r+b") as file:
        file.write(good)
    assert server.client().chat.completions.create(**ask(PROMPTS[0])).choices[0].message.content == expected
    code, text = server.stop(signal.SIGTERM)
    assert code == 0 and "Traceback" not in text


def test_companion_options(demo, moeoff_command):
    done = moeoff_command("serve", "-m", demo, "--port", "0", "--experts", "x.gguf", "--no-experts")
    assert done.returncode == 1 and "not both" in done.stderr
    done = moeoff_command("serve", "-m", demo, "--port", "0", "--tier", "Q4_0", "--no-experts")
    assert done.returncode == 1 and "needs a companion" in done.stderr and "Traceback" not in done.stderr


def test_port_that_is_taken(moeoff_command):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        done = moeoff_command("serve", "--port", str(sock.getsockname()[1]))
    assert done.returncode == 1 and "choose another --host or --port" in done.stderr and "Traceback" not in done.stderr


def test_without_the_extra(moeoff_command, tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\", name='uvicorn')")
    done = moeoff_command("serve", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.strip().splitlines() == [
        "Error: moeoff serve needs uvicorn, which is not installed: pip install 'moeoff[server]'"
    ]
