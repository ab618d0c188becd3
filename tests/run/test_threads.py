"""Compute threads and cores: who is bound when, by what may be seen in /proc/self/task."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from helpers.files import DEMO
from helpers.waiting import wait_until
from moeoff.llamacpp import threads
from moeoff.llamacpp.threads import CoreClaims, one_each, runs, why_not
from moeoff.system.cgroup import Cgroup, controller, make_folder, set_value

CORES = sorted(os.sched_getaffinity(0))[:2]
pytestmark = pytest.mark.cores
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core")

# Decodes on two cores, and answers each line of its standard input: "decode" with the
# cores of the model's thread and of all others while it computes, or "none" if no mask
# was asked for, "look" with those at the moment, "cores A B" by having no others,
# "hold" by computing until the next line comes, "cancel" by cancelling a decode,
# "close" by closing the model.
CHILD = """
import contextlib, json, os, sys
import moeoff
from moeoff.llamacpp import threads

def cores():
    cores_of = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/status") as file:  # it may end meanwhile
            cores_of[int(task)] = next(line.split()[1] for line in file if line.startswith("Cpus_allowed_list"))
    main = cores_of[os.getpid()]
    return cores_of.pop(llm.lock.thread.native_id, main), sorted(cores_of.values())

def say(what):
    print(json.dumps(what), flush=True)

computing, then = [], []
detach = threads.detach_threadpool

def ending(ctx):
    computing.append(cores())
    while then:
        then.pop()()
    detach(ctx)

threads.detach_threadpool = ending
os.sched_setaffinity(0, json.loads(sys.argv[2]))
llm = moeoff.Llama(sys.argv[1], expert_memory="3M", n_ctx=64, n_threads=int(sys.argv[3]))
llm.set_gate_callback(lambda event: None)
tokens = llm.tokenize(b"How many apples has he?")

def decode():
    computing.clear()
    llm.reset()
    llm.eval(tokens)

say("ready")
for line in sys.stdin:
    command, *rest = line.split()
    if command == "decode":
        decode()
        say(computing[-1] if computing else "none")
    elif command == "hold":
        then.append(lambda: (say("holding"), sys.stdin.readline()))
        decode()
        say("done")
    elif command == "cancel":
        llm.set_gate_callback(lambda event: llm.cancel())
        try:
            while True:
                decode()
        except moeoff.Cancelled:
            say("cancelled")
        llm.set_gate_callback(lambda event: None)
    elif command == "cores":
        os.sched_setaffinity(0, map(int, rest))
        say("moved")
    elif command == "close":
        llm.close()
        say("closed")
    elif command == "look":
        say(cores())
