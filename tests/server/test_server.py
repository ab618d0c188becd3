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
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pexpect
import pytest

from helpers.files import COMMAND, ROOT
from helpers.servers import single_use
from helpers.waiting import wait_until
from moeoff.measure.statistics import log_probs

KEY = "not-a-secret"
# answers that do not end by themselves while a test looks at them
LONG = ("-c", "8192", "--", "--override-kv", "qwen2moe.context_length=int:4096")
PROMPTS = [
    f"Tom has {n} apples and buys {n + 2} more. How many apples has he?" for n in range(3, 11)
]


class Server:
    """A running `moeoff serve` on a free port."""

    def __init__(self, *args: str, shell: str | None = None):
        command = [
            *(["sh", "-c", shell] if shell else []),
            COMMAND,
            *"serve --warm off --kv-disk 0 --port 0".split(),
            *args,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.log = ""
        for line in self.process.stderr:  # llama.cpp's remarks come first
            self.log += line
            match = re.search(r"on (http://\S+)/v1", line)
            if match:
                self.url = match[1]
                return
        raise RuntimeError("moeoff serve ended before it served")

    def client(self, key: str = KEY) -> "openai.OpenAI":
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            timeout=300,
            http_client=single_use(),
        )

    def get(self, path: str, key: str | None = KEY) -> "httpx.Response":
        return httpx.get(
            self.url + path, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=300
        )

    def metrics(self) -> dict[str, float]:
        return {
            name: float(value)
            for name, value in (
                line.rsplit(" ", 1)
                for line in self.get("/metrics").text.splitlines()
                if not line.startswith("#")
            )
        }

    def idle(self) -> None:
        """Waits until nothing is computed: also what has been asked for by clients who
        have gone.
        """
        wait_until(
            lambda: (
                self.metrics()["llamacpp:requests_processing"]
                == self.metrics()["llamacpp:requests_deferred"]
                == 0
            )
        )

    def stop(self, sig: int) -> tuple[int, str]:
        self.process.send_signal(sig)
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out + err


@pytest.fixture(scope="module")
def server(demo, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# of two\nanother\n{KEY}\n")
    origins = ("--cors-origins", "https://a.example,https://b.example")
    server = Server(
        "-m",
        demo,
        "--api-key-file",
        str(keys),
        *"--expert-memory 4M --alias demo".split(),
        *origins,
        *LONG,
    )
    yield server
    code, text = server.stop(signal.SIGTERM)
    assert code == 0 and "Traceback" not in text


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
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(
            f"{server.url}/completion",
            headers=headers,
            json={"n_predict": 4, "temperature": 0, **more},
            timeout=300,
        ).json()

    for answer in post(prompt=["Tom has", "Ann has"]):
        assert answer["moeoff"]["expert_uses"] > 0 and "moeoff" not in answer["timings"]
    chosen = post(prompt="Tom has", response_fields=["timings", "moeoff/expert_uses"])
    assert (
        chosen["moeoff/expert_uses"] > 0
        and set(chosen) == {"timings", "moeoff/expert_uses"}
        and "moeoff" not in chosen["timings"]
    )
    inner = (
        server.client()
        .completions.create(
            model="demo",
            prompt="Tom has",
            max_tokens=4,
            temperature=0,
            extra_body={"verbose": True},
        )
        .model_extra
    )
    assert (
        inner["__verbose"]["moeoff"] == inner["moeoff"]
        and "moeoff" not in inner["__verbose"]["timings"]
    )


def test_probabilities_are_those_of_llama(server, demo):
    """With the defaults of both. Without flash attention they would differ by more than
    a hundredth.
    """
    import moeoff

    prompt = "Tom has 10 bags of 5 oranges. How many oranges does Tom have in total?"
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 5, "temperature": 0, "cache_prompt": False}
    answer = httpx.post(
        f"{server.url}/completion",
        headers={"Authorization": f"Bearer {KEY}"},
        json=body,
        timeout=300,
    ).json()
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


