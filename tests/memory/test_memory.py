"""Sizes, limits, and the promise: peak memory stays below --memory, or the program
refuses with the numbers.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

import moeoff
import results
from grow_model import Growth, grow_model
from helpers.files import COMMAND, DEMO, PROSE
from helpers.servers import client_of
from helpers.waiting import wait_until, wait_until_still
from moeoff import OptionError
from moeoff.system import cgroup, memory, pressure
from moeoff.system.memory import MIB, Budget, available, cgroup_limit, parse_size, peak_rss, rss
from speed import EVERYTHING, IN_MEMORY, Bench, within

NO_CGROUP = cgroup.unavailable()
in_cgroup = pytest.mark.skipif(NO_CGROUP is not None, reason=str(NO_CGROUP))


@pytest.mark.parametrize(
    "text, size",
    [
        ("6G", 6 << 30),
        ("6GiB", 6 << 30),
        ("6GB", 6 * 10**9),
        ("700M", 700 << 20),
        ("1.5k", 1536),
        ("2000000", 2_000_000),
        (" 2 MiB ", 2 << 20),
        (4096, 4096),
        (6e9, 6_000_000_000),
        (np.int64(6e9), 6_000_000_000),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "lots", "-1G", "0", "0%", "101%", "nan%", "inf%", "x%", "1.2.3G", "5 P", "6"]
)
def test_not_a_size(text):
    with pytest.raises(OptionError):
        parse_size(text)


@pytest.mark.parametrize(
    "size, share",
    [
        (lambda: parse_size("50%"), 0.5),
        (lambda: Budget.of().process, 0.8),
        (lambda: Budget.of("50%").process, 0.5),
    ],
    ids=["size", "default", "budget"],
)
def test_share_of_available(size, share):
    """Other processes change it all the time."""
    wait_until(lambda: size() == pytest.approx(share * available(), rel=0.01), timeout=10)
    assert parse_size(f"{share:.0%}", 2000) == 2000 * share
    assert Budget.of().is_default and not Budget.of("50%").is_default


@pytest.mark.parametrize("page, expected", [(4 << 10, 32 << 10), (64 << 10, 64 << 10)])
def test_an_experts_slot_is_whole_pages_of_the_system(page, expected):
    """As `arena::add_class` makes it, whose test is test_arena.cpp's."""
    assert memory.slot_bytes(5000, 5000, 1, page=page) == expected
    assert memory.slot_bytes(1) % os.sysconf("SC_PAGESIZE") == 0


def test_a_budget_leaves_experts_what_the_rest_does_not_take():
    process, experts = Budget.of("1G"), Budget.of(None, 5 << 20)
    assert (process.left(1 << 20), process.most) == ((1 << 30) - (1 << 20), 1 << 30)
    assert experts.left(1 << 20) == 5 << 20 and experts.process is None and experts.most > 0


def test_what_there_is():
    assert 0 < rss() <= peak_rss() and available() > 0


@pytest.mark.cgroup
@in_cgroup
def test_cgroup_limit_is_seen():
    code = (
        "from moeoff.system.memory import available, cgroup_limit; print(cgroup_limit(),"
        " available())"
    )
    with cgroup.memory_cgroup(300 * MIB) as group:
        out = group.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    limit, free = map(int, out)
    assert limit == 300 * MIB
    assert 295 * MIB <= free <= 300 * MIB  # the kernel books in batches
    assert cgroup_limit() is None or cgroup_limit() > 300 * MIB


@pytest.mark.cgroup
@in_cgroup
def test_what_others_in_the_cgroup_hold_is_not_available():
    """Their files in memory, too: nothing can be taken back from either without swap."""
    other = (
        "import sys, mmap; kept = bytearray(b'x') * (60 << 20); shared = mmap.mmap(-1, 40 << 20);"
        " shared.write(b'y' * (40 << 20)); print('there', flush=True); input()"
    )
    code = "from moeoff.system.memory import available; print(available())"
    with cgroup.memory_cgroup(300 * MIB) as group:
        with subprocess.Popen(
            [sys.executable, "-c", other],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=group.enter,
        ) as holder:
            assert holder.stdout.readline() == "there\n"
            free = int(
                group.run(
                    [sys.executable, "-c", code], capture_output=True, text=True, check=True
                ).stdout
            )
            holder.communicate("\n")
    assert 180 * MIB <= free <= 202 * MIB


