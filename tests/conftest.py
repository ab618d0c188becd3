import fcntl
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

pytest.register_assert_rewrite("helpers")

from helpers.files import CALIBRATION_TEXTS, CODE, COMMAND, DEMO, MORE_PROSE, PROSE

# a shell that runs the tests in the background ignores Ctrl-C for them, and the
# programs they start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest imports readline, which tells all processes from here on how wide a terminal is
# that is none of theirs, behind Python's back
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)

# hypothesis gives an example 200 ms, which others on the machine may take from it; and
# what fails must fail again
hypothesis.settings.register_profile(
    "moeoff",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("moeoff")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "writer" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.archs)


# Of the processes that run tests side by side each has a core, and so a model one
# thread: threads that share a core with other models' wait for each other.
WORKER, CORES = (
    os.environ.get("PYTEST_XDIST_WORKER"),
    sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
)
if WORKER and CORES:
    OWN = {CORES[int(WORKER.removeprefix("gw")) % len(CORES)]}
    os.sched_setaffinity(0, OWN)
    import moeoff.llamacpp.llama  # noqa: F401  loads OpenMP, which asks once how many cores there are: threads beyond them do not spin for long

    os.sched_setaffinity(0, CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if WORKER and CORES:
        os.sched_setaffinity(0, CORES if item.get_closest_marker("cores") else OWN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Keep only the end of a failed test's output, because a verbose model's thousands
    of lines hide every other failure.
    """
    report = yield
    report.sections = [
        (title, "\n".join(text.splitlines()[-40:])) for title, text in report.sections
    ]
    return report


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that one of the processes which run tests side by side fills for all of
    them, who must not change it.
    """
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what one that failed has left
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> str:
    """A copy of the demo model: what a test leaves beside a model does not get into the
    package.
    """
    return str(shutil.copy(DEMO, tmp_path_factory.mktemp("demo")))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Give each worker a cache folder of its own for rates and prompts, apart from the
    user's. Builds stay where they are.
    """
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("MOEOFF_CACHE", str(usual / "moeoff"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def package_data_stay():
    """Nothing that a test runs leaves a file beside the demo model itself."""
    before = {path.name: path.stat().st_mtime_ns for path in DEMO.parent.iterdir()}
    yield
    assert {path.name: path.stat().st_mtime_ns for path in DEMO.parent.iterdir()} == before


@pytest.fixture(scope="session")
def moeoff_command():
    """Runs the installed command; returns the finished process with text output."""

    def run(*args: str, timeout: float = 600, **kwargs) -> subprocess.CompletedProcess:
        return subprocess.run(
            [COMMAND, *args],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            **kwargs,
        )

    return run


@pytest.fixture(scope="session")
def invoke():
    """Runs the command in this process, in a fraction of the time that one of its own
    takes; returns what `moeoff_command` does.
    """
    from click.testing import CliRunner

    from moeoff.cli.main import main

    def run(*args: str, text: str | None = None) -> subprocess.CompletedProcess:
        done = CliRunner().invoke(main, args, input=text, prog_name="moeoff")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return subprocess.CompletedProcess(args, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def grown(tmp_path_factory) -> str:
    """The demo model grown to about 100 MB with Q4_K experts: slices of many pages,
    rows that K-quants can hold.
    """
    from gguf import GGMLQuantizationType

    from grow_model import Growth, grow_model

    growth = Growth(4, 4, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q8_0)
    return str(
        made_once(
            tmp_path_factory,
            "grown",
            lambda folder: grow_model(DEMO, folder / "grown.gguf", growth),
        )
        / "grown.gguf"
    )


@pytest.fixture(scope="session")
def nextn(tmp_path_factory) -> str:
    """A model whose last layer is there to make drafts."""
    from helpers.models import write_nextn_model

    path = tmp_path_factory.mktemp("nextn") / "nextn.gguf"
    write_nextn_model(path)
    return str(path)


@pytest.fixture
def backend():
    """ggml's CPU backend, for single graphs."""
    from helpers.ggml_api import Backend

    backend = Backend()
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def writer() -> Path:
    """llama.cpp's program that writes models of every architecture: see arch_models."""
    from helpers.arch_models import find_writer

    return find_writer()


@pytest.fixture
def folder(tmp_path):
    """For models of every architecture, 5 to 60 MB each: they go as soon as their test
    ends.
    """
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="session")
def calibrated(demo, tmp_path_factory):
    """A copy of the demo model with a profile beside it; what calibrate() returned, and
    all calls of its progress.
    """
    import numpy as np

    from moeoff.experts.profile import Profile, profile_path
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate
    from moeoff.policies import hobbit

    def make(folder: Path) -> None:
        model = shutil.copy(demo, folder / "model.gguf")
        Profile.write(
            profile_path(model), ModelIndex.read(model), {"precision": {"bits": np.arange(3)}}
        )
        steps: list[tuple[str, int, int]] = []
        # of the trace that its weights are fitted on, 96 times or more
        with mock.patch.object(hobbit, "MAX_EVENTS", 240):
            result = calibrate(
                model,
                text=CALIBRATION_TEXTS,
                tokens=1024,
                hidden=16,
                progress=lambda *args: steps.append(args),
            )
        (folder / "result").write_bytes(pickle.dumps((str(model), result, steps)))

    return pickle.loads((made_once(tmp_path_factory, "calibrated", make) / "result").read_bytes())


@pytest.fixture(scope="session")
def recording(demo, tmp_path_factory):
    """3,072 tokens of prose and code, with what the demo model's routers chose of them."""
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.record import record, recordable, sequences

    def make(folder: Path) -> None:
        with recordable(ModelIndex.read(demo)) as (llm, router):
            made = record(llm, sequences(llm, [PROSE, CODE], 3072), router, "demo")
            assert llm.engine.buffer.stats().events_dropped == 0
        (folder / "recording").write_bytes(pickle.dumps(made))

    return pickle.loads((made_once(tmp_path_factory, "recording", make) / "recording").read_bytes())


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """No text that the model has seen."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(f"{PROSE.read_text()}\n{MORE_PROSE.read_text()}")
    return str(path)
