"""moeoff.ray on a Ray cluster of two nodes, each in a memory cgroup where one can be
made.
"""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest

from helpers.processes import status_bytes
from helpers.servers import single_use
from helpers.waiting import wait_until
from moeoff.errors import OptionError
from moeoff.system.cgroup import unavailable

# Ray is of the extra nightly, and imported where it is used: `make test` has none
pytestmark = pytest.mark.slow
GIB = 1 << 30
KEY = "a-key"


@pytest.fixture(scope="module")
def served(demo):
    """Two nodes, one replica on each."""
    from ray import serve

    import moeoff.ray
    from helpers.ray_cluster import cluster

    limit = 3 * GIB if unavailable() is None else None
    with cluster(
        [{"holds": "demo", "disk": "a"}, {"holds": "demo", "disk": "b"}], 2 * GIB, limit
    ) as nodes:
        application = moeoff.ray.deployment(
            demo,
            memory="200M",
            num_replicas=2,
            labels={"holds": "demo"},
            api_key=KEY,
            n_threads=1,
            kv_disk=0,
        )
        serve.run(application)
        yield nodes


@pytest.fixture
def client(served):
    return openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=300,
        http_client=single_use(),
    )


def chat(text: str, n: int = 48, **options) -> dict:
    body = {
        "model": "x",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n,
        "temperature": 0,
    }
    return body | {"extra_body": {"ignore_eos": True}} | options


def test_a_replica_on_each_node_within_its_memory(served):
    replicas = served.replicas(2)
    assert [replica.node for replica in replicas] == [0, 1]
    for replica in replicas:
        assert status_bytes("VmHWM", replica.server_pid) <= 200 << 20
        if folder := served.cgroups[replica.node]:
            with open(f"{folder}/cgroup.procs") as file:
                assert {replica.pid, replica.server_pid} <= set(map(int, file))


def test_a_conversation_stays_with_its_replica_and_its_prefix(client):
    for number in range(4):
        messages, own = (
            [
                {"role": "system", "content": "You count."},
                {"role": "user", "content": f"Count to {number}, please"},
            ],
            set(),
        )
        for turn in range(3):
            raw = client.chat.completions.with_raw_response.create(
                **chat("", 12, messages=messages)
            )
            answer = raw.parse()
            own.add(raw.headers["x-moeoff-replica"])
            if turn:
                assert answer.usage.prompt_tokens_details.cached_tokens > 10
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "Go on"},
            ]
        assert len(own) == 1


def test_other_routes_and_the_key(served, client):
    assert client.models.list().data[0].id == "demo-moe-q8_0"
    assert (
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}, timeout=300).status_code
        == 401
    )
    assert httpx.get(f"{served.url}/health", timeout=300).json() == {"status": "ok"}


def test_what_makes_requests_belong_together(served):
    """Else sixteen requests get to both replicas."""

    def replicas(header: str | None = None, **body) -> set[str]:
        headers = {"Authorization": f"Bearer {KEY}"} | ({"x-session-id": header} if header else {})
        path = "chat/completions" if "messages" in body else "completions"
        names = set()
        for n in range(16):
            sent = json.loads(
                json.dumps({"model": "x", "max_tokens": 1} | body).replace("NUMBER", str(n))
            )
            reply = httpx.post(f"{served.url}/v1/{path}", json=sent, headers=headers, timeout=300)
            names.add(reply.raise_for_status().headers["x-moeoff-replica"])
        return names

    differ = [{"role": "system", "content": "Count"}, {"role": "user", "content": "NUMBER"}]
    same = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "NUMBER"},
        {"role": "user", "content": "NUMBER"},
    ]
    assert len(replicas(messages=differ)) == 2 and len(replicas(messages=same)) == 1
    assert len(replicas(prompt="NUMBER" + "word " * 60)) == 2
    assert len(replicas(prompt="word " * 60 + "NUMBER")) == 1
    assert len(replicas(messages=differ, prompt_cache_key="mine")) == 1
    assert len(replicas("mine", messages=differ)) == 1


def test_metrics_of_the_servers_are_rays(served, client):
    """Where Ray has those of its own."""
    import ray

    client.chat.completions.create(**chat("Why?"))
    ports = [node["MetricsExportPort"] for node in ray.nodes()]

    def texts() -> str:
        return "".join(
            httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=300).text for port in ports
        )

    wait_until(
        lambda: (
            len(
                set(
                    re.findall(
                        r'^ray_moeoff_expert_misses_total\{.*?replica="(\w+)"',
                        texts(),
                        re.MULTILINE,
                    )
                )
            )
            == 2
        )
    )