def test_chat(server, alone):
    request = ask(PROMPTS[0])
    answer = server.client().chat.completions.create(**request)
    assert answer.choices[0].message.content == alone(**local(request))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    stats = answer.model_extra["moeoff"]
    assert (
        stats["hits"] + stats["misses"] > 0
        and 0 <= stats["hit_rate"] <= 1
        and stats["bytes_read"] > 0
        and stats["stall_seconds"] >= 0
    )
    assert set(stats) == set(
        "hit_rate hits device_hits misses bytes_read stall_seconds expert_uses served_low skipped"
        " cache_bytes".split()
    )


def test_streaming(server, alone):
    request = ask(PROMPTS[1], stream=True)
    plain = server.client().chat.completions.create(**ask(PROMPTS[1]))
    chunks = list(server.client().chat.completions.create(**request))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == plain.choices[0].message.content
        == alone(**local(request))
    )
    assert len(chunks) > 5 and chunks[-1].choices[0].finish_reason
    assert chunks[-1].model_extra["moeoff"]["hits"] > 0


def test_usage_in_a_chunk_of_its_own_where_the_client_asks_for_it(server):
    chunks = list(
        server.client().chat.completions.create(
            **ask(PROMPTS[1], stream=True, stream_options={"include_usage": True})
        )
    )
    assert chunks[-1].choices == [] and chunks[-2].choices[0].finish_reason
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert (
        chunks[-1].usage.completion_tokens >= len(chunks) - 4
        and chunks[-1].model_extra["moeoff"]["hits"] > 0
    )


def test_eight_clients_at_once(server, demo):
    """Each token is one that the model alone would draw: kernels round differently with
    neighbours in the batch, which moves logits by some 0.05, and so only a near tie may
    fall the other way. Another prompt's tokens miss by 0.47 at least.
    """
    import moeoff

    def one(prompt: str) -> list[int]:
        body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "return_tokens": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{server.url}/completion", headers=headers, json=body, timeout=300)
        return answer.json()["tokens"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, PROMPTS))
    with moeoff.Llama(demo, expert_memory="4M", n_ctx=512, logits_all=True) as llm:
        for prompt, drawn in zip(PROMPTS, answers, strict=True):
            llm.reset()
            tokens = llm.tokenize(prompt.encode())
            llm.eval([*tokens, *drawn[:-1]])
            rows = llm.scores[len(tokens) - 1 :][: len(drawn)]
            behind = rows.max(axis=1) - rows[range(len(drawn)), drawn]
            assert len(drawn) > 4 and behind.max() < 0.2, behind


def test_models_and_health_do_not_wait_for_an_answer(server):
    stream = server.client().chat.completions.create(**ask(PROMPTS[2], stream=True, max_tokens=200))
    next(stream)
    assert [model.id for model in server.client().models.list()] == ["demo"]
    assert server.get("/health", key=None).json() == {"status": "ok"}
    stream.close()


def test_client_that_hangs_up(server, alone):
    server.idle()
    before = server.metrics()
    stream = server.client().chat.completions.create(
        **ask("Count to a thousand.", stream=True, max_tokens=1800, extra_body={"ignore_eos": True})
    )
    for _ in range(3):
        next(stream)
    stream.close()
    server.idle()
    assert (
        server.metrics()["llamacpp:tokens_predicted_total"]
        - before["llamacpp:tokens_predicted_total"]
        < 1800
    )
    # what a slot has kept of a prompt may have been computed beside other clients'
    answer = server.client().chat.completions.create(
        **ask(PROMPTS[3], extra_body={"cache_prompt": False})
    )
    assert answer.choices[0].message.content == alone(**local(ask(PROMPTS[3])))


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/props", "/api/tags"])
def test_wrong_key(server, path):
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        server.client("wrong").chat.completions.create(**ask("x"))
    assert [
        server.get(path, key).status_code for key in (None, "wrong", "# of two", "another", KEY)
    ] == [401, 401, 401, 200, 200]
    assert httpx.post(f"{server.url}/api/chat", json={}, timeout=300).status_code == 401