@pytest.mark.cgroup
@in_cgroup
def test_a_container_sees_its_own_limit(tmp_path):
    """As an engine sets it up: a namespace of cgroups, and at /sys/fs/cgroup nothing
    but its own.
    """
    v1 = os.path.isdir("/sys/fs/cgroup/memory")
    mount = (
        "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && mount -t cgroup -o"
        " memory none /sys/fs/cgroup/memory"
    )
    mount = mount if v1 else "mount -t cgroup2 none /sys/fs/cgroup"
    code = (
        "from moeoff.system.memory import cgroup_limit, parse_size; print(cgroup_limit(),"
        " parse_size('80%'))"
    )
    with cgroup.memory_cgroup(400 * MIB) as group:
        command = [
            "unshare",
            "--cgroup",
            "--mount",
            "sh",
            "-c",
            f'{mount} && cat /proc/self/cgroup >&2 && exec "$0" -c "$1"',
            sys.executable,
            code,
        ]
        done = group.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        "moeoff-" not in done.stderr.partition("memory:" if v1 else "0::")[2].partition("\n")[0]
    ), "no namespace"
    limit, share = map(int, done.stdout.split())
    assert limit == 400 * MIB and share == pytest.approx(0.8 * limit, rel=0.02)


def run_in_cgroup(
    model: str, limit: int, memory: int, n: int, stats: Path, prompt: str
) -> tuple[subprocess.CompletedProcess, dict]:
    command = [COMMAND, "run", "-m", model, "--raw", "-p", prompt, "-n", str(n), "--ignore-eos"]
    command += ["--memory", f"{memory}M", "-c", "1024", "--temp", "0", "--stats-json", str(stats)]
    with cgroup.memory_cgroup(limit * MIB) as group:
        done = group.run(command, capture_output=True, text=True, timeout=600)
    return done, json.loads(stats.read_text()) if done.returncode == 0 else {}


PROMPT = (
    "The sun had set behind the hills, and the travellers, weary of the road, began to speak of the"
    " day. " * 12
)


@pytest.mark.cgroup
@in_cgroup
@pytest.mark.parametrize("limit", [190, 165])
def test_budget_holds_small(grown, tmp_path, limit):
    memory = int(limit * 0.95)
    done, stats = run_in_cgroup(grown, limit, memory, 64, tmp_path / "stats.json", PROMPT)
    assert done.returncode == 0, done.stderr
    assert stats["gen_tokens"] >= 63 and stats["prompt_tokens"] > 200
    assert stats["peak_rss_bytes"] <= stats["budget_bytes"] == memory * MIB
    assert stats["evictions"] > 0


@pytest.mark.cgroup
@in_cgroup
def test_below_the_floor_is_refused(grown, tmp_path):
    done, _ = run_in_cgroup(grown, 400, 120, 8, tmp_path / "stats.json", PROMPT)
    assert done.returncode == 1
    assert (
        sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1
        and "Traceback" not in done.stderr
    )
    enough = int(re.search(r"give --memory (\d+)M", done.stderr)[1])
    done, stats = run_in_cgroup(grown, 400, enough, 8, tmp_path / "stats.json", PROMPT)
    assert done.returncode == 0, done.stderr
    assert stats["peak_rss_bytes"] <= enough * MIB