@pytest.mark.parametrize("victim", ["pid", "server_pid"])
def test_sixteen_chats_and_a_replica_that_is_killed(served, client, victim):
    """Streams that had begun there end with an error that clients understand; every
    other chat is answered, and another replica comes.
    """
    dead, other = served.replicas(2)
    begun, ends = threading.Barrier(17, timeout=300), {}

    def stream(number: int) -> str:
        with client.chat.completions.create(
            **chat(f"{number}: tell me a story", 400), stream=True
        ) as chunks:
            next(iter(chunks))
            begun.wait()
            reasons = [chunk.choices[0].finish_reason for chunk in chunks]
            return "whole" if reasons and reasons[-1] else "cut off without a word"

    def whole(number: int) -> str:
        begun.wait()
        return (
            "whole"
            if client.chat.completions.create(
                **chat(f"{number}: tell me a story", 200)
            ).usage.completion_tokens
            == 200
            else "short"
        )

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
    os.kill(getattr(dead, victim), signal.SIGKILL)
    for thread in threads:
        thread.join(300)
    counts = collections.Counter(ends.values())
    assert len(ends) == 16 and set(counts) <= {
        "whole",
        "error: the replica that was answering has died: ask again",
    }, counts
    assert all(ends[number] == "whole" for number in range(4, 16)), (
        "nothing of these had been sent: they can be asked again"
    )
    wait_until(lambda: dead not in served.replicas(2))
    assert [replica.node for replica in served.replicas(2)] == [dead.node, other.node]
    assert client.chat.completions.create(**chat("Still there?")).usage.completion_tokens == 48


def test_a_replica_that_hangs_is_replaced(served, client):
    """A stopped server would outlive its actor: it is ended, and gives its memory back."""
    hung, other = served.replicas(2)
    os.kill(hung.server_pid, signal.SIGSTOP)
    wait_until(lambda: not os.path.exists(f"/proc/{hung.server_pid}"))
    assert other in served.replicas(2) and hung not in served.replicas(2)
    for number in range(4):
        assert (
            client.chat.completions.create(
                **chat(f"{number}: still there?")
            ).usage.completion_tokens
            == 48
        )


def test_a_model_that_is_on_no_machine(served):
    from ray import serve

    import moeoff.ray

    with pytest.raises(RuntimeError):
        serve.run(
            moeoff.ray.deployment("/nowhere/model.gguf", memory="200M", name="other"),
            name="other",
            route_prefix="/other",
        )
    message = serve.status().applications["other"].deployments["other"].message
    assert "/nowhere/model.gguf is not on" in message and "deployment(labels=...)" in message
    serve.delete("other")


@pytest.mark.parametrize(
    "options, text",
    [({"memory": "80%"}, "got a share of an unknown machine"), ({"port": 8000}, "Ray Serve")],
)
def test_options_that_make_no_sense(demo, options, text):
    import moeoff.ray

    with pytest.raises(OptionError, match=text):
        moeoff.ray.deployment(demo, **({"memory": "200M"} | options))


def test_more_replicas_than_machines_are_refused(demo, monkeypatch):
    """In the place of a deployment that is DEPLOYING without an end."""
    import moeoff.ray

    def node(alive: bool = True, gib: int = 4, cores: float = 2.0, **labels: str) -> dict:
        return {"Alive": alive, "Resources": {"memory": gib * GIB, "CPU": cores}, "Labels": labels}

    nodes = [node(model="a", gib=5), node(model="b"), node(gib=1, model="a")]
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes)
    monkeypatch.setattr(moeoff.ray, "ray", ray)
    two = {"ray_options": {"max_replicas_per_node": 2}}
    for options in ({"num_replicas": 2}, {"num_replicas": 3, "labels": None}, {"num_replicas": 1, "memory": "8G"}, {"memory": "8G"},
                    {"num_replicas": 3, "ray_options": {"max_replicas_per_node": 9}}, {"num_replicas": 2, "memory": "3G", **two},
                    {"num_replicas": 2, "ray_options": {"max_replicas_per_node": 2, "ray_actor_options": {"num_cpus": 2}}}):  # fmt: skip
        with pytest.raises(
            OptionError, match=r"replicas of .*, at most \d on a machine, and Ray has 3 machines"
        ):
            moeoff.ray.deployment(demo, **({"memory": "2G", "labels": {"model": "a"}} | options))
    nodes.append(node(alive=False, model="a"))  # another may come for it
    moeoff.ray.deployment(demo, memory="2G", labels={"model": "a"}, num_replicas=2)
    nodes.pop()
    for options in (
        {"num_replicas": 1},
        {"num_replicas": 2} | two,
        {"ray_options": {"autoscaling_config": {"max_replicas": 9}}},
    ):
        moeoff.ray.deployment(demo, memory="2G", labels={"model": "a"}, **options)


def test_without_ray_it_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['ray'] = None; import moeoff.ray"],
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert done.stderr.splitlines()[-1].endswith(
        "moeoff.ray needs Ray Serve: pip install 'moeoff[ray]'"
    )
