"""A Ray cluster of several nodes on this machine, each in a memory cgroup of its own, with a Serve application and its address."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import ray
from ray import serve

from cgroup import disk_cgroup, memory_cgroup

_MARK = "MOEOFF_RAY_CLUSTER"
_NUMBER = "number"  # label of a node
_STORE = 80_000_000  # bytes of Ray's object store, about the least that it takes; requests do not go through it
_SECONDS = 90.0  # for anything to come up


@dataclass(frozen=True)
class Node:
    """node_id: Ray's. cgroup: its folder, or None."""

    node_id: str
    cgroup: str | None


@dataclass(frozen=True)
class Cluster:
    """url: where Serve listens."""

    nodes: list[Node]
    url: str

    def reports(self, n: int, key: str = "") -> list[dict]:
        """What replicas say of themselves, as soon as n of them run. key: the application's API key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return wait_for(lambda: len(found := httpx.get(f"{self.url}/replicas", headers=headers, timeout=30).raise_for_status().json()) == n and found)


@contextlib.contextmanager
def cluster(labels: list[Mapping[str, str]], memory: int, limit: int | None, disk: tuple[str, int] | None = None) -> Iterator[Cluster]:
    """A node for each of these labels; this process is connected to it, and Serve runs on the first.

    Args:
        memory: bytes that a node tells Ray it has.
        limit: bytes of each node's cgroup; None: no cgroup.
        disk: a file, and the bytes per second that each node may read from the disk that holds it.
    """
    mark, folder, port = uuid.uuid4().hex, tempfile.mkdtemp(prefix="ray-"), _free_port()  # a short path: it goes into names of sockets
    environment = os.environ | {_MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        groups = [stack.enter_context(memory_cgroup(limit)) if limit else None for _ in labels]
        disks = [stack.enter_context(disk_cgroup(*disk)) if disk else None for _ in labels]
        stack.callback(_kill, mark, [f"{group.folder}/cgroup.procs" for group in (*groups, *disks) if group])
        for number, (label, group) in enumerate(zip(labels, groups, strict=True)):
            inside = [cgroup for cgroup in (group, disks[number]) if cgroup]
            where = [f"--address=127.0.0.1:{port}"] if number else ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
            command = [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--block", *where, "--num-cpus=2", f"--memory={memory}"]
            command += [f"--object-store-memory={_STORE}", "--labels=" + ",".join(f"{k}={v}" for k, v in (dict(label) | {_NUMBER: str(number)}).items())]
            with open(os.path.join(folder, f"node-{number}.log"), "wb") as log:
                process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                           preexec_fn=lambda inside=inside: [cgroup.enter() for cgroup in inside])  # fmt: skip
            stack.callback(_end, process)
            wait_for(lambda process=process, path=log.name: _started(process, path))
        ray.init(f"127.0.0.1:{port}", log_to_driver=False, logging_level="warning")
        stack.callback(ray.shutdown)
        alive = wait_for(lambda: len(found := {n["Labels"][_NUMBER]: n["NodeID"] for n in ray.nodes() if n["Alive"]}) == len(labels) and found)
        nodes = [Node(alive[str(number)], group.folder if group else None) for number, group in enumerate(groups)]
        http = _free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http})
        stack.callback(serve.shutdown)
        yield Cluster(nodes, f"http://127.0.0.1:{http}")


def wait_for(found, seconds: float = _SECONDS):
    """The first result that is true; a connection that is refused counts as none.

    Raises:
        TimeoutError: none came.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.NetworkError, httpx.TimeoutException):
            if result := found():
                return result
        time.sleep(0.1)
    raise TimeoutError(f"not so after {seconds:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(mark: str, groups: list[str]) -> None:
    """Whatever is left: of the cgroups, or with the mark in the environment, which Ray's agents write their names over."""
    end = time.monotonic() + 10
    while (left := [*_marked(mark), *(int(pid) for group in groups for pid in open(group))]) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    out = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if f"{_MARK}={mark}".encode() in file.read():
                out.append(int(name))
    return out


def _started(process: subprocess.Popen[bytes], log: str) -> bool:
    said = Path(log).read_text()
    if process.poll() is not None:
        raise RuntimeError(f"ray start has ended: {said}")
    return "Ray runtime started" in said


def _free_port() -> int:
    """Above those that Ray gives its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
