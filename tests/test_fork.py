"""The fork's packaging, on the real pinned release (from the cache, fetched once). Only `build` may have to compile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fork as tool
import forkcache
import forktree
from forktree import Fork, ForkError


@pytest.fixture(scope="session")
def sdist() -> Path:
    return tool.pinned_sdist(Fork.load(), forkcache.cache_root())


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    """A copy of our patch folder, free to damage."""
    shutil.copytree(forktree.ROOT / "llamacpp_patches", tmp_path / "llamacpp_patches")
    return Fork.load(tmp_path / "llamacpp_patches")


@pytest.fixture
def cache(tmp_path: Path, sdist: Path) -> Path:
    """A cache of its own that holds nothing but the release; a link, so that removing it leaves the real one alone."""
    home = tmp_path / "cache"
    (home / "sdist").mkdir(parents=True)
    (home / "sdist" / sdist.name).symlink_to(sdist)
    return home


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


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


def test_every_patch_fits_the_pinned_release(sdist: Path) -> None:
    fork = Fork.load()
    assert fork.patches
    assert forktree.check(fork, sdist) == []


def test_applying_twice_changes_nothing(fork: Fork, sdist: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    forktree.unpack(sdist, tree)
    assert forktree.apply_patches(fork, tree) == []
    once = contents(tree)
    assert forktree.apply_patches(fork, tree) == []
    assert contents(tree) == once


def test_patches_apply_inside_another_repository(fork: Fork, sdist: Path, tmp_path: Path) -> None:
    """There, `git apply` by itself exits 0 and changes nothing."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    tree = tmp_path / "tree"
    forktree.unpack(sdist, tree)
    assert forktree.apply_patches(fork, tree) == []
    assert fork.local_version in (tree / "llama_cpp/__init__.py").read_text()


def test_a_patch_that_changes_nothing_is_not_taken_for_applied(fork: Fork, tmp_path: Path, monkeypatch) -> None:
    def silent(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, "", "")

    monkeypatch.setattr(forktree, "git", silent)
    failures = forktree.apply_patches(fork, tmp_path)
    assert [line.partition(":")[0] for line in failures] == [patch.name for patch in fork.patches]
    assert not (tmp_path / forktree.STAMP).exists()


def test_every_failure_is_reported_by_name(fork: Fork, sdist: Path) -> None:
    first, last = fork.patches[0], fork.patches[-1]
    damage(first)
    damage(last)
    last.write_text(last.read_text().replace("Reason: ", "Because: "))
    report = forktree.check(fork, sdist)
    assert any(line.startswith(f"{first.name}: error: patch failed") for line in report)
    assert any(line.startswith(f"{last.name}: error: patch failed") for line in report)
    assert any(line.startswith(f"{last.name}: expected a line 'Reason: '") for line in report)


def test_fork_number_must_agree_with_the_patched_version(fork: Fork, sdist: Path) -> None:
    report = forktree.check(with_pin(fork, f'"fork": {fork.number}', '"fork": 99'), sdist)
    assert len(report) == 1 and "+moeoff.99" in report[0]


def test_own_sources_never_replace_a_file_of_the_release(fork: Fork, sdist: Path) -> None:
    taken = fork.folder / "src/llama/llama-model.cpp"
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.touch()
    assert forktree.check(fork, sdist) == ["vendor/llama.cpp/src/llama-model.cpp: the release has a file of this name"]


def test_tree_then_refresh_is_a_no_op(fork: Fork, sdist: Path, tmp_path: Path) -> None:
    before = contents(fork.folder)
    forktree.make_tree(fork, sdist, tmp_path / "tree")
    assert forktree.refresh(fork, tmp_path / "tree") == [patch.name for patch in fork.patches]
    assert contents(fork.folder) == before


