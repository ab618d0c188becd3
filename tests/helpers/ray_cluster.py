"""A Ray cluster of several nodes on this machine, each in a memory cgroup of its own,
with a Serve application and its address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve

from helpers.servers import free_port
from helpers.waiting import wait_until
from moeoff.system.cgroup import memory_cgroup

_MARK = "MOEOFF_RAY_CLUSTER"
# bytes of Ray's object store, about the least that it takes; requests do not go through
# it
_STORE = 80_000_000
_SECONDS = 180.0  # for anything to come up, on a machine that is busy


@dataclass(frozen=True)
class Replica:
    """node: number of the node. pid, server_pid: of the actor, and of the process that
    serves.
    """

    node: int
    pid: int
    server_pid: int


@dataclass(frozen=True)
class Cluster:
    """url: where Serve listens. address: Ray's. cgroups: folders of the nodes', or
    None. mark: in the environment of a node's processes, with its number. add: starts
    another node with these labels.
    """

    url: str
    address: str
    cgroups: list[str | None]
    mark: str
    add: Callable[[Mapping[str, str]], None]

    def kill(self, node: int) -> None:
        """All of its processes at once, as if its machine had lost its power."""
        wait_until(lambda: not _killed(_marked(f"{self.mark}-{node}\0")))

    def running(self) -> list[Replica]:
        """Those that have a server now, by node."""
        out = []
        for node in range(len(self.cgroups)):
            for pid in _marked(f"{self.mark}-{node}\0"):
                with contextlib.suppress(OSError):
                    if b"moeoff.server.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        out.append(
                            Replica(
                                node,
                                int(
                                    Path(f"/proc/{pid}/stat")
                                    .read_text()
                                    .rpartition(")")[2]
                                    .split()[1]
                                ),
                                pid,
                            )
                        )
        return out

    def replicas(self, n: int) -> list[Replica]:
        """By node, as soon as n of them have a server."""
        out: list[Replica] = []

        def ready() -> bool:
            out[:] = self.running()
            return len(out) == n

        wait_until(ready, _SECONDS)
        return out


@contextlib.contextmanager
def cluster(labels: list[Mapping[str, str]], memory: int, limit: int | None) -> Iterator[Cluster]:
    """A node for each of these labels; this process is connected to it, and Serve runs
    on the first.

    Args:
        memory: bytes that a node tells Ray it has.
        limit: bytes of each node's cgroup; None: no cgroup.
    """
    # a short path: it goes into names of sockets
    mark, folder, port = uuid.uuid4().hex, tempfile.mkdtemp(prefix="ray-"), free_port()
    environment = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "120",
    }
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folders: list[str | None] = []
        groups = stack.enter_context(contextlib.ExitStack())
        stack.callback(lambda: _kill(mark, [f"{group}/cgroup.procs" for group in folders if group]))

        def add(label: Mapping[str, str]) -> None:
            number, group = (
                len(folders),
                groups.enter_context(memory_cgroup(limit)) if limit else None,
            )
            folders.append(group and group.folder)
            where = (
                [f"--address=127.0.0.1:{port}"]
                if number
                else [
                    "--head",
                    f"--port={port}",
                    f"--temp-dir={folder}",
                    "--include-dashboard=false",
                ]
            )
            command = [
                os.path.join(os.path.dirname(sys.executable), "ray"),
                "start",
                "--block",
                *where,
                "--num-cpus=2",
                f"--memory={memory}",
            ]
            command += [
                f"--object-store-memory={_STORE}",
                "--labels=" + ",".join(f"{k}={v}" for k, v in label.items()),
            ]
            with open(os.path.join(folder, f"node-{number}.log"), "wb") as log:
                process = subprocess.Popen(command, env=environment | {_MARK: f"{mark}-{number}"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           start_new_session=True, preexec_fn=group and group.enter)  # fmt: skip
            stack.callback(_end, process)
            wait_until(lambda: _started(process, log.name), _SECONDS)

        for label in labels:
            add(label)
        ray.init(f"127.0.0.1:{port}", log_to_driver=False, logging_level="warning")
        stack.callback(ray.shutdown)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == len(labels), _SECONDS)
        http = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": http})
        stack.callback(serve.shutdown)
        yield Cluster(f"http://127.0.0.1:{http}", f"127.0.0.1:{port}", folders, mark, add)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(mark: str, groups: list[str]) -> None:
    """Whatever is left: of the cgroups, or with the mark in the environment, which
    Ray's agents write their names over.
    """

    wait_until(
        lambda: (
            not _killed([*_marked(mark), *(int(pid) for group in groups for pid in open(group))])
        )
    )


def _killed(pids: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _marked(mark: str) -> list[int]:
    out = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if f"{_MARK}={mark}".encode() in file.read():
                out.append(int(name))
    return out


def _started(process: subprocess.Popen[bytes], log: str) -> bool:
    text = Path(log).read_text()
    if process.poll() is not None:
        raise RuntimeError(f"ray start has ended: {text}")
    return "Ray runtime started" in text
