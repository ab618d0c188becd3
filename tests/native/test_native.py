"""The native parts one by one: each TEST of tests/native/test_*.cpp under the address
sanitizer, the thread safety analysis, and what is made from moeoff.h.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.files import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "build"))
import make_abi
import micro

CORE = ROOT / "llamacpp_patches" / "src" / "core"
FILES = sorted((ROOT / "tests" / "native").glob("test_*.cpp"))
# stands before libc and operator new itself: a program of its own
OWN_NEW = [ROOT / "tests" / "native" / "test_faults.cpp"]
# what no namespace can hold, too
API, MAIN = (ROOT / "tests" / "native" / f"test_{name}.cpp" for name in ("api", "main"))
NAMES = {
    name: file for file in FILES for name in re.findall(r"^TEST\((\w+)\)", file.read_text(), re.M)
}
FLAGS = (
    "-std=c++17 -O0 -g1 -Wall -Wextra -Werror -fsanitize=address,undefined"
    " -fno-sanitize-recover=all -pthread".split()
)
ANALYSIS = (
    "-std=c++17 -fsyntax-only -Wall -Wextra -Wthread-safety -Wthread-safety-beta -Werror".split()
)

pytestmark = pytest.mark.cores  # to compile on
with_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
with_clang = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="no clang++ on this machine"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[Path]:
    """The unit tests, and those that have a program of their own."""
    folder = tmp_path_factory.mktemp("native")
    together = [file for file in FILES if file not in (*OWN_NEW, API, MAIN)]
    includes = dict.fromkeys(
        line
        for file in (*together, API)
        for line in re.findall("^#include .*", file.read_text(), re.M)
    )
    # most of the time goes to headers
    sources = {
        "core": [f'#include "{file}"' for file in sorted(CORE.glob("*.cpp"))],
        "units": [
            *includes,
            *(f'namespace {file.stem} {{\n#include "{file}"\n}}' for file in together),
            f'#include "{API}"',
        ],
        **{file.stem: [f'#include "{file}"'] for file in (*OWN_NEW, MAIN)},
    }

    def compile(name: str) -> Path:
        source = folder / f"{name}.cpp"
        source.write_text("\n".join(sources[name]) + "\n")
        subprocess.run(
            [
                "g++",
                *FLAGS,
                f"-I{CORE}",
                f"-I{FILES[0].parent}",
                "-c",
                source,
                "-o",
                source.with_suffix(".o"),
            ],
            check=True,
        )
        return source.with_suffix(".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = dict(zip(sources, pool.map(compile, sources)))
    faults = [made.pop(file.stem) for file in OWN_NEW]
    for name, objects in (
        ("unit_tests", made.values()),
        ("faults", [made["core"], made["test_main"], *faults]),
    ):
        subprocess.run(["g++", *FLAGS, *objects, "-ldl", "-o", folder / name], check=True)
    return [folder / "unit_tests", folder / "faults"]


@with_gcc
@pytest.mark.parametrize("name", NAMES)
def test_native(name: str, programs: list[Path]) -> None:
    program = programs[NAMES[name] in OWN_NEW]
    done = subprocess.run([program, name], cwd=program.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@with_clang
@pytest.mark.parametrize(
    "body, complaint",
    [
        ("store_lock lock(m); s.pins++;", None),
        ("s.pins++;", "requires holding mutex 'store_mutex'"),
        ("table.wake_workers();", "requires holding mutex 'store_mutex'"),
        ("store_lock lock(m); table.start(0, 0);", "while mutex 'store_mutex' is held"),
    ],
)
def test_the_thread_safety_analysis_bites(body: str, complaint: str | None, tmp_path: Path) -> None:
    """The annotations are empty for other compilers: here they are not."""
    source = tmp_path / "bites.cpp"
    source.write_text(
        '#include "moeoff-expert-table.h"\nusing namespace moeoff;\nvoid f(expert_table & table,'
        f" expert_state & s, monitor & m) {{ (void) table; (void) s; (void) m; {body} }}\n"
    )
    done = subprocess.run(
        ["clang++", *ANALYSIS, f"-I{CORE}", source], capture_output=True, text=True
    )
    assert (done.returncode == 0) == (complaint is None) and (complaint or "") in done.stderr, (
        done.stderr
    )


@with_gcc
@pytest.mark.perf
def test_gate_events_hold_the_mutex_briefly(tmp_path: Path) -> None:
    """At most 20 µs at 10^5 slices, also after a policy has rewritten all priorities:
    gate_event as a whole, of which that is a part.
    """
    results = micro.run_store(micro.build("bench_store", tmp_path), "130x256x8", 1, 2000)
    assert results["slices"] > 99_000 and results["six"]["evictions"] > 5
    for case in micro.PUBLISHED:
        assert results[case]["gate_event"]["median"] < 20_000, (case, results[case])


@with_gcc
@pytest.mark.slow
def test_waiting_wakes_no_more_threads_than_it_must(tmp_path: Path) -> None:
    """In each token 122 of 144 ops wait for some of 466 reads. A thread sleeps about
    once in each of those; a read blocks once, the four threads that read run dry about
    once a layer, and the driver does. Each thread visiting each slice took 1,030, 3,100
    and 8,900 switches, 720 of them not the compute threads': of these a third is left.
    """
    program = micro.build("bench_switches", tmp_path)
    for n_threads, most in ((1, 1033), (4, 1548), (16, 2967)):
        counts = micro.run_switches(program, n_threads)
        assert 460 < counts["misses"] < 470
        assert counts["of_computing_threads"] < 144 * (n_threads + 1.5), counts
        assert counts["voluntary_switches"] < most, counts
    resident = micro.run_switches(program, 4, hit_rate=1.0)
    assert resident["misses"] == 0 and resident["of_computing_threads"] < 5, resident
    # pin and unpin of each op, the gate event, and the driver's of its own
    assert resident["locks"] < 48 * (3 * 2 + 1 + 3) + 5, resident


def test_what_is_made_from_the_header_is_current() -> None:
    for path, text in make_abi.generated().items():
        assert path.read_text() == text, (
            f"{path} is not what the headers say: run scripts/build/make_abi.py"
        )


@with_gcc
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_store_is_clean(sanitizer):
    """In short; `make native-stress-tsan native-stress-asan` runs it longer."""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "build" / "native_stress.sh"), sanitizer, "6"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.endswith("clean\n")