def test_refresh_numbers_a_new_commit_and_refuses_a_dirty_tree(fork: Fork, sdist: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    names = [patch.name for patch in fork.patches]
    forktree.make_tree(fork, sdist, tree)
    (tree / "README.md").write_text("changed\n")
    with pytest.raises(ForkError, match=r"not committed:\n M README.md"):
        forktree.refresh(fork, tree)
    forktree.git_or_fail(tree, "commit", "-qam", "Say so\n\nReason: build only")
    assert forktree.refresh(fork, tree) == [*names, f"{int(names[-1][:4]) + 1:04d}-say-so.patch"]
    assert forktree.check(fork, sdist) == []


# Cache


def test_a_wrong_sha256_is_refused_and_leaves_nothing(fork: Fork, cache: Path) -> None:
    wrong = with_pin(fork, fork.sha256, "0" * 64)
    with pytest.raises(ForkError, match=f"expected sha256 {'0' * 64}, found {fork.sha256}"):
        tool.build(wrong, cache)
    assert [p for p in cache.rglob("*") if not p.is_dir()] == [cache / "lock"]


def test_key_changes_with_what_the_build_depends_on(fork: Fork, monkeypatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    keys = [forkcache.full_key(fork)]
    places = [forkcache.place_key(fork)]

    def note() -> None:
        keys.append(forkcache.full_key(fork))
        places.append(forkcache.place_key(fork))

    patch = fork.patches[0]
    os.utime(patch, (0, 0))
    assert forkcache.full_key(fork) == keys[0]  # content counts, not time
    patch.write_text(patch.read_text() + "\n")
    note()
    source = fork.folder / "src/core/moeoff-new.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("// new\n")
    note()
    source.rename(source.with_name("moeoff-other.cpp"))
    note()
    assert len(set(places)) == 1  # so far only what has changed would be compiled again
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    note()
    monkeypatch.setattr(forkcache, "cpu_flags", lambda: "another CPU")
    note()
    monkeypatch.setattr(forkcache, "compiler", lambda variable, names: "another compiler")
    note()
    assert len(set(keys)) == len(keys) == 7
    assert len(set(places)) == 4


def test_an_interrupted_build_is_not_taken_for_a_finished_one(fork: Fork, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(tool, "tool_environment", lambda cache, lock: None)
    calls = []

    def make(fork, part, tree, place, tools, lock) -> None:
        calls.append(sorted(p.name for p in part.iterdir()))
        (part / "half").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt
        (part / "whole").touch()

    with pytest.raises(KeyboardInterrupt):
        tool.cached(fork, cache, "things", make)
    assert not (cache / "things").exists()
    (tree,) = cache.glob("work-*/tree")
    old = (tree / "CMakeLists.txt").stat().st_mtime_ns
    (tree / "CMakeLists.txt.orig").touch()
    (tree / "README.md").unlink()
    home = tool.cached(fork, cache, "things", make)
    assert sorted(contents(home)) == ["half", "whole"] and calls == [[], []]
    # The tree was put right, and what was right in it was left alone (else everything would compile again).
    assert (tree / "README.md").exists() and not (tree / "CMakeLists.txt.orig").exists()
    assert (tree / "CMakeLists.txt").stat().st_mtime_ns == old
    assert tool.cached(fork, cache, "things", make) == home and len(calls) == 2


def test_no_compiler_is_one_sentence(fork: Fork, cache: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("MOEOFF_CACHE", str(cache))
    assert tool.main(["build"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "no-such-compiler" in shown.err


# Wheel


def test_wheel_holds_each_library_once() -> None:
    wheel = tool.build(Fork.load(), forkcache.cache_root())
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"\.(so|dylib|dll)\b", name)]
    stems = [Path(name).name.partition(".")[0] for name in libraries]
    assert {"libllama", "libggml", "libggml-base", "libggml-cpu"} <= set(stems)
    assert len(stems) == len(set(stems))
    assert all(re.fullmatch(r"llama_cpp/lib/lib[\w-]+\.(so|dylib)", name) for name in libraries)


@pytest.mark.parametrize("extra", ["llama_cpp/lib/libllama.so.0", "lib/libllama.so", "llama_cpp/lib/libggml.so.0.25.3"])
def test_wheel_with_a_second_copy_is_refused(extra: str, tmp_path: Path) -> None:
    fork = Fork.load()
    wheel = tmp_path / f"llama_cpp_python-{fork.local_version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        for name in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
            out.writestr(f"llama_cpp/lib/{name}.so", b"")
    tool.check_wheel(fork, wheel)
    with zipfile.ZipFile(wheel, "a") as out:
        out.writestr(extra, b"")
    with pytest.raises(ForkError, match=re.escape(extra)):
        tool.check_wheel(fork, wheel)


def test_installed_llama_cpp_is_the_fork() -> None:
    import llama_cpp

    assert llama_cpp.__version__ == metadata.version("llama-cpp-python") == Fork.load().local_version
    folder = Path(llama_cpp.__file__).parent / "lib"
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if re.search(r"/lib(llama|ggml)", line)}
    assert loaded == {str(p) for p in folder.iterdir()}  # one ggml in this process, and it is the wheel's
