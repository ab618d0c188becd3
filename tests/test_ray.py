"""moeoff.ray on a Ray cluster of two nodes, each in a memory cgroup where one can be made; scripts/bench/bench_scale.py measures the same."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'moeoff[ray]'")

import moeoff.ray
from helpers.waiting import wait_until
from moeoff.bench.cgroup import unavailable
from moeoff.errors import OptionError
from moeoff.ray.forwarding import affinity_key
from moeoff.ray.report import report_of
from moeoff.ray.router import rank
from ray_cluster import cluster

GIB = 1 << 30
KEY = "a-key"


@pytest.fixture(scope="module")
def served(demo):
    """Two nodes, one replica on each."""
    from ray import serve

    limit = 3 * GIB if unavailable() is None else None
    with cluster([{"holds": "demo", "disk": "a"}, {"holds": "demo", "disk": "b"}], 2 * GIB, limit) as nodes:
        application = moeoff.ray.deployment(demo, memory="150M", num_replicas=2, labels={"holds": "demo"}, api_key=KEY, n_threads=1)
        serve.run(application)
        nodes.reports(2, KEY)
        yield nodes


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def chat(text: str, n: int = 48, **options) -> dict:
    body = {"model": "x", "messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0}
    return body | {"extra_body": {"ignore_eos": True}} | options


def test_a_replica_on_each_node_within_its_memory(served):
    reports = served.reports(2, KEY)
    assert {report["node"] for report in reports} == {node.node_id for node in served.nodes}
    folders = {node.node_id: node.cgroup for node in served.nodes}
    for report in reports:
        assert 0 < report["resident_bytes"] <= report["budget_bytes"] == 150 << 20
        if folder := folders[report["node"]]:
            with open(f"{folder}/cgroup.procs") as file:
                assert {report["pid"], report["server_pid"]} <= set(map(int, file))


def test_a_stream_comes_token_by_token_and_says_the_same(client):
    whole = client.chat.completions.create(**chat("How many apples?")).choices[0].message.content
    pieces = [(time.monotonic(), chunk.choices[0].delta.content or "") for chunk in client.chat.completions.create(**chat("How many apples?"), stream=True)]
    assert "".join(text for _, text in pieces) == whole
    assert sum(bool(text) for _, text in pieces) > 30
    first, last = (next(at for at, text in order if text) for order in (pieces, reversed(pieces)))
    assert last - first > 0.01, "all at once"


def test_a_conversation_stays_with_its_replica_and_its_prefix(client):
    for number in range(4):
        messages, own = [{"role": "system", "content": "You count."}, {"role": "user", "content": f"Count to {number}, please"}], set()
        for turn in range(3):
            raw = client.chat.completions.with_raw_response.create(**chat("", 12, messages=messages))
            answer = raw.parse()
            own.add(raw.headers["x-moeoff-replica"])
            if turn:
                assert answer.usage.prompt_tokens_details.cached_tokens > 10
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "Go on"}]
        assert len(own) == 1


def test_other_routes_and_what_replicas_report(served, client):
    assert client.models.list().data[0].id == "demo-moe-q8_0"
    assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 401
    assert httpx.get(f"{served.url}/replicas").status_code == 401 and httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    client.chat.completions.create(**chat("Why?"))
    text = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    for name in ("hit_rate", "mb_per_token", "queue", "expert_bytes_read_total"):
        assert text.count(f"\nmoeoff_replica_{name}{{") == 2


@pytest.mark.parametrize("victim", ["pid", "server_pid"])
def test_sixteen_chats_and_a_replica_that_is_killed(served, client, victim):
    """Streams that had begun there end with an error that clients understand; every other chat is answered, and another replica comes."""
    dead, other = served.reports(2, KEY)
    begun, ends = threading.Barrier(17, timeout=60), {}

    def stream(number: int) -> str:
        with client.chat.completions.create(**chat(f"{number}: tell me a story", 400), stream=True) as chunks:
            next(iter(chunks))
            begun.wait()
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]
            return "whole" if reasons and reasons[-1] else "cut off without a word"

    def whole(number: int) -> str:
        begun.wait()
        return "whole" if client.chat.completions.create(**chat(f"{number}: tell me a story", 200)).usage.completion_tokens == 200 else "short"

    def ask(number: int) -> None:
        try:
            ends[number] = (stream if number < 4 else whole)(number)
        except openai.APIError as error:
            ends[number] = f"error: {error.message}"
        except Exception as error:
            ends[number] = repr(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    begun.wait()  # four streams are being written, and twelve whole answers asked for
    os.kill(dead[victim], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    counts = collections.Counter(ends.values())
    assert len(ends) == 16 and set(counts) <= {"whole", "error: the replica that was answering has died: ask again"}, counts
    assert all(ends[number] == "whole" for number in range(4, 16)), "nothing of these had been sent: they can be asked again"
    wait_until(lambda: dead["replica"] not in {report["replica"] for report in served.reports(2, KEY)})
    assert {report["node"] for report in served.reports(2, KEY)} == {dead["node"], other["node"]}
    assert client.chat.completions.create(**chat("Still there?")).usage.completion_tokens == 48


@pytest.mark.slow
def test_a_model_that_is_on_no_machine(served):
    from ray import serve

    with pytest.raises(RuntimeError):
        serve.run(moeoff.ray.deployment("/nowhere/model.gguf", memory="150M", name="other"), name="other", route_prefix="/other")
    message = serve.status().applications["other"].deployments["other"].message
    assert "/nowhere/model.gguf is not on" in message and "deployment(labels=...)" in message
    serve.delete("other")


@pytest.mark.parametrize(
    "options, said",
    [({"num_replicas": 2, "autoscaling": {"max_replicas": 3}}, "not both"), ({"num_replicas": 0}, "at least 1"), ({"memory": "80%"}, "not a share"),
     ({"port": 8000}, "Ray Serve"), ({"args": ("--rpc", "host:1")}, "slice by slice")],
)  # fmt: skip
def test_options_that_make_no_sense(demo, options, said):
    with pytest.raises(OptionError, match=said):
        moeoff.ray.deployment(demo, **({"memory": "150M"} | options))


def test_what_makes_requests_belong_together():
    def key(**body) -> str | None:
        return affinity_key(json.dumps(body).encode())

    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    later = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert key(messages=first) == key(messages=later, max_tokens=3) != key(messages=[first[0], {"role": "user", "content": "b"}])
    assert key(messages=first[1:], system="other") != key(messages=first[1:])  # Anthropic's
    assert key(prompt="x" * 300) == key(prompt="x" * 300 + "y") != key(prompt="y" * 300)
    assert key(prompt="x", prompt_cache_key="k") == key(messages=first, prompt_cache_key="k")
    assert key(model="m") is None and affinity_key(b"no json") is None and affinity_key(b"[1]") is None and affinity_key(b"[" * 100000) is None


def test_a_replica_that_goes_moves_its_own_conversations_alone():
    replicas, conversations = [f"r{i}" for i in range(5)], [f"c{i}" for i in range(1000)]
    before = {c: max(replicas, key=lambda r: rank(c, r)) for c in conversations}
    after = {c: max(replicas[1:], key=lambda r: rank(c, r)) for c in conversations}
    assert all(before[c] == after[c] for c in conversations if before[c] != "r0")
    assert all(150 < count < 250 for count in collections.Counter(before.values()).values())


def test_a_report_of_metrics():
    text = "# TYPE x counter\nllamacpp:tokens_predicted_total 30\nllamacpp:prompt_tokens_total 10\nmoeoff_expert_hits_total 3\n"
    text += 'moeoff_expert_misses_total 1\nmoeoff_expert_read_bytes_total 8e6\nmoeoff_expert_uses_total{precision="high"} 7\nllamacpp:requests_deferred 2\n'
    report = report_of(text)
    assert (report["hit_rate"], report["mb_per_token"], report["queue"], report["tokens_predicted"]) == (0.75, 0.2, 2, 30)
    assert report_of("")["mb_per_token"] == report_of("")["hit_rate"] == 0


def test_without_ray_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['ray'] = None; import moeoff.ray"], capture_output=True, text=True)
    assert done.returncode and done.stderr.splitlines()[-1].endswith("moeoff.ray needs Ray Serve: pip install 'moeoff[ray]'")
