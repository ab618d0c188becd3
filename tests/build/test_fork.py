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
import tempfile
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


def test_every_patch_fits_the_pinned_release(sdist: Path, tmp_path: Path, monkeypatch) -> None:
    """Once, and a second time changes nothing; also inside another repository, where
    `git apply` by itself exits 0 and changes nothing.
    """
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fork = Fork.load()
    assert fork.patches
    assert tool.check(fork, sdist) == []


def test_a_patch_that_changes_nothing_is_not_taken_for_applied(
    fork: Fork, tmp_path: Path, monkeypatch
) -> None:
    def silent(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, "", "")

    monkeypatch.setattr(tool, "git", silent)
    failures = tool.apply_patches(fork, tmp_path)
    assert [line.partition(":")[0] for line in failures] == [patch.name for patch in fork.patches]
    assert not (tmp_path / tool.STAMP).exists()


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
    """What upstream may take fits the release by itself, the fork's number is in the
    patched version, own sources replace no file of the release.
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
    """Of a tree as it is made nothing changes; a new commit gets a number; what is not
    committed is refused.
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


def test_key_changes_with_what_the_build_depends_on(fork: Fork, monkeypatch) -> None:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
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
    monkeypatch.setattr(tool, "compiler", lambda variable, names: "another compiler")
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


def test_an_interrupted_build_is_not_taken_for_a_finished_one(
    tiny: Fork, tmp_path: Path, monkeypatch
) -> None:
    fork, cache = tiny, tmp_path
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
    # The tree was put right, and what was right in it was left alone (else everything
    # would compile again).
    assert (tree / "README.md").exists() and not (tree / "CMakeLists.txt.orig").exists()
    assert (tree / "CMakeLists.txt").stat().st_mtime_ns == old
    assert tool.cached(fork, cache, "things", make) == home and len(calls) == 2


