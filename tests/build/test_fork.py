"""The fork's packaging, on the real pinned release (from the cache, fetched once). Only
`build` may have to compile.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fork as tool
from fork import Fork, ForkError


@pytest.fixture(scope="session")
def sdist() -> Path:
    return tool.pinned_sdist(Fork.load(), tool.cache_root())


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    """A copy of our patch folder, free to damage."""
    shutil.copytree(tool.ROOT / "llamacpp_patches", tmp_path / "llamacpp_patches")
    return Fork.load(tmp_path / "llamacpp_patches")


@pytest.fixture
def cache(tmp_path: Path, sdist: Path) -> Path:
    """A cache of its own that holds nothing but the release; a link, so that removing
    it leaves the real one alone.
    """
    home = tmp_path / "cache"
    (home / "sdist").mkdir(parents=True)
    (home / "sdist" / sdist.name).symlink_to(sdist)
    return home


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def damage(patch: Path) -> None:
    """Makes the first hunk look for a line that the release does not have."""
    text = patch.read_text()
    patch.write_text(re.sub(r"(\n@@ [^\n]*\n )[^\n]*", r"\1no such line", text, count=1))


def with_pin(fork: Fork, old: str, new: str) -> Fork:
    pin = fork.folder / "pin.json"
    assert old in pin.read_text()
    pin.write_text(pin.read_text().replace(old, new))
    return Fork.load(fork.folder)


# Patches


def test_every_patch_fits_the_pinned_release(sdist: Path, tmp_path: Path) -> None:
    """Once, and a second time changes nothing; also inside another repository, where
    `git apply` by itself exits 0 and changes nothing.
    """
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    assert Fork.load().patches
    command, env = [sys.executable, tool.__file__, "check"], os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_failure_is_reported_by_name(fork: Fork, sdist: Path) -> None:
    first, last = fork.patches[0], fork.patches[-1]
    damage(first)
    damage(last)
    last.write_text(last.read_text().replace("Reason: ", "Because: "))
    report = tool.check(fork, sdist)
    assert any(line.startswith(f"{first.name}: error: patch failed") for line in report)
    assert any(line.startswith(f"{last.name}: error: patch failed") for line in report)
    assert any(line.startswith(f"{last.name}: expected a line 'Reason: '") for line in report)


def test_what_does_not_agree_is_told(fork: Fork, sdist: Path) -> None:
    """Upstreamable patches apply to the release alone, the patched version has the
    fork's number, and own sources replace no file of the release.
    """
    # on what 0004 to 0009 make of the server
    (server,) = (patch for patch in fork.patches if "hooks-for-a-host-process" in patch.name)
    server.write_text(
        server.read_text().replace("Reason: incompatible by nature", "Reason: upstreamable")
    )
    (fork.folder / "src/llama").mkdir(parents=True, exist_ok=True)
    (fork.folder / "src/llama/llama-model.cpp").touch()
    report = tool.check(with_pin(fork, f'"fork": {fork.number}', '"fork": 99'), sdist)
    assert report[:2] == [
        "vendor/llama.cpp/src/llama-model.cpp: the release has a file of this name",
        f"{server.name}: needs another patch, so that it cannot be sent upstream",
    ]
    assert len(report) == 3 and "+moeoff.99" in report[2]


@pytest.mark.slow  # git commits thousands of files
def test_refresh(fork: Fork, sdist: Path, tmp_path: Path) -> None:
    """A fresh tree changes nothing, a new commit gets a number, and uncommitted changes
    are refused.
    """
    tree, before, names = (
        tmp_path / "tree",
        contents(fork.folder),
        [patch.name for patch in fork.patches],
    )
    tool.make_tree(fork, sdist, tree)
    assert tool.refresh(fork, tree) == names and contents(fork.folder) == before
    (tree / "README.md").write_text("changed\n")
    with pytest.raises(ForkError, match=r"not committed:\n M README.md"):
        tool.refresh(fork, tree)
    tool.git_or_fail(tree, "commit", "-qam", "Say so\n\nReason: build only")
    assert tool.refresh(fork, tree) == [*names, f"{int(names[-1][:4]) + 1:04d}-say-so.patch"]


# Cache


def test_a_wrong_sha256_is_refused_and_leaves_nothing(fork: Fork, cache: Path) -> None:
    wrong = with_pin(fork, fork.sha256, "0" * 64)
    with pytest.raises(ForkError, match=f"expected sha256 {'0' * 64}, found {fork.sha256}"):
        tool.build(wrong, cache)
    assert [p for p in cache.rglob("*") if not p.is_dir()] == [cache / "lock"]


def test_key_changes_with_what_the_build_depends_on(fork: Fork, tmp_path, monkeypatch) -> None:
    for name in ("CMAKE_ARGS", "CC"):
        monkeypatch.delenv(name, raising=False)
    keys = [tool.full_key(fork)]
    places = [tool.place_key(fork)]

    def note() -> None:
        keys.append(tool.full_key(fork))
        places.append(tool.place_key(fork))

    patch = fork.patches[0]
    os.utime(patch, (0, 0))
    assert tool.full_key(fork) == keys[0]  # content counts, not time
    patch.write_text(patch.read_text() + "\n")
    note()
    source = fork.folder / "src/core/moeoff-new.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("// new\n")
    note()
    source.rename(source.with_name("moeoff-other.cpp"))
    note()
    keys += [tool.full_key(fork, Path("webpage") / page) for page in ("1", "2")]
    assert len(set(places)) == 1  # so far only what has changed would be compiled again
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    note()
    monkeypatch.setattr(tool, "cpu_flags", lambda: "another CPU")
    note()
    (tmp_path / "cc").write_text("#!/bin/sh\necho another compiler\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    note()
    assert len(set(keys)) == len(keys) == 9
    assert len(set(places)) == 4


@pytest.fixture
def tiny(tmp_path: Path) -> Fork:
    """A release of two files, and no patch; its archive lies in the cache `tmp_path`."""
    (tmp_path / "x-1").mkdir()
    for name in ("CMakeLists.txt", "README.md"):
        (tmp_path / "x-1" / name).write_text(name)
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "pin.json").touch()
    (tmp_path / "sdist").mkdir()
    archive = tmp_path / "sdist" / "x-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "x-1", "x-1")
    return Fork(tmp_path / "patches", "x", "1", hashlib.sha256(archive.read_bytes()).hexdigest(), 1)


def test_an_interrupted_build_is_not_taken_for_a_finished_one(tiny: Fork, tmp_path: Path) -> None:
    cache, calls = tmp_path, []

    def make(fork, part, tree, place, tools, lock) -> None:
        calls.append(sorted(p.name for p in part.iterdir()))
        (part / "half").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt
        (part / "whole").touch()

    def cached() -> Path:
        return tool.cached(tiny, cache, "things", make, tools=lambda _cache, _lock: None)

    with pytest.raises(KeyboardInterrupt):
        cached()
    assert not (cache / "things").exists()
    (tree,) = cache.glob("work-*/tree")
    old = (tree / "CMakeLists.txt").stat().st_mtime_ns
    (tree / "CMakeLists.txt.orig").touch()
    (tree / "README.md").unlink()
    home = cached()
    assert sorted(contents(home)) == ["half", "whole"] and calls == [[], []]
    # The tree was put right, and what was right in it was left alone (else everything
    # would compile again).
    assert (tree / "README.md").exists() and not (tree / "CMakeLists.txt.orig").exists()
    assert (tree / "CMakeLists.txt").stat().st_mtime_ns == old
    assert cached() == home and len(calls) == 2


def test_no_compiler_is_one_sentence(fork: Fork, cache: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("MOEOFF_CACHE", str(cache))
    assert tool.main(["build"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "no-such-compiler" in shown.err


# Wheel


@pytest.mark.parametrize(
    "extra", ["llama_cpp/lib/libllama.so.0", "lib/libllama.so", "llama_cpp/lib/libggml.so.0.25.3"]
)
def test_wheel_with_a_second_copy_is_refused(extra: str, tmp_path: Path) -> None:
    fork = Fork.load()
    wheel = tmp_path / f"llama_cpp_python-{fork.local_version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for name in (
            "libllama.so",
            "libggml.so",
            "libggml-base.so",
            "libggml-cpu.so",
            "moeoff-templates",
        ):
            out.writestr(f"llama_cpp/lib/{name}", b"")
    with pytest.raises(ForkError, match="libllama-server-impl"):
        tool.check_wheel(fork, wheel)
    with zipfile.ZipFile(wheel, "a") as out:
        out.writestr("llama_cpp/lib/libllama-server-impl.so", b"")
    tool.check_wheel(fork, wheel)
    with zipfile.ZipFile(wheel, "a") as out:
        out.writestr(extra, b"")
    with pytest.raises(ForkError, match=re.escape(extra)):
        tool.check_wheel(fork, wheel)


def test_installed_llama_cpp_is_the_fork() -> None:
    import llama_cpp

    assert (
        llama_cpp.__version__ == metadata.version("llama-cpp-python") == Fork.load().local_version
    )
    folder = Path(llama_cpp.__file__).parent / "lib"
    code = (
        "import llama_cpp, re; print(*{line.split()[-1] for line in open('/proc/self/maps') if"
        " re.search(r'/lib(llama|ggml)', line)})"
    )
    # a process of its own: other tests here may have had a server
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    # loaded where one starts, and only there
    server = {
        str(folder / f"lib{name}.so") for name in ("llama-server-impl", "llama-common", "mtmd")
    }
    server.add(str(folder / "moeoff-templates"))  # a program
    # one ggml in a process, and it is the wheel's
    assert loaded == {str(p) for p in folder.iterdir()} - server


# Another pin


@pytest.mark.slow
def test_the_release_that_is_pinned(capsys):
    """Nothing has changed, and every patch fits."""
    pinned = Fork.load()
    before = (pinned.folder / "pin.json").read_bytes()
    assert tool.main(["repin", "--look", pinned.version, pinned.sha256]) == 0
    out = capsys.readouterr().out
    assert "0 of " in out and "every patch fits" in out and f"-> {pinned.version}" in out
    assert (pinned.folder / "pin.json").read_bytes() == before