def test_allowed_origins(server):
    """The one that asks is named, and no other."""
    for origin, allowed in (
        ("https://a.example", True),
        ("https://b.example", True),
        ("https://c.example", False),
        ("https://a.exampl", False),
    ):
        answer = httpx.get(f"{server.url}/health", headers={"Origin": origin}, timeout=300)
        assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_prompt_longer_than_the_context(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(**ask("word " * 20_000))
    assert caught.value.type == "exceed_context_size_error"
    assert (
        server.client().chat.completions.create(**ask("x", max_tokens=2)).usage.completion_tokens
        == 2
    )


def test_responses(server):
    answer = server.client().responses.create(
        model="demo", input=PROMPTS[0], max_output_tokens=16, temperature=0
    )
    assert answer.output_text and answer.usage.output_tokens <= 16


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
    server.idle()
    before = server.metrics()
    answer = server.client().chat.completions.create(**ask(PROMPTS[5]))
    server.idle()
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    stats = answer.model_extra["moeoff"]
    assert grown["llamacpp:tokens_predicted_total"] == answer.usage.completion_tokens
    assert (
        grown["moeoff_expert_hits_total"] == stats["hits"]
        and grown["moeoff_expert_misses_total"] == stats["misses"]
    )
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
    assert (
        grown["moeoff_decoded_tokens_total"] == answer.usage.completion_tokens - 1
        and grown["moeoff_disk_busy_seconds_total"] > 0
    )
    assert (
        after["moeoff_expert_cache_bytes"] == 4 << 20
        and after["moeoff_resident_memory_bytes"] > 20 << 20
    )
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
    assert (
        page.status_code == 200
        and page.headers["content-type"].startswith("text/html")
        and "connect-src 'self'" in page.headers["content-security-policy"]
    )
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
        server = Server(
            "-m",
            demo,
            "--expert-memory",
            experts,
            *"-c 65536 -- --override-kv qwen2moe.context_length=int:65536".split(),
        )
        ended: list[str] = []

        def stream(server: Server = server, ended: list[str] = ended) -> None:
            try:
                reasons = [
                    c.choices[0].finish_reason
                    for c in server.client().chat.completions.create(
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
        code, text = server.stop(signal.SIGTERM)
        for thread in threads:
            thread.join(300)
        assert len(ended) == 8 and set(ended) <= {"APIError", "InternalServerError"}, ended
        assert code == 0 and "Traceback" not in text and "Error" not in text


def request_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"[A-Z]+ /", line)]


def test_a_line_for_each_request(demo):
    """Whatever becomes of it, but for looks that succeed, which programs repeat; none
    of them may forge another line. The first does not pay for the warm-up.
    """
    server = Server("-m", demo, "--api-key", KEY, "--expert-memory", "4M", *LONG)
    before = server.metrics()["moeoff_expert_misses_total"]
    stats = (
        server.client()
        .chat.completions.create(**ask(PROMPTS[0], max_tokens=5))
        .model_extra["moeoff"]
    )
    assert server.metrics()["moeoff_expert_misses_total"] - before == stats["misses"] > 0
    list(server.client().chat.completions.create(**ask(PROMPTS[0], stream=True, max_tokens=7)))
    server.client().completions.create(model="demo", prompt=["Tom", "Ann"], max_tokens=3)
    stream = server.client().chat.completions.create(
        **ask(PROMPTS[1], stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
    )
    next(stream)
    stream.close()
    server.get("/v1/models", key=None)
    server.get("/nothing%0Ahere")
    server.get("/health")
    server.idle()
    code, text = server.stop(signal.SIGTERM)
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
    assert code == 0 and len(lines) == len(expected) and " E " not in text, text
    for pattern in expected:  # the one that was left is noticed when it is
        assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 1, (pattern, lines)


def test_the_build_has_a_name(server):
    import llama_cpp

    name = (
        server.client()
        .completions.create(model="demo", prompt="Tom", max_tokens=1)
        .system_fingerprint
    )
    assert (
        re.fullmatch(r"b\d+-[0-9a-f]{7,}-" + re.escape(llama_cpp.__version__), name)
        and name == server.get("/props").json()["build_info"]
    )


def test_no_tools_and_the_page_is_told_so(server):
    answer = server.get("/tools")
    assert (
        answer.status_code == 200
        and answer.json() == []
        and server.get("/tools", key=None).status_code == 401
    )
    answer = httpx.post(
        f"{server.url}/tools",
        headers={"Authorization": f"Bearer {KEY}"},
        json={"tool": "file_glob_search"},
        timeout=300,
    )
    assert answer.json() == {"error": "this server runs no tools"}


def test_signals_end_it_well(demo):
    """Where Ctrl-C is ignored when it starts, as by a script's &, and comes twice, from
    a terminal and a program in it.
    """
    server = Server(
        "-m",
        demo,
        *"-c 2048 --expert-memory 4M".split(),
        shell='trap \'\' INT; "$0" "$@" & wait $!',
    )
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as file:
        child = int(file.read())  # sh waits, and does not pass it on
    for _ in range(2):
        os.kill(child, signal.SIGINT)
    text = server.process.communicate(timeout=300)[1]
    assert (
        server.process.returncode == 0
        and text.count("SIGINT: stopping the server") == 1
        and "Traceback" not in text
    )
    assert (
        "a conversation ends at the trained 256 tokens" in server.log
        and "--override-kv qwen2moe.context_length=int:512" in server.log
    )


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


def test_drafts_change_no_text(server, demo):
    """Found in what has been said: the same words, checked and not guessed. A quiet
    server writes no lines about requests.
    """
    request = {
        "model": "demo",
        "prompt": "one two three one two three one two",
        "max_tokens": 100,
        "temperature": 0,
    }
    drafting = Server(
        "-m",
        demo,
        *"-c 512 --expert-memory 4M -np 1 -q --spec-type ngram-simple".split(),
    )
    texts = [
        one.client().completions.create(**request).choices[0].text for one in (server, drafting)
    ]
    assert (
        texts[0] == texts[1]
        and "moeoff_draft_length" in drafting.metrics()
        and "moeoff_draft_length" not in server.metrics()
    )
    code, text = drafting.stop(signal.SIGTERM)
    assert code == 0 and request_lines(text) == []


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
    server = Server(
        "-m",
        demo,
        *"-c 512 --expert-memory 4M --experts".split(),
        path,
        "--tier",
        "q4_0",
        "--verify-reads",
    )
    answer = server.client().chat.completions.create(**ask(PROMPTS[0]))
    assert answer.choices[0].message.content == expected
    good = (tmp_path / "demo.experts.gguf").read_bytes()
    bad = bytearray(good)
    for s in Sidecar(path).slices.values():
        bad[s.offset] ^= 1
    with open(path, "r+b") as file:
        file.write(bad)
    with pytest.raises(openai.InternalServerError, match="not the ones that were converted"):
        server.client().chat.completions.create(**ask(PROMPTS[1]))
    with open(path, "r+b") as file:
        file.write(good)
    assert (
        server.client().chat.completions.create(**ask(PROMPTS[0])).choices[0].message.content
        == expected
    )
    code, text = server.stop(signal.SIGTERM)
    assert code == 0 and "Traceback" not in text


def test_port_that_is_taken(invoke):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        done = invoke("serve", "--port", str(sock.getsockname()[1]))
    assert (
        done.returncode == 1
        and "give --host ADDRESS, or --port N" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.slow
@pytest.mark.cgroup
def test_ten_minutes_of_mixed_clients(demo):
    command = [sys.executable, "soak.py", "-m", demo, "--minutes", "10", "--memory", "150M"]
    done = subprocess.run(
        command, cwd=ROOT / "scripts" / "bench", capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
