"""Sizes, limits, and the promise: peak memory stays below --memory, or the program refuses with the numbers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from helpers.files import COMMAND, DEMO, ROOT
from moeoff import OptionError
from moeoff.system import cgroup, memory
from moeoff.system.memory import MIB, Budget, available, cgroup_limit, parse_size, peak_rss, rss

NO_CGROUP = cgroup.unavailable()
in_cgroup = pytest.mark.skipif(NO_CGROUP is not None, reason=str(NO_CGROUP))


@pytest.mark.parametrize(
    "text, size",
    [("6G", 6 << 30), ("6GiB", 6 << 30), ("6GB", 6 * 10**9), ("700M", 700 << 20), ("1.5k", 1536), ("2000000", 2_000_000), (" 2 MiB ", 2 << 20), (4096, 4096)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "lots", "-1G", "0", "0%", "101%", "nan%", "inf%", "x%", "1.2.3G", "5 P", "6"])
def test_not_a_size(text):
    with pytest.raises(OptionError):
        parse_size(text)


def test_share_of_available(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 3000)  # what there is in truth others change all the time
    assert parse_size("50%") == 1500 and parse_size("50%", 2000) == 1000
    assert Budget.of() == Budget(2400, is_default=True) and Budget.of("50%") == Budget(1500)


@pytest.mark.parametrize("page, expected", [(4 << 10, 32 << 10), (64 << 10, 64 << 10)])
def test_an_experts_slot_is_whole_pages_of_the_system(monkeypatch, page, expected):
    """As `arena::add_class` makes it, whose test is test_arena.cpp's."""
    monkeypatch.setattr(memory, "_SYSTEM_PAGE", page)
    assert memory.slot_bytes(5000, 5000, 1) == expected


def test_a_budget_leaves_experts_what_the_rest_does_not_take():
    process, experts = Budget.of("1G"), Budget.of(None, 5 << 20)
    assert (process.left(1 << 20), process.most) == ((1 << 30) - (1 << 20), 1 << 30)
    assert experts.left(1 << 20) == 5 << 20 and experts.process is None and experts.most > 0


def test_what_there_is():
    assert 0 < rss() <= peak_rss() and available() > 0


def test_a_system_that_does_not_say_needs_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    with pytest.raises(OptionError, match="does not say how much memory is free"):
        parse_size("50%")


@pytest.mark.cgroup
@in_cgroup
def test_cgroup_limit_is_seen():
    code = "from moeoff.system.memory import available, cgroup_limit; print(cgroup_limit(), available())"
    with cgroup.memory_cgroup(300 * MIB) as group:
        out = group.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    limit, free = map(int, out)
    assert limit == 300 * MIB
    assert 295 * MIB <= free <= 300 * MIB  # the kernel books in batches
    assert cgroup_limit() is None or cgroup_limit() > 300 * MIB


@pytest.mark.cgroup
@in_cgroup
def test_what_others_in_the_cgroup_hold_is_not_available():
    """Their files in memory, too: nothing can be taken back from either without swap."""
    other = "import sys, mmap; kept = bytearray(b'x') * (60 << 20); shared = mmap.mmap(-1, 40 << 20); shared.write(b'y' * (40 << 20)); print('there', flush=True); input()"
    code = "from moeoff.system.memory import available; print(available())"
    with cgroup.memory_cgroup(300 * MIB) as group:
        with subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter) as holder:
            assert holder.stdout.readline() == "there\n"
            free = int(group.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
            holder.communicate("\n")
    assert 180 * MIB <= free <= 202 * MIB


@pytest.mark.cgroup
@in_cgroup
def test_a_container_sees_its_own_limit(tmp_path):
    """As an engine sets it up: a namespace of cgroups, and at /sys/fs/cgroup nothing but its own."""
    v1 = os.path.isdir("/sys/fs/cgroup/memory")
    mount = "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && mount -t cgroup -o memory none /sys/fs/cgroup/memory"
    mount = mount if v1 else "mount -t cgroup2 none /sys/fs/cgroup"
    code = "from moeoff.system.memory import cgroup_limit, parse_size; print(cgroup_limit(), parse_size('80%'))"
    with cgroup.memory_cgroup(400 * MIB) as group:
        command = ["unshare", "--cgroup", "--mount", "sh", "-c", f'{mount} && cat /proc/self/cgroup >&2 && exec "$0" -c "$1"', sys.executable, code]
        done = group.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "moeoff-" not in done.stderr.partition("memory:" if v1 else "0::")[2].partition("\n")[0], "no namespace"
    limit, share = map(int, done.stdout.split())
    assert limit == 400 * MIB and share == pytest.approx(0.8 * limit, rel=0.02)


def run_in_cgroup(model: str, limit: int, memory: int, n: int, stats: Path, prompt: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [COMMAND, "run", "-m", model, "--raw", "-p", prompt, "-n", str(n), "--ignore-eos"]
    command += ["--memory", f"{memory}M", "-c", "1024", "--temp", "0", "--stats-json", str(stats)]
    with cgroup.memory_cgroup(limit * MIB) as group:
        done = group.run(command, capture_output=True, text=True, timeout=600)
    return done, json.loads(stats.read_text()) if done.returncode == 0 else {}


PROMPT = "The sun had set behind the hills, and the travellers, weary of the road, began to speak of the day. " * 12


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
    assert sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    enough = int(re.search(r"give --memory (\d+)M", done.stderr)[1])
    done, stats = run_in_cgroup(grown, 400, enough, 8, tmp_path / "stats.json", PROMPT)
    assert done.returncode == 0, done.stderr
    assert stats["peak_rss_bytes"] <= enough * MIB


@pytest.mark.slow
@pytest.mark.cgroup
@in_cgroup
@pytest.mark.timeout(1800)
def test_budget_holds_at_gigabytes(tmp_path):
    """The reference model at 1.63 GiB finishes 256 tokens in 1400, 1100 and 800 MiB, with --memory 5 % below."""
    model = tmp_path / "grown.gguf"
    grow = [sys.executable, str(ROOT / "scripts" / "models" / "grow_model.py"), str(DEMO), "-o", str(model), "--width", "16", "--ff", "16"]
    subprocess.run(grow, check=True, capture_output=True)
    for limit in (1400, 1100, 800):
        memory = int(limit * 0.95)
        done, stats = run_in_cgroup(str(model), limit, memory, 256, tmp_path / "stats.json", PROMPT)
        assert done.returncode == 0, done.stderr
        assert stats["gen_tokens"] >= 255
        assert stats["peak_rss_bytes"] <= stats["budget_bytes"] == memory * MIB
        assert stats["evictions"] > 0
