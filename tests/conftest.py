import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("helpers")

from helpers.files import CALIBRATION_TEXTS, DEMO, MORE_PROSE, PROSE, ROOT

# a shell that runs the tests in the background ignores Ctrl-C for them, and the programs they start would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "writer" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.archs)


@pytest.fixture(scope="session")
def demo() -> str:
    from moeoff.paths import demo_model

    return demo_model()


@pytest.fixture(scope="session")
def moeoff_command(tmp_path_factory):
    """Runs the installed command, with a cache folder of its own; returns the finished process with text output."""
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(*args: str, timeout: float = 120, **kwargs) -> subprocess.CompletedProcess:
        kwargs.setdefault("env", os.environ | {"XDG_CACHE_HOME": cache})
        command = os.path.join(os.path.dirname(sys.executable), "moeoff")
        return subprocess.run([command, *args], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, **kwargs)

    return run


@pytest.fixture(scope="session")
def grown(tmp_path_factory) -> str:
    """The demo model grown to about 100 MB with Q4_K experts: slices of many pages, rows that K-quants can hold."""
    path = tmp_path_factory.mktemp("grown") / "grown.gguf"
    script = ROOT / "scripts" / "grow_model.py"
    command = [sys.executable, str(script), str(DEMO), "-o", str(path), "--width", "4", "--ff", "4", "--expert-type", "Q4_K"]
    subprocess.run(command, check=True, capture_output=True)
    return str(path)


@pytest.fixture(scope="session")
def nextn(tmp_path_factory) -> str:
    """A model whose last layer is there to make drafts."""
    from helpers.small_models import write_nextn_model

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
    """For models of every architecture, 5 to 60 MB each: they go as soon as their test ends."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="session")
def calibrated(demo, tmp_path_factory):
    """A copy of the demo model with a profile beside it; what calibrate() returned, and all calls of its progress."""
    import numpy as np

    from moeoff.calibrate.profile_fit import calibrate
    from moeoff.companion.profile import Profile, profile_path
    from moeoff.gguf.layout import Layout

    model = shutil.copy(demo, tmp_path_factory.mktemp("calibrate") / "model.gguf")
    Profile.write(profile_path(model), Layout.read(model), {"precision": {"bits": np.arange(3)}})
    said: list[tuple[str, int, int]] = []
    done = calibrate(model, text=CALIBRATION_TEXTS, tokens=1024, hidden=16, progress=lambda *args: said.append(args))
    return str(model), done, said


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """No text that the model has seen."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(f"{PROSE.read_text()}\n{MORE_PROSE.read_text()}")
    return str(path)