def test_no_compiler_is_one_sentence(fork: Fork, cache: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("MOEOFF_CACHE", str(cache))
    assert tool.main(["build"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "no-such-compiler" in shown.err


# Web page

NPM = """#!/bin/sh
PATH=/usr/bin:/bin
echo "$@" >> "$(dirname "$0")/calls"
test "$1" = run || exit 0
mkdir -p dist/_app
cd dist
for name in index.html manifest.webmanifest sw.js build.json _app/version.json bundle.1.js bundle.1.css workbox-1.js; do
    echo page > $name
done
"""


class WebPage:
    """Builds with nothing on PATH but what `install` puts there. The tree holds just
    the page's sources, the wheel what CMake would find.
    """

    def __init__(self, fork: Fork, cache: Path, folder: Path, capsys):
        self.fork, self.cache, self.folder, self.capsys = fork, cache, folder, capsys
        self.compiled = 0

    def install(self, node: str = "v20.1.0", npm: str = NPM) -> None:
        for name, script in (("node", f"#!/bin/sh\necho {node}\n"), ("npm", npm)):
            (self.folder / name).write_text(script)
            (self.folder / name).chmod(0o755)

    def tree(self, fork: Fork, sdist: Path, tree: Path) -> None:
        (tree / tool.PAGE_SOURCES).mkdir(parents=True)
        (tree / tool.PAGE_SOURCES / "package.json").write_text("{}")

    def make_wheel(
        self, fork: Fork, part: Path, tree: Path, place: Path, tools: None, lock: int
    ) -> None:
        self.compiled += 1
        index = tree / tool.PAGE / "index.html"
        (part / "a.whl").write_text(index.read_text() if index.exists() else "none")

    def build(self) -> tuple[str, list[str]]:
        """What is in the wheel, and the lines that speak of the page."""
        self.capsys.readouterr()
        page = tool.build(self.fork, self.cache).read_text().strip()
        return page, [
            line for line in self.capsys.readouterr().err.splitlines() if "web page" in line
        ]

    def npm_calls(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def web(fork: Fork, cache: Path, tmp_path: Path, monkeypatch, capsys) -> WebPage:
    (tmp_path / "bin").mkdir()
    web = WebPage(fork, cache, tmp_path / "bin", capsys)
    monkeypatch.setenv("PATH", str(web.folder))
    monkeypatch.setenv("MOEOFF_CACHE", str(cache))
    monkeypatch.setattr(tool, "compiler", lambda variable, names: "a compiler")
    monkeypatch.setattr(tool, "patched_tree", web.tree)
    monkeypatch.setattr(tool, "tool_environment", lambda cache, lock: None)
    monkeypatch.setattr(tool, "make_wheel", web.make_wheel)
    monkeypatch.setattr(Fork, "load", lambda: fork)
    return web


def test_without_npm_one_line_says_that_there_is_no_page(web: WebPage) -> None:
    page, lines = web.build()
    assert page == "none" and len(lines) == 1 and lines[0].endswith("npm are not on PATH.")
    assert web.build() == ("none", []) and web.compiled == 1
    assert tool.main(["page"]) == 1 and "npm are not on PATH" in web.capsys.readouterr().err


def test_an_old_node_is_not_asked_to_build_the_page(web: WebPage) -> None:
    web.install(node="v18.20.4")
    page, lines = web.build()
    assert (
        page == "none" and len(lines) == 1 and "found v18.20.4" in lines[0] and web.npm_calls() == 0
    )


def test_page_is_built_once_and_is_part_of_what_a_wheel_is_made_from(web: WebPage) -> None:
    assert web.build()[0] == "none"
    web.install()
    page, lines = web.build()
    assert page == "page" and len(lines) == web.npm_calls() == 2
    assert web.build() == ("page", []) and web.npm_calls() == 2 and web.compiled == 2
    assert [path.name for path in (web.cache / "webpage").iterdir()] == [
        next((web.cache / "webpage").glob("*/index.html")).parent.name
    ]
    # another Node.js, another page; no npm, none
    web.install(node="v22.0.0")
    assert web.build()[0] == "page" and web.npm_calls() == 4 and web.compiled == 3
    (web.folder / "npm").unlink()
    assert web.build() == ("none", []) and web.compiled == 3
    source = web.fork.folder / "src/core/moeoff-new.cpp"
    source.write_text("// new\n")
    assert web.build()[0] == "none" and not any(
        web.cache.glob(f"work-*/tree/{tool.PAGE}/index.html")
    )
    web.install()
    assert web.build()[0] == "page" and web.npm_calls() == 4


@pytest.mark.parametrize(
    "npm, reason",
    [
        (
            "#!/bin/sh\necho no network\nexit 7\n",
            "`npm ci --include=dev --no-audit --no-fund` failed (exit 7)",
        ),
        (NPM.replace("sw.js", ""), "none with sw.js"),
        (NPM.replace("mkdir", "exit #"), "none with index.html"),
    ],
    ids=["npm fails", "a file is missing", "nothing is there"],
)
def test_page_that_cannot_be_built_does_not_stop_the_build(
    web: WebPage, npm: str, reason: str
) -> None:
    web.install(npm=npm)
    page, lines = web.build()
    assert page == "none" and reason in lines[-1] and ".failed" in lines[-1]
    (home,) = (web.cache / "webpage").iterdir()
    assert home.suffix == ".failed"
    # nothing is tried again, and the next compile says so, until it is asked for
    calls = web.npm_calls()
    assert web.build() == ("none", []) and web.npm_calls() == calls and web.compiled == 1
    (web.fork.folder / "src/core/moeoff-new.cpp").write_text("// new\n")
    page, lines = web.build()
    assert page == "none" and "`fork.py page` tries again" in lines[-1] and web.npm_calls() == calls
    assert tool.main(["page"]) == 1 and reason in web.capsys.readouterr().err
    web.install()
    assert web.build() == ("none", [])
    assert tool.main(["page"]) == 0 and Path(web.capsys.readouterr().out.strip()).is_dir()
    assert web.build() == ("page", []) and not home.exists()


# Wheel


def test_run_takes_the_page_from_the_cache_and_runs_no_npm(web: WebPage) -> None:
    web.install()
    bare = tool.build(web.fork, web.cache, npm=False)
    assert (
        bare.read_text() == "none"
        and web.npm_calls() == 0
        and web.capsys.readouterr().err.count("web page") == 0
    )
    assert tool.build(web.fork, web.cache, npm=False) == bare and web.compiled == 1
    whole = tool.build(web.fork, web.cache)
    assert whole != bare and web.compiled == 2
    assert tool.build(web.fork, web.cache, npm=False) == whole and web.compiled == 2
    (web.fork.folder / "src/core/moeoff-new.cpp").write_text("// new\n")
    assert (
        tool.build(web.fork, web.cache, npm=False) == tool.build(web.fork, web.cache) != whole
        and web.compiled == 3
    )


def test_reason_for_no_page_is_printed_after_a_run_has_built_the_wheel(web: WebPage) -> None:
    tool.build(web.fork, web.cache, npm=False)
    page, lines = web.build()
    assert page == "none" and len(lines) == 1 and web.compiled == 1
    assert web.build() == ("none", [])


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


def test_changed_files_are_told_with_their_sizes(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "same").write_text("a\n")
    (old / "other").write_text("a\nb\nc\n")
    (new / "other").write_text("a\nx\ny\nc\n")
    (old / "gone").write_text("a\n")
    (new / "added").write_text("a\n")
    assert tool.changed(old, new, ["same", "other", "gone", "added", "neither"]) == [
        "other: +2 -1",
        "gone: is gone",
        "added: is new",
    ]


@pytest.mark.slow
def test_the_release_that_is_pinned(capsys):
    """Nothing has changed, and every patch fits."""
    pinned = Fork.load()
    before = (pinned.folder / "pin.json").read_bytes()
    assert tool.main(["repin", "--look", pinned.version, pinned.sha256]) == 0
    out = capsys.readouterr().out
    assert "0 of " in out and "every patch fits" in out and f"-> {pinned.version}" in out
    assert (pinned.folder / "pin.json").read_bytes() == before