"""


class Child:
    """A process on two cores; `env` is added to an environment that leaves OpenMP to
    the program.
    """

    def __init__(self, lock: str, n_threads: int = 2, cores=CORES, preexec_fn=None, **env: str):
        code = CHILD.replace(
            "from moeoff.llamacpp import threads",
            "from moeoff.llamacpp import threads\nthreads.machine_wide_file = lambda name:"
            f" {lock!r}",
            1,
        )
        clean = {name: value for name, value in os.environ.items() if name not in threads.USERS_OWN}
        command = [sys.executable, "-c", code, str(DEMO), json.dumps(list(cores)), str(n_threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=clean | env, preexec_fn=preexec_fn, **pipes)
        assert self.answer() == "ready"

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, command: str):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.answer()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_exc) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def lock(tmp_path) -> str:
    return str(tmp_path / "cores.lock")


def listed(*cores: int) -> str:
    """As /proc writes it."""
    return ",".join(
        str(first) if n == 1 else f"{first}-{first + n - 1}" for first, n in runs(cores)
    )


BOTH = listed(*CORES)


@pytest.mark.parametrize(
    "n_threads, cores, bound",
    [
        (2, {0, 1}, True),
        (2, {5, 3}, True),
        (16, range(16), True),
        (1, {0}, False),  # no barrier
        (1, {0, 1}, False),
        (8, range(16), False),  # the kernel has cores to spare, and knows which are halves of one
        (4, {0, 1}, False),  # they share cores anyway
        (2, {0, threads.MAX_CORES}, False),  # no room in llama.cpp's mask
    ],
)
def test_one_thread_for_each_core(n_threads, cores, bound):
    assert one_each(n_threads, cores) is bound


@pytest.mark.parametrize(
    "cores, expected",
    [([], []), ([3], [(3, 1)]), (range(4), [(0, 4)]), ([7, 1, 2, 5, 6], [(1, 2), (5, 3)])],
)
def test_runs(cores, expected):
    assert runs(cores) == expected


def test_the_users_word():
    assert why_not({}) is None
    assert all(name in why_not({name: "false"}) for name in threads.USERS_OWN)
    assert "OpenMP" in why_not({}, "CPU : AVX = 1 | REPACK = 1 | ")


def test_claims(lock):
    old = os.umask(0o077)
    try:
        first, second = CoreClaims(lock), CoreClaims(lock)
    finally:
        os.umask(old)
    assert os.stat(lock).st_mode & 0o777 == 0o666  # other users' processes have the same cores
    assert first.claim([(0, 2), (4, 1)])
    assert not second.claim([(2, 2), (4, 4)])
    assert first.claim([(2, 2)])  # a claim that failed holds nothing
    first.release()
    assert second.claim([(0, 8)])
    assert not first.claim([(7, 1)])
    second.close()
    assert first.claim([(7, 1)])
    assert not second.claim([(20, 1)])
    first.close()


def test_no_file_no_claim(tmp_path):
    assert not CoreClaims(None).claim([(0, 1)])
    assert not CoreClaims(str(tmp_path)).claim([(0, 1)])
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert not CoreClaims(str(tmp_path / "link")).claim([(0, 1)])
    assert not (tmp_path / "elsewhere").exists()


@two_cores
def test_only_compute_threads_and_only_while_they_compute(lock):
    with Child(lock) as child:
        caller, others = child.ask("decode")
        assert caller == str(CORES[0]) and others.count(str(CORES[1])) == 1
        # the main thread, four I/O threads, and the one that delivers gate events
        assert others.count(BOTH) == len(others) - 1 >= 6
        caller, others = child.ask("look")
        assert caller == BOTH and others.count(BOTH) == len(others) - 1
        assert child.ask("cancel") == "cancelled" and child.ask("look")[0] == BOTH
        assert child.ask("close") == "closed"
        # OpenMP's thread, which was bound, ends; it is listed for a moment still
        wait_until(lambda: set(child.ask("look")[1]) <= {BOTH})
        assert child.ask("look")[0] == BOTH


@two_cores
@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES"])
def test_nothing_is_bound_where_the_user_decides(lock, name):
    with Child(
        lock,
        **{name: {"OMP_PROC_BIND": "false", "OMP_PLACES": f"{{{CORES[1]}}},{{{CORES[0]}}}"}[name]},
    ) as child:
        assert child.ask("decode") == "none"
        assert not os.path.exists(lock)


@two_cores
def test_nothing_is_bound_with_other_numbers_of_threads(lock):
    for n_threads in (1, 3):
        with Child(lock, n_threads) as child:
            assert child.ask("decode") == "none" and set(child.ask("look")[1]) == {BOTH}


@two_cores
def test_no_two_processes_on_the_same_cores(lock):
    with Child(lock) as first, Child(lock) as second:
        assert second.ask("decode")[0] == str(CORES[0])
        assert first.ask("hold") == "holding"
        caller, others = second.ask("decode")
        assert caller == BOTH and set(others) == {BOTH}, "both are bound"
        assert first.ask("go") == "done"
        assert second.ask("decode")[0] == str(CORES[0]), (
            "the first computes nothing and keeps the cores"
        )
        assert first.ask("hold") == "holding"
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        assert second.ask("decode")[0] == str(CORES[0]), (
            "the first has been killed and keeps the cores"
        )


@two_cores
def test_cores_that_change(lock):
    """As `taskset` changes them: what follows is on the new ones, and bound if there
    are as many as threads.
    """
    one = CORES[1]
    with Child(lock) as child:
        assert child.ask("decode")[0] == str(CORES[0])
        assert child.ask(f"cores {one}") == "moved"
        caller, others = child.ask("decode")
        assert caller == str(one) and str(CORES[0]) not in others
        assert child.ask("look")[0] == str(one), "a thread that the user restricts stays so"
        assert child.ask(f"cores {CORES[0]} {one}") == "moved"
        caller, others = child.ask("decode")
        assert caller == str(CORES[0]) and str(one) in others
        assert child.ask("look")[0] == BOTH


@contextlib.contextmanager
def cpuset():
    """A function that gives a cgroup its cores, and one with which a process enters it.
    Raises OSError without rights or controller.
    """
    parent, _ = controller("cpuset", "cpuset")
    with make_folder(parent) as folder:
        set_value(folder, "cpuset.cpus", BOTH)
        set_value(folder, "cpuset.mems", "0")
        yield lambda cores: set_value(folder, "cpuset.cpus", cores), Cgroup(folder).enter


def _no_cpuset() -> str | None:
    try:
        with cpuset():
            return None
    except OSError as error:
        return f"no cpuset can be made here: {error}"


@two_cores
@pytest.mark.cgroup
@pytest.mark.skipif((why := _no_cpuset()) is not None, reason=str(why))
def test_a_cpuset_that_changes(lock):
    """A container's is left by no thread, and one that grows takes all along: nothing
    is left behind that was bound.
    """
    one = CORES[1]
    with (
        cpuset() as (set_cores, enter),
        Child(lock, cores=os.sched_getaffinity(0), preexec_fn=enter) as child,
    ):
        assert child.ask("decode")[0] == str(CORES[0])
        set_cores(str(one))
        caller, others = child.ask("decode")
        assert {caller, *others} == {str(one)}
        set_cores(BOTH)
        caller, others = child.ask("decode")
        assert caller == str(CORES[0])
        assert others.count(str(one)) == 1
        assert others.count(BOTH) == len(others) - 1
        assert child.ask("look")[0] == BOTH