class Machine:
    """Memory that a process could have, in bytes, and the share of time that others
    wait for memory.
    """

    def __init__(self, monkeypatch):
        self.could_have, self.stalled = 1 << 40, 0.0
        for name, value in (
            ("available", lambda: self.could_have),
            ("Pressure.share", lambda _pressure: self.stalled),
            ("_CALM", 0.5),
            ("_GROWS", 0.01),
        ):
            monkeypatch.setattr(f"moeoff.engine.budget_follower.{name}", value)

    def leave(self, llm, share: float) -> None:
        """Other programs take so much that this share of what all but the experts may
        need remains.
        """
        self.could_have = int(share * llm.engine.plan.fixed / memory.DEFAULT_SHARE)


def cache_of(llm) -> float:
    """The share of the experts that has memory, or may have."""
    stats = llm.engine.buffer.stats()
    return max(stats.arena_committed, stats.cache_bytes) / llm.engine.plan.arena_full


QUESTION = PROMPT[:200]


def answer(llm, n: int = 24) -> str:
    llm.reset()
    return llm(QUESTION, max_tokens=n, temperature=0)["choices"][0]["text"]


def test_a_default_budget_follows_what_others_need(grown, monkeypatch):
    machine = Machine(monkeypatch)
    with moeoff.Llama(grown, n_ctx=512, n_threads=1) as llm:
        text, start = answer(llm), llm.stats()
        assert cache_of(llm) == 1 and start.budget_cuts == 0
        assert start.budget_bytes == start.budget_start_bytes
        pieces = []
        llm.reset()
        for piece in llm(QUESTION, max_tokens=24, temperature=0, stream=True):
            pieces.append(piece["choices"][0]["text"])
            if len(pieces) == 8:
                machine.leave(llm, 1.0)
                wait_until(lambda: cache_of(llm) < 0.9, timeout=5)  # between two tokens
        assert "".join(pieces) == text
        cut = llm.stats()
        assert cut.budget_cuts == 1 and cut.evictions > start.evictions
        assert cut.budget_bytes <= machine.could_have * memory.DEFAULT_SHARE + MIB
        assert cut.budget_start_bytes == start.budget_start_bytes
        before = cache_of(llm)
        machine.leave(llm, 0.85)
        wait_until(lambda: cache_of(llm) < before - 0.1, timeout=10)
        assert answer(llm) == text and llm.stats().budget_cuts == 1, "one episode"
        machine.could_have = 1 << 40
        wait_until(lambda: llm.stats().budget_bytes == start.budget_bytes)
        assert cache_of(llm) == 1 and answer(llm) == text


def test_a_default_budget_follows_within_a_batch(grown, monkeypatch):
    """A prompt's batch takes minutes where the disk is slow."""
    machine = Machine(monkeypatch)
    tokens = [10 + (7 * i * i) % 4000 for i in range(1024)]
    with moeoff.Llama(grown, n_ctx=1024, n_batch=1024, n_ubatch=1024, n_threads=1) as llm:
        before = cache_of(llm)
        with ThreadPoolExecutor() as pool:
            done = pool.submit(llm.eval, tokens)
            wait_until(lambda: llm.engine.prompt_tokens > 20)
            machine.could_have = 1
            wait_until(lambda: cache_of(llm) < before / 4)
            is_computing = not done.done()
            done.result()
        assert is_computing and llm.n_tokens == len(tokens)


def test_a_default_budget_goes_down_to_what_computes(grown, monkeypatch):
    """Memory that smaller batches have lent to experts is taken, too, and the largest
    prompt is still read.
    """
    machine = Machine(monkeypatch)
    with moeoff.Llama(grown, n_ctx=512, n_threads=1) as llm:
        text = answer(llm)
        machine.could_have = 1
        floor = llm.engine.buffer.arena_floor / llm.engine.plan.arena_full
        wait_until(lambda: cache_of(llm) <= 1.05 * floor)
        assert answer(llm) == text
        assert llm.stats().budget_bytes <= llm.engine.plan.floor
        machine.could_have = 1 << 40
        wait_until(lambda: cache_of(llm) == 1)
        assert answer(llm) == text


