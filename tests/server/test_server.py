"""`moeoff serve` as real clients see it. The answers are compared with those of the
model alone, temperature 0.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import openai
import pexpect
import pytest

from helpers.files import COMMAND
from helpers.servers import Command
from helpers.waiting import wait_until
from moeoff.measure.statistics import log_probs

KEY = "not-a-secret"
# answers that do not end by themselves while a test looks at them
LONG = ("-c", "8192", "--", "--override-kv", "qwen2moe.context_length=int:4096")
PROMPTS = [
    f"Tom has {n} apples and buys {n + 2} more. How many apples has he?" for n in range(3, 11)
]


USUAL = "--warm off --kv-disk 0".split()


@pytest.fixture(scope="module")
def server(demo, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# of two\nanother\n{KEY}\n")
    origins = ("--cors-origins", "https://a.example,https://b.example")
    more = ("--api-key-file", str(keys), *"--expert-memory 4M --alias demo".split(), *origins)
    with Command("-m", demo, *USUAL, *more, *LONG, key=KEY) as server:
        yield server
        server.stop()


@pytest.fixture(scope="module")
def alone(demo):
    """Answers of the model by itself, one after the other."""
    import moeoff

    with moeoff.Llama(demo, expert_memory="4M", n_ctx=512) as llm:
        yield lambda **request: llm.create_chat_completion(**request)["choices"][0]["message"][
            "content"
        ]


def ask(text: str, **more) -> dict:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


def local(request: dict) -> dict:
    return {key: value for key, value in request.items() if key not in ("model", "stream")}


def test_stats_stand_beside_the_timings_of_every_answer(server):
    """Several answers in one, one within another, and fields that the client chooses."""

    def post(**more) -> list | dict:
        return server.post("/completion", {"n_predict": 4, "temperature": 0, **more}).json()

    for answer in post(prompt=["Tom has", "Ann has"]):
        assert answer["moeoff"]["expert_uses"] > 0 and "moeoff" not in answer["timings"]
    chosen = post(prompt="Tom has", response_fields=["timings", "moeoff/expert_uses"])
    assert chosen["moeoff/expert_uses"] > 0
    assert set(chosen) == {"timings", "moeoff/expert_uses"}
    assert "moeoff" not in chosen["timings"]
    inner = server.client.completions.create(
        model="demo",
        prompt="Tom has",
        max_tokens=4,
        temperature=0,
        extra_body={"verbose": True},
    ).model_extra
    assert inner["__verbose"]["moeoff"] == inner["moeoff"]
    assert "moeoff" not in inner["__verbose"]["timings"]


def test_probabilities_are_those_of_llama(server, demo):
    """With the defaults of both. Without flash attention they would differ by more than
    a hundredth.
    """
    import moeoff

    prompt = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 5, "temperature": 0, "cache_prompt": False}
    answer = server.post("/completion", body).json()
    served = {
        token["id"]: token["logprob"]
        for token in answer["completion_probabilities"][0]["top_logprobs"]
    }
    found = []
    for options in ({}, {"flash_attn": False}):
        with moeoff.Llama(demo, expert_memory="4M", n_ctx=512, **options) as llm:
            tokens = llm.tokenize(prompt.encode())
            llm.decode_batch(tokens, 0, len(tokens) - 1)
            row = log_probs(llm.batch_logits(1))[0]
        found.append([float(row[token]) for token in served])
    assert found[0] == pytest.approx(list(served.values()), abs=1e-3)
    assert found[1] != pytest.approx(list(served.values()), abs=1e-3)


def test_chat_and_its_stream(server, alone):
    request = ask(PROMPTS[1], stream=True)
    plain = server.client.chat.completions.create(**ask(PROMPTS[1]))
    chunks = list(server.client.chat.completions.create(**request))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == plain.choices[0].message.content
        == alone(**local(request))
    )
    assert len(chunks) > 5 and chunks[-1].choices[0].finish_reason
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    stats = plain.model_extra["moeoff"]
    assert stats.keys() == chunks[-1].model_extra["moeoff"].keys()
    assert set(stats) == set(
        "hit_rate hits device_hits misses bytes_read stall_seconds expert_uses served_low skipped"
        " cache_bytes".split()
    )
    assert stats["hits"] + stats["misses"] > 0 and 0 <= stats["hit_rate"] <= 1
    assert stats["bytes_read"] > 0 and stats["stall_seconds"] >= 0


def test_models_and_health_do_not_wait_for_an_answer(server):
    stream = server.client.chat.completions.create(**ask(PROMPTS[2], stream=True, max_tokens=200))
    next(stream)
    assert [model.id for model in server.client.models.list()] == ["demo"]
    assert server.get("/health", key=None).json() == {"status": "ok"}
    stream.close()


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/props", "/api/tags"])
def test_wrong_key(server, path):
    assert [
        server.get(path, key=key).status_code for key in (None, "wrong", "# of two", "another", KEY)
    ] == [401, 401, 401, 200, 200]
    assert server.post("/api/chat", {}, key=None).status_code == 401


def test_allowed_origins(server):
    """The one that asks is named, and no other."""
    for origin, allowed in (
        ("https://a.example", True),
        ("https://b.example", True),
        ("https://c.example", False),
        ("https://a.exampl", False),
    ):
        answer = server.get("/health", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_a_streamed_answer_keeps_its_connection(server):
    """As its header says: a client that sends the next request on it would get no
    answer.
    """
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=300)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.connect()
    connection.auto_open = False
    for _ in range(2):
        connection.request(
            "POST",
            "/completion",
            json.dumps({"prompt": "A", "n_predict": 2, "stream": True}),
            headers,
        )
        assert b'"stop":true' in connection.getresponse().read()
    connection.close()


def test_metrics(server):
    wait_until(server.is_idle)
    before = server.metrics()
    answer = server.client.chat.completions.create(**ask(PROMPTS[5]))
    wait_until(server.is_idle)
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    stats = answer.model_extra["moeoff"]
    assert grown["llamacpp:tokens_predicted_total"] == answer.usage.completion_tokens
    assert grown["moeoff_expert_hits_total"] == stats["hits"]
    assert grown["moeoff_expert_misses_total"] == stats["misses"]
    # a prefetch that was under way when the answer before ended is in this one's
    # figures, and may have ended before the first look
    assert (
        abs(grown["moeoff_expert_read_bytes_total"] - stats["bytes_read"])
        < 1 << 20
        < stats["bytes_read"]
    )
    for kind in ("hits", "misses"):
        assert (
            sum(n for name, n in grown.items() if name.startswith(f"moeoff_layer_{kind}_total{{"))
            == stats[kind]
        )
    assert grown["moeoff_decoded_tokens_total"] == answer.usage.completion_tokens - 1
    assert grown["moeoff_disk_busy_seconds_total"] > 0
    assert after["moeoff_expert_cache_bytes"] == 4 << 20
    assert after["moeoff_resident_memory_bytes"] > 20 << 20
    text = server.get("/metrics").text
    names = set(re.findall(r"^(moeoff_\w+)", text, re.MULTILINE))
    assert names == set(re.findall(r"^# TYPE (moeoff_\w+) (?:counter|gauge)$", text, re.MULTILINE))
    assert {
        "moeoff_expert_evictions_total",
        "moeoff_stall_seconds_total",
        "moeoff_budget_bytes",
    } <= names


def test_the_page_of_figures(server):
    """Is the same for everybody, asks for figures that there are, and for nothing from
    elsewhere.
    """
    page = server.get("/moeoff", key=None)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    asked = set(re.findall(r'"((?:moeoff_|llamacpp:)\w+)"', page.text))
    assert len(asked) > 10 and asked <= set(server.metrics())
    # a name, which nobody asks for
    assert set(re.findall(r"https?://[^\s\"']+", page.text)) == {"http://www.w3.org/2000/svg"}


# stops that fall into a decode, and with all in memory some that fall between two
@pytest.mark.parametrize(
    "experts, stops", [("400K", 1), pytest.param("64M", 3, marks=pytest.mark.slow)]
)
def test_shutdown_ends_every_answer(demo, experts, stops):
    """Four that are computed and four that wait: each gets an error, and none looks as
    if it were all that was asked for.
    """
    for _ in range(stops):
        context = "-c 65536 -- --override-kv qwen2moe.context_length=int:65536".split()
        server = Command("-m", demo, *USUAL, "--expert-memory", experts, *context)
        ended: list[str] = []

        def stream(server: Command = server, ended: list[str] = ended) -> None:
            try:
                reasons = [
                    c.choices[0].finish_reason
                    for c in server.client.chat.completions.create(
                        **ask(
                            "Count.", stream=True, max_tokens=16000, extra_body={"ignore_eos": True}
                        )
                    )
                    if c.choices
                ]
                ended.append(reasons[-1])
            except openai.APIError as error:
                ended.append(type(error).__name__)

        threads = [threading.Thread(target=stream) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(
            lambda server=server: (
                (now := server.metrics())["llamacpp:requests_processing"] == 4
                and now["llamacpp:requests_deferred"] == 4
            )
        )
        text = server.stop()
        for thread in threads:
            thread.join(300)
        assert len(ended) == 8 and set(ended) <= {"APIError", "InternalServerError"}, ended
        assert "Error" not in text


def request_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"[A-Z]+ /", line)]


def test_a_line_for_each_request(demo):
    """Whatever becomes of it, but for looks that succeed, which programs repeat; none
    of them may forge another line. The first does not pay for the warm-up.
    """
    more = ("--api-key", KEY, "--expert-memory", "4M", *LONG)
    server = Command("-m", demo, *USUAL, *more, key=KEY)
    before = server.metrics()["moeoff_expert_misses_total"]
    stats = server.client.chat.completions.create(**ask(PROMPTS[0], max_tokens=5)).model_extra[
        "moeoff"
    ]
    assert server.metrics()["moeoff_expert_misses_total"] - before == stats["misses"] > 0
    list(server.client.chat.completions.create(**ask(PROMPTS[0], stream=True, max_tokens=7)))
    server.client.completions.create(model="demo", prompt=["Tom", "Ann"], max_tokens=3)
    stream = server.client.chat.completions.create(
        **ask(PROMPTS[1], stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    )
    next(stream)
    stream.close()
    server.get("/v1/models", key=None)
    server.get("/nothing%0Ahere")
    server.get("/health")
    wait_until(server.is_idle)
    text = server.stop()
    lines = request_lines(text)
    took = (
        r"\d+ tokens read( and \d+ remembered)?, {} written, the first after \d+\.\d\d s, \d+\.\d"
        r" tok/s, \d+ % hits"
    )
    expected = [
        f"POST /v1/chat/completions 200: {took.format(5)}",
        f"POST /v1/chat/completions 200: {took.format(7)}",
        f"POST /v1/completions 200: {took.format(6)}",
        (
            r"POST /v1/chat/completions 200: .*\d+ written, the first after \d+\.\d\d s, .*not to"
            r" its end"
        ),
        r"GET /v1/models 401",
        r"GET /nothing\?here 404",
    ]
    # who leaves has made no error
    assert len(lines) == len(expected) and " E " not in text, text
    for pattern in expected:  # the one that was left is noticed when it is
        assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 1, (pattern, lines)


def test_the_build_has_a_name(server):
    import llama_cpp

    name = server.client.completions.create(
        model="demo", prompt="Tom", max_tokens=1
    ).system_fingerprint
    assert re.fullmatch(r"b\d+-[0-9a-f]{7,}-" + re.escape(llama_cpp.__version__), name)
    assert name == server.get("/props").json()["build_info"]


def test_no_tools_and_the_page_is_told_so(server):
    answer = server.get("/tools")
    assert answer.status_code == 200
    assert answer.json() == []
    assert server.get("/tools", key=None).status_code == 401
    answer = server.post("/tools", {"tool": "file_glob_search"})
    assert answer.json() == {"error": "this server runs no tools"}


def test_signals_end_it_well(demo):
    """Where Ctrl-C is ignored when it starts, as by a script's &, and comes twice, from
    a terminal and a program in it.
    """
    args = (*USUAL, *"-c 2048 --expert-memory 4M".split())
    server = Command("-m", demo, *args, shell='trap \'\' INT; "$0" "$@" & wait $!')
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as file:
        child = int(file.read())  # sh waits, and does not pass it on
    for _ in range(2):
        os.kill(child, signal.SIGINT)
    assert server.process.wait(300) == 0
    text = server.log
    assert text.count("SIGINT: stopping the server") == 1 and "Traceback" not in text
    assert "a conversation ends at the trained 256 tokens" in text
    assert "--override-kv qwen2moe.context_length=int:512" in text


def test_ctrl_c_in_a_terminal(demo):
    """Sent by the terminal itself, while an answer is written: a sentence, and no
    error.
    """
    command = [
        COMMAND,
        *"serve --warm off --port 0 -m".split(),
        demo,
        "--expert-memory",
        "4M",
        *LONG,
    ]
    child = pexpect.spawn(
        command[0], command[1:], encoding="utf-8", timeout=300, dimensions=(50, 400)
    )
    child.expect(r"on (http://\S+)/v1.*Ctrl-C ends")
    url = child.match[1]
    with httpx.stream(
        "POST",
        f"{url}/completion",
        json={"prompt": "Count", "n_predict": 4000, "ignore_eos": True, "stream": True},
        timeout=300,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.sendintr()
        child.expect("SIGINT: stopping the server")
        assert "error" in "".join(lines)
    rest = child.read()
    child.wait()
    assert child.exitstatus == 0 and "Traceback" not in rest and " E " not in rest, rest


def test_a_second_signal_ends_what_does_not_end():
    code = """if True:
        import os, signal, time
        from moeoff.cli.serve import _ended_by_signals
        with _ended_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(300)
            finally:
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(300)
    """
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 1
    )


def test_sidecar(demo, tmp_path):
    """A lower tier answers as the model alone does in it; damage is this request's
    error, and the server goes on.
    """
    import moeoff
    from moeoff.experts.convert import convert
    from moeoff.experts.sidecar import Sidecar

    path = convert(demo, tiers="Q4_0", output=tmp_path / "demo.experts.gguf").path
    with moeoff.Llama(demo, experts=path, tier="Q4_0", expert_memory="4M", n_ctx=512) as llm:
        expected = llm.create_chat_completion(**local(ask(PROMPTS[0])))["choices"][0]["message"][
            "content"
        ]
    more = ("--experts", path, *"--tier q4_0 --verify-reads -c 512 --expert-memory 4M -q".split())
    server = Command("-m", demo, *USUAL, *more)
    answer = server.client.chat.completions.create(**ask(PROMPTS[0]))
    assert answer.choices[0].message.content == expected
    good = (tmp_path / "demo.experts.gguf").read_bytes()
    bad = bytearray(good)
    for s in Sidecar(path).slices.values():
        bad[s.offset] ^= 1
    with open(path, "r+b") as file:
        file.write(bad)
    with pytest.raises(openai.InternalServerError, match="not the ones that were converted"):
        server.client.chat.completions.create(**ask(PROMPTS[1]))
    with open(path, "r+b") as file:
        file.write(good)
    assert (
        server.client.chat.completions.create(**ask(PROMPTS[0])).choices[0].message.content
        == expected
    )
    assert request_lines(server.stop()) == []  # a quiet server writes none


def test_port_that_is_taken(invoke):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        done = invoke("serve", "--port", str(sock.getsockname()[1]))
    assert done.returncode == 1
    assert "give --host ADDRESS, or --port N" in done.stderr
    assert "Traceback" not in done.stderr