def test_programs_that_wait_for_memory_get_some(grown, monkeypatch):
    """Step by step while they wait, although there seems to be enough in the page
    cache.
    """
    machine = Machine(monkeypatch)
    with moeoff.Llama(grown, n_ctx=512, n_threads=1) as llm:
        machine.stalled = 0.05
        wait_until_still(lambda: cache_of(llm))
        assert cache_of(llm) == 1
        machine.stalled = 0.3
        wait_until(lambda: cache_of(llm) < 0.5)
        machine.stalled = 0.0
        wait_until(lambda: cache_of(llm) == 1)


def test_a_budget_that_was_stated_stays(grown, monkeypatch):
    machine = Machine(monkeypatch)
    with moeoff.Llama(grown, n_ctx=512, n_threads=1, memory="4G") as llm:
        machine.could_have = 1
        wait_until_still(lambda: cache_of(llm))
        assert cache_of(llm) == 1 and llm.stats().budget_cuts == 0
    with moeoff.Llama(grown, n_ctx=512, n_threads=1) as llm:
        llm.set_memory("4G")
        before = cache_of(llm)
        wait_until_still(lambda: cache_of(llm))
        assert cache_of(llm) == before


def test_a_server_says_that_its_budget_moves(grown, monkeypatch):
    machine = Machine(monkeypatch)
    with client_of(grown, n_ctx=512, n_threads=1) as client:
        server = client.server
        messages = [{"role": "user", "content": QUESTION}]
        client.settings |= {"temperature": 0, "n_predict": 24}
        text = client.ask(messages, lambda *_: None).text
        assert server.take_remarks() == []
        machine.leave(server, 1.0)
        buffers = server.engine.sizer._borrowed[0]
        assert buffers.bound == buffers.largest, "experts have all that they can use"
        wait_until(lambda: cache_of(server) < 0.9, timeout=5)
        wait_until(lambda: buffers.bound < buffers.largest)  # though nothing is asked
        assert client.ask(messages, lambda *_: None).text == text
        wait_until_still(lambda: cache_of(server), 0.5)
        (remark,) = server.take_remarks()
        assert remark.startswith("other programs need memory")
        machine.could_have = 1 << 40
        said = []
        wait_until(lambda: said.extend(server.take_remarks()) or said)
        assert (
            len(said) == 1 and said[0].startswith("memory is free again") and cache_of(server) == 1
        )


def test_pressure_is_the_time_in_which_something_is_reclaimed(tmp_path):
    waited, scanned = tmp_path / "memory.pressure", tmp_path / "memory.stat"

    def write(us: int, pages: int) -> None:
        waited.write_text(f"some avg10=0.00 avg300=0.00 total={us}\nfull avg10=0.00 total=0\n")
        scanned.write_text(f"anon 5\npgscan {pages}\npgscan_direct 7\n")

    write(10**6, 100)
    free = [0.2]
    file = pressure.Source(str(waited), str(scanned), ("pgscan",), lambda: free[0])
    nowhere = pressure.Source("/nowhere", "/nowhere", (), lambda: 0.0)
    of = pressure.Pressure([file, nowhere], window=0.0)
    started = time.monotonic()
    assert of.share() == 0
    write(10**6 + 10**5, 101)
    share = of.share()
    assert share > 0 and share * (time.monotonic() - started) >= 0.1
    write(3 * 10**6, 101)  # they wait for something else
    assert of.share() == 0
    write(4 * 10**6, 102)
    free[0] = 0.5  # there is plenty, and some cgroup has used up its own
    assert of.share() == 0
    waited.unlink()
    assert of.share() == 0
    assert pressure.Pressure().share() < 1


# takes so many MiB in so many seconds, says how long the writing took, and holds them
# until the end
COMPETITOR = """
import json, sys, time
n, seconds = int(sys.argv[1]), float(sys.argv[2])
started, busy, longest, kept = time.monotonic(), 0.0, 0.0, []
for i in range(n):
    before = time.perf_counter()
    kept.append(bytearray(b"x") * (1 << 20))
    took = time.perf_counter() - before
    busy, longest = busy + took, max(longest, took)
    time.sleep(max(started + seconds * i / n - time.monotonic(), 0))
print(json.dumps({"busy": busy, "longest": longest}), flush=True)
sys.stdin.readline()
before = time.perf_counter()
for part in kept:
    part[:: 4096] = b"y" * (len(part) // 4096)
print(time.perf_counter() - before, flush=True)
"""
LIMIT = 420  # MiB of a machine


class Competitor:
    """Another program on a machine, which takes 60 % of its memory."""

    def __init__(self, group: cgroup.Cgroup):
        command = [sys.executable, "-c", COMPETITOR, str(LIMIT * 6 // 10), "1.5"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes, preexec_fn=group.enter)
        self.took = json.loads(self._process.stdout.readline())

    def end(self) -> float:
        """Seconds that writing to all of it once more took."""
        again, _ = self._process.communicate("\n")
        assert self._process.returncode == 0, "it was killed"
        return float(again)


def says(group: cgroup.Cgroup, name: str, key: str) -> int:
    with open(f"{group.folder}/{name}") as file:
        return next(int(line.split()[1]) for line in file if line.split()[0] == key)


def killed(group: cgroup.Cgroup) -> int:
    v1 = os.path.exists(f"{group.folder}/memory.oom_control")
    return says(group, "memory.oom_control" if v1 else "memory.events", "oom_kill")


@functools.cache
def alone() -> tuple[dict, float]:
    """Return what a competitor takes on a machine that runs nothing else."""
    with cgroup.memory_cgroup(LIMIT * MIB) as group:
        competitor = Competitor(group)
        return competitor.took, competitor.end()


@contextlib.contextmanager
def served(model: str, group: cgroup.Cgroup):
    """The address of `moeoff serve` in a cgroup, and a function for its figures."""
    import httpx

    command = [COMMAND, "serve", "-m", model, "--port", "0", "-c", "1024", "-np", "1"]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--kv-disk", "0"], **pipes, preexec_fn=group.enter) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"on (http://\S+)/v1", line):
                break
        url = found[1]
        try:
            yield url, httpx.Client(base_url=url, timeout=300), lines
        finally:
            process.terminate()
            lines += process.stderr.readlines()


@pytest.mark.cgroup
@pytest.mark.perf
@in_cgroup
def test_a_program_that_takes_most_of_the_memory_beside_a_server(grown):
    """Neither is killed, the program is not slowed down, the text is the same; speed
    comes back.
    """
    body = {"prompt": PROMPT, "n_predict": 200, "temperature": 0}
    body |= {"ignore_eos": True, "cache_prompt": False}

    def metrics(http) -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    with cgroup.memory_cgroup(LIMIT * MIB) as group, served(grown, group) as (_, http, lines):

        def ask() -> tuple[str, float]:
            reply = http.post("/completion", json=body).json()
            return reply["content"], reply["timings"]["predicted_per_second"]

        text, speed = ask()
        before = metrics(http)
        with ThreadPoolExecutor() as pool:
            answers = pool.submit(lambda: [ask() for _ in range(6)])
            competitor = Competitor(group)
            assert all(reply == text for reply, _ in answers.result())
        cut = metrics(http)
        assert cut["moeoff_budget_cuts_total"] == 1
        assert cut["moeoff_budget_bytes"] < 0.45 * LIMIT * MIB
        assert cut["moeoff_expert_cache_bytes"] < 0.7 * before["moeoff_expert_cache_bytes"]
        again = competitor.end()
        assert killed(group) == 0
        whole = before["moeoff_budget_bytes"]
        wait_until(lambda: metrics(http)["moeoff_budget_bytes"] == whole, timeout=90)
        ask()
        last, back = ask()
        took, usual = alone()
        print(competitor.took, again, "alone", took, usual, "tok/s", speed, back)
        assert last == text and back > 0.8 * speed
    assert sum("other programs need memory" in line for line in lines) == 1
    assert competitor.took["busy"] < 2 * took["busy"] + 0.1
    assert competitor.took["longest"] < took["longest"] + 0.05
    assert again < 2 * usual + 0.1


@pytest.mark.cgroup
@in_cgroup
def test_a_program_that_takes_most_of_the_memory_beside_a_run(grown, tmp_path):
    stats = tmp_path / "stats.json"
    command = [COMMAND, "run", "-m", grown, "--raw", "-p", PROMPT, "-n", "600", "--ignore-eos"]
    command += ["-c", "1024", "--temp", "0", "--stats-json", str(stats)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    texts, said = [], ""
    for competes in (False, True):
        with cgroup.memory_cgroup(LIMIT * MIB) as group:
            with subprocess.Popen(command, **pipes, preexec_fn=group.enter) as process:
                text = process.stdout.read(80)  # it has begun to answer
                competitor = Competitor(group) if competes else None
                rest, errors = process.communicate()
            assert process.returncode == 0, errors.decode()
            if competitor is not None:
                competitor.end()
            assert killed(group) == 0
        texts.append(text + rest)
        said = errors.decode()
    figures = json.loads(stats.read_text())
    assert texts[0] == texts[1] and "other programs need memory" in said
    assert figures["budget_cuts"] == 1 and figures["budget_bytes"] < figures["budget_start_bytes"]


@pytest.fixture(scope="module")
def gigabytes(tmp_path_factory) -> Iterator[str]:
    """The demo model grown to 1.63 GiB, the grown model of docs/results."""
    model = tmp_path_factory.mktemp("gigabytes") / "grown.gguf"
    growth = Growth(16, 16, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q8_0)
    grow_model(DEMO, model, growth)
    yield str(model)
    model.unlink()  # pytest keeps the folders of three runs


@pytest.mark.slow
@pytest.mark.cgroup
@in_cgroup
@pytest.mark.timeout(1800)
def test_budget_holds_at_gigabytes(gigabytes, tmp_path):
    """The reference model at 1.63 GiB finishes 256 tokens in 1400, 1100 and 800 MiB,
    with --memory 5 % below.
    """
    for limit in (1400, 1100, 800):
        memory = int(limit * 0.95)
        done, stats = run_in_cgroup(gigabytes, limit, memory, 256, tmp_path / "stats.json", PROMPT)
        assert done.returncode == 0, done.stderr
        assert stats["gen_tokens"] >= 255
        assert stats["peak_rss_bytes"] <= stats["budget_bytes"] == memory * MIB
        assert stats["evictions"] > 0


LEAST = 0.6  # of the published: a twofold loss is 0.5, and disks differ from machine to machine


@pytest.mark.perf
@pytest.mark.slow
@pytest.mark.cgroup
@in_cgroup
@pytest.mark.timeout(1800)
def test_published_speed_holds(gigabytes):
    """A twofold loss of decode speed over stock's plain kernels in memory is found, against
    docs/results/data/limits-grown.json.
    """
    table = results.table_of("limits-grown", "shares")
    column = table["columns"].index("of --no-repack in memory")
    published = {row[0]: float(row[column].split()[0]) for row in table["rows"]}
    limits = [int(limit.split()[0]) for limit in published]
    in_memory = results.by_contender("limits-grown")[IN_MEMORY]
    ours, stock = (float(in_memory[c].split()[0]) for c in ("lru", "stock, plain kernels"))
    published[IN_MEMORY] = ours / stock

    bench = Bench(gigabytes, str(PROSE), 62, 192, rounds=3).answering(max(limits))
    jobs = {"stock": bench.stock(use_mmap=False, use_extra_bufts=False)}
    jobs[IN_MEMORY] = bench.job(expert_memory=EVERYTHING)
    for limit in limits:
        jobs[f"{limit} MiB"] = bench.job(limit * MIB, memory=within(limit))
    decoded = [c for c in bench.compare(jobs) if c.test.n_gen]
    assert not [c.error for c in decoded if c.error]
    shares = {c.name: round(c.ratio.median / published[c.name], 2) for c in decoded[1:]}
    assert min(shares.values()) > LEAST, shares
