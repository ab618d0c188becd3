#!/usr/bin/env python3
"""Builds moeoff's llama-cpp-python: a pinned release, a few patches, and our own C++
sources.

Everything lives in the cache folder (MOEOFF_CACHE, else XDG_CACHE_HOME/moeoff, else
~/.cache/moeoff):

    sdist/           the verified release
    tools-*/         virtual environment with the build back end, and with cmake and ninja where PATH has none
    work-<place>/    source tree and CMake build folder; <place> depends on release, flags, compiler and CPU only, so
                     that after an edit of a patch or a source just what it touches is
                     compiled again
    webpage/<key>/   the server's web page, built once with npm where that is there; <key>.failed: what npm said where it failed
    wheels/<key>/    finished wheels; <key> depends on everything, also on whether and which page is in;
                     `told` beside a wheel: the reason for its having no page has been
                     printed
    archs/<key>/     test-llama-archs with the libraries that it was linked to
    perplexity/<key>/, llama-server/<key>/  llama.cpp's programs of these names, likewise

A key names everything that a build depends on; an input that is missing there would let
a stale build be used. The compiler is steered as usual: CMAKE_ARGS="-DGGML_CUDA=ON"
(GGML_METAL, GGML_VULKAN, ...), CC, CXX, CFLAGS, CXXFLAGS. Progress goes to stderr; the
last line on stdout is the result's path.

Nothing is unpacked whose sha256 was not checked; a patch counts as applied only when
every file that it names has changed; what we add to the tree never replaces a file of
the pinned release. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import filecmp
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError as error:  # which Windows lacks
    sys.exit(f"The fork is built on Linux or macOS; this system has no {error.name}.")

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".moeoff-patches"  # inside a patched tree: which patches it holds, by name and digest
REASONS = ("upstreamable", "build only", "incompatible by nature")
# Several folders of ours may share one place in the tree.
SOURCE_FOLDERS = (
    ("ggml-cpu", "vendor/llama.cpp/ggml/src/ggml-cpu/moeoff"),
    ("core", "vendor/llama.cpp/ggml/src/ggml-cpu/moeoff"),
    ("cmake", "vendor/llama.cpp/cmake/moeoff"),
    ("llama", "vendor/llama.cpp/src"),
    ("common", "vendor/llama.cpp/common/moeoff"),
    ("server", "vendor/llama.cpp/tools/server/moeoff"),
)
BACK_END = "scikit-build-core[pyproject]>=0.10,<2"
TEMPLATES = "moeoff-templates"  # the program that runs chat templates
LIBRARY = re.compile(r"(?:^|/)lib[\w-]+\.(?:so|dylib)[\d.]*$")
PROGRAMS = {
    "archs": "test-llama-archs",
    "perplexity": "llama-perplexity",
    "llama-server": "llama-server",
}
# Before the user's CMAKE_ARGS, which may override them.
DEFAULT_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
)
# After them: the expert buffer lives in the CPU backend, which therefore has to be
# linked in; the rest is never used.
FIXED_FLAGS = (
    "-DGGML_BACKEND_DL=OFF",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_TESTS_INSTALL=OFF",
)
COMPILERS = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CUDACXX",
    "CUDAFLAGS",
    "CUDAARCHS",
    "HIPCXX",
)

PAGE_SOURCES = "vendor/llama.cpp/tools/ui"
PAGE = f"{PAGE_SOURCES}/dist"
OLDEST_NODE = 20
PATIENCE = 900  # seconds for each of npm's commands, which take 2 to 4 minutes
NPM = (
    # --include: whoever sets NODE_ENV=production would otherwise get no build tools
    ("npm", "ci", "--include=dev", "--no-audit", "--no-fund"),
    ("npm", "run", "build"),
)
PAGE_SETTINGS = {"LLAMA_UI_OUT_DIR": "dist", "VITE_PUBLIC_APP_NAME": "moeoff"}
# What the release's CMake script insists on: a page without one of them would end the
# whole build.
PAGE_NEEDS = (
    "index.html",
    "manifest.webmanifest",
    "sw.js",
    "build.json",
    "version.json",
    "bundle*.js",
    "bundle*.css",
    "workbox*.js",
)


# The source tree: the pinned sdist, our patches on top of it, our own sources copied in


class ForkError(Exception):
    """An expected failure: its text is all that the user gets to see."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: bytes) -> str:
    """sha256 over length-prefixed parts, so that moving a byte from one part to the
    next changes it.
    """
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


@dataclass(frozen=True)
class Fork:
    """The fork as pin.json, the patches and src/ beside it describe it."""

    folder: Path
    name: str
    version: str
    sha256: str
    number: int

    @classmethod
    def load(cls, folder: Path = ROOT / "llamacpp_patches") -> Fork:
        path = folder / "pin.json"
        try:
            pin = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ForkError(f"{path}: cannot be read as JSON: {error}") from None
        types = {"name": str, "version": str, "sha256": str, "fork": int}
        if {key: type(value) for key, value in pin.items()} != types:
            raise ForkError(
                f"{path}: expected exactly name, version, sha256 (text) and fork (a number), found"
                f" {pin}"
            )
        return cls(folder, pin["name"], pin["version"], pin["sha256"], pin["fork"])

    @property
    def sdist_name(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"

    @property
    def local_version(self) -> str:
        return f"{self.version}+moeoff.{self.number}"

    @property
    def patches(self) -> list[Path]:
        return sorted(self.folder.glob("*.patch"))

    @property
    def sources(self) -> list[tuple[Path, str]]:
        """Our own files, each with its place in the tree."""
        sources = []
        for folder, place in SOURCE_FOLDERS:
            base = self.folder / "src" / folder
            files = sorted(p for p in base.rglob("*") if p.is_file() and not p.name.startswith("."))
            sources += [(p, f"{place}/{p.relative_to(base).as_posix()}") for p in files]
        return sources

    def digest(self) -> str:
        """Changes whenever the patched tree would."""
        parts = [(self.folder / "pin.json").read_bytes()]
        for path in self.patches:
            parts += [path.name.encode(), path.read_bytes()]
        for path, place in self.sources:
            parts += [place.encode(), path.read_bytes()]
        return digest(*parts)


def git_env(tree: Path) -> dict[str, str]:
    """Surroundings in which git neither reads the user's settings nor finds a
    repository around the tree.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Inside another repository's work tree `git apply` would exit 0 without touching a
    # file.
    env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {
            f"GIT_{who}_NAME": "moeoff contributors",
            f"GIT_{who}_EMAIL": "moeoff@example.invalid",
        }
    return env


def git(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *args], cwd=tree, env=git_env(tree), text=True, capture_output=True
        )
    except FileNotFoundError:
        raise ForkError(
            "git was not found on PATH: install it, the patches are applied with it."
        ) from None


def git_or_fail(tree: Path, *args: str) -> str:
    done = git(tree, *args)
    if done.returncode:
        raise ForkError(f"git {args[0]} failed in {tree}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def verify_sdist(fork: Fork, sdist: Path) -> None:
    actual = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if actual != fork.sha256:
        sdist.unlink()
        raise ForkError(
            f"{sdist.name}: expected sha256 {fork.sha256}, found {actual}; the file was removed."
        )


def unpack(sdist: Path, tree: Path, only: Collection[str] = ()) -> None:
    """Unpacks a verified sdist, or these files of it, without its top folder, and
    without the stray .git entries that it ships.
    """
    tree.mkdir(parents=True)
    with tarfile.open(sdist) as tar:
        # absent before 3.10.12
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        for member in tar:
            member.name = member.name.partition("/")[2]
            if (
                member.name
                and ".git" not in member.name.split("/")
                and (not only or member.name in only)
            ):
                tar.extract(member, tree)


def touched_files(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.M)


def apply_patches(fork: Fork, tree: Path) -> list[str]:
    """Applies what is not applied yet; returns one line for each patch that failed."""
    stamp = tree / STAMP
    applied = dict(json.loads(stamp.read_text())) if stamp.exists() else {}
    failures = []
    for patch in fork.patches:
        content = digest(patch.read_bytes())
        if patch.name in applied:
            if applied[patch.name] != content:
                failures.append(
                    f"{patch.name}: the tree holds another version of it; unpack the sdist again"
                )
            continue
        files = [tree / name for name in touched_files(patch)]
        before = [f.read_bytes() if f.exists() else None for f in files]
        done = git(tree, "apply", "--whitespace=nowarn", str(patch.resolve()))
        if done.returncode:
            failures.append(
                f"{patch.name}: " + "; ".join(done.stderr.splitlines() or ["git apply failed"])
            )
            continue
        after = [f.read_bytes() if f.exists() else None for f in files]
        still = [
            str(f.relative_to(tree)) for f, old, new in zip(files, before, after) if old == new
        ]
        if still or not files:
            where = ", ".join(still) or "any file"
            failures.append(
                f"{patch.name}: git apply reported success but changed nothing in {where}"
            )
            continue
        applied[patch.name] = content
        stamp.write_text(json.dumps(list(applied.items())))
    return failures


def copy_sources(fork: Fork, tree: Path) -> None:
    for path, place in fork.sources:
        (tree / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tree / place)


def patched_tree(fork: Fork, sdist: Path, tree: Path) -> None:
    """The pristine release with patches and own sources, all or nothing."""
    unpack(sdist, tree)
    failures = apply_patches(fork, tree) + source_conflicts(fork, tree)
    if failures:
        raise ForkError("The fork's sources cannot be made:\n  " + "\n  ".join(failures))
    copy_sources(fork, tree)


def source_conflicts(fork: Fork, tree: Path) -> list[str]:
    """Own files that would replace a file of the release, or each other. Ask before
    copy_sources.
    """
    places = [place for _, place in fork.sources]
    replaced = [
        f"{place}: the release has a file of this name"
        for place in places
        if (tree / place).exists()
    ]
    return replaced + [
        f"{place}: two of our files want this place"
        for place in set(places)
        if places.count(place) > 1
    ]


def header_failures(patch: Path) -> Iterator[str]:
    text = patch.read_text()
    header = text.partition("\ndiff --git ")[0]
    if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", patch.name):
        yield f"{patch.name}: expected a name like 0004-what-it-does.patch"
    if not header.startswith(f"From {'0' * 40} "):
        yield f"{patch.name}: expected mail format with a zeroed hash in the first line"
    reason = re.search(r"^Reason: (.+)$", header, re.M)
    if not reason or reason[1] not in REASONS:
        yield f"{patch.name}: expected a line 'Reason: ' with one of {', '.join(REASONS)}"


def check(fork: Fork, sdist: Path) -> list[str]:
    """Every way in which the patch set is not sound, one line each. Raises only for a
    wrong sdist.
    """
    verify_sdist(fork, sdist)
    failures = [line for patch in fork.patches for line in header_failures(patch)]
    numbers = [patch.name[:4] for patch in fork.patches]
    failures += [
        f"{n}: two patches have this number" for n in sorted(set(numbers)) if numbers.count(n) > 1
    ]
    with tempfile.TemporaryDirectory(prefix="moeoff-check-") as folder:
        tree = Path(folder) / "tree"
        touched, version = (
            {name for patch in fork.patches for name in touched_files(patch)},
            "llama_cpp/__init__.py",
        )
        unpack(sdist, tree, {version, *touched, *(place for _, place in fork.sources)})
        failures += source_conflicts(fork, tree)
        to_send = [
            patch for patch in fork.patches if "\nReason: upstreamable\n" in patch.read_text()
        ]
        not_alone = [
            patch.name
            for patch in to_send
            if git(tree, "apply", "--check", str(patch.resolve())).returncode
        ]
        failures += apply_patches(fork, tree)
        failing = {line.partition(":")[0] for line in failures}
        failures += [
            f"{name}: needs another patch, so that it cannot be sent upstream"
            for name in not_alone
            if name not in failing
        ]
        files = sorted(tree / name for name in touched)
        once = [f.read_bytes() for f in files if f.exists()]
        failures += [
            f"second run: {line}" for line in apply_patches(fork, tree) if line not in failures
        ]
        if once != [f.read_bytes() for f in files if f.exists()]:
            failures.append("applying the patches a second time changed the tree")
        init = (tree / version).read_text()
        if f'__version__ = "{fork.local_version}"' not in init:
            failures.append(
                f"llama_cpp/__init__.py: expected version {fork.local_version} (pin.json) after"
                " patching"
            )
    return failures


def make_tree(fork: Fork, sdist: Path, tree: Path) -> None:
    """A git repository for editing: the release as first commit (tag `pristine`), then
    one commit for each patch.
    """
    if tree.exists() and any(tree.iterdir()):
        raise ForkError(f"{tree} is not empty: name a folder that does not exist yet.")
    verify_sdist(fork, sdist)
    if tree.exists():
        tree.rmdir()
    unpack(sdist, tree)
    git_or_fail(tree, "init", "-q", "-b", "main")
    # -f: the release's own .gitignore names folders that it ships
    git_or_fail(tree, "add", "-A", "-f", ".")
    git_or_fail(tree, "commit", "-q", "-m", f"{fork.name} {fork.version}")
    git_or_fail(tree, "tag", "pristine")
    if fork.patches:
        git_or_fail(tree, "am", "-q", "--keep-cr", *(str(p.resolve()) for p in fork.patches))
    with open(tree / ".git/info/exclude", "a") as exclude:
        exclude.writelines(f"/{place}\n" for _, place in fork.sources)
    copy_sources(fork, tree)


def refresh(fork: Fork, tree: Path) -> list[str]:
    """Writes the patch files anew from the tree's commits; returns their names. A title
    keeps its number.
    """
    if git(tree, "rev-parse", "-q", "--verify", "refs/tags/pristine").returncode:
        raise ForkError(f"{tree} was not made by `fork.py tree`: it has no tag `pristine`.")
    if dirty := git_or_fail(tree, "status", "--porcelain", "--untracked-files=all"):
        raise ForkError(f"{tree} has changes that are not committed:\n{dirty.rstrip()}")
    numbers = {patch.name[5:]: int(patch.name[:4]) for patch in fork.patches}
    written: dict[str, bytes] = {}
    number = 0
    with tempfile.TemporaryDirectory(prefix="moeoff-refresh-") as out:
        # Full index lines and no diffstat: both would otherwise depend on the
        # repository's size or the terminal's.
        options = [
            "--zero-commit",
            "--no-signature",
            "--no-numbered",
            "--full-index",
            "--no-stat",
            "--no-renames",
        ]
        git_or_fail(tree, "format-patch", "-q", *options, "-o", out, "pristine..HEAD")
        for path in sorted(Path(out).glob("*.patch")):
            title = path.name[5:].lower()
            number = max(number + 1, numbers.get(title, 0))
            written[f"{number:04d}-{title}"] = path.read_bytes()
    for patch in fork.patches:
        if patch.name not in written:
            patch.unlink()
    for name, content in written.items():
        (fork.folder / name).write_bytes(content)
    return list(written)


# Builds, in the cache


def cache_root() -> Path:
    """$MOEOFF_CACHE, else $XDG_CACHE_HOME/moeoff, else ~/.cache/moeoff; created, with
    links resolved.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("MOEOFF_CACHE") or Path(base) / "moeoff")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForkError(
            f"{root} cannot be made ({error.strerror}): set MOEOFF_CACHE to a writable folder."
        ) from None
    return root.resolve()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Holds an exclusive lock; yields its descriptor, with which a child can keep it if
    this process is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another build is running (lock {path}); waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def compiler(variable: str, names: tuple[str, ...]) -> str:
    """The compiler that CMake will choose, and its version."""
    command = (
        shlex.split(os.environ.get(variable, ""))
        or [name for name in names if shutil.which(name)][:1]
    )
    if not command or not shutil.which(command[0]):
        missing = command[0] if command else " or ".join(names)
        raise ForkError(
            f"No compiler found ({missing}): install a C and C++ compiler, or name them in CC and"
            " CXX."
        )
    done = subprocess.run([*command, "--version"], text=True, capture_output=True)
    return f"{shlex.join(command)} {done.stdout.partition(chr(10))[0]}"


def cpu_flags() -> str:
    """The CPU as -march=native would see it."""
    if "-DGGML_NATIVE=OFF" in os.environ.get("CMAKE_ARGS", ""):
        return platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            lines = {
                line for line in cpuinfo if re.match(r"flags|Features|model name|CPU part", line)
            }
        return "".join(sorted(lines))
    except OSError:
        return platform.processor() + platform.machine() + platform.version()


def place_key(fork: Fork) -> str:
    """Key of the folder that is compiled in: everything but patches and sources."""
    compilers = compiler("CC", ("cc", "gcc", "clang")) + compiler("CXX", ("c++", "g++", "clang++"))
    settings = [f"{name}={os.environ.get(name, '')}" for name in COMPILERS]
    parts = (fork.sha256, *flags(tests=True), *settings, compilers, cpu_flags(), sys.platform)
    return digest(*(part.encode() for part in parts))[:16]


def full_key(fork: Fork, page: Path | None = None) -> str:
    """Key of what is made from all of it; `page` is the web page's folder, which has
    its own key as its name.
    """
    return digest(
        place_key(fork).encode(), fork.digest().encode(), page.name.encode() if page else b""
    )[:16]


def flags(tests: bool) -> list[str]:
    """CMake's arguments, all of them each time: the wheels and the tests take turns in
    one build folder.
    """
    # the server needs common and tools, of which only what is asked for is compiled
    parts = [
        "-DLLAMA_BUILD_COMMON=ON",
        "-DLLAMA_BUILD_TOOLS=ON",
        "-DLLAMA_BUILD_SERVER=ON",
        f"-DLLAMA_BUILD_TESTS={'ON' if tests else 'OFF'}",
    ]
    return [*DEFAULT_FLAGS, *shlex.split(os.environ.get("CMAKE_ARGS", "")), *FIXED_FLAGS, *parts]


def run_logged(title: str, command: list[str], log: Path, lock: int, **environment: str) -> None:
    """Runs a command with its output in a log; of ninja's output, a line for every
    tenth of the way is shown.
    """
    say(f"{title} ...")
    shown = -1
    tail: deque[str] = deque(maxlen=30)
    log.parent.mkdir(parents=True, exist_ok=True)
    # The child inherits the lock: should this process be killed, a second build still
    # waits for what it left running.
    with (
        open(log, "a") as out,
        subprocess.Popen(
            command,
            env={**os.environ, **environment},
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
        ) as child,
    ):
        assert child.stdout is not None  # for type checkers: PIPE was asked for
        for line in child.stdout:
            out.write(line)
            tail.append(line)
            if (step := re.match(r"\s*\[(\d+)/(\d+)\]", line)) and int(step[1]) * 10 // int(
                step[2]
            ) > shown:
                shown = int(step[1]) * 10 // int(step[2])
                say(f"  {shown * 10:3d} %  ({step[1]} of {step[2]} steps)")
    if child.returncode:
        end = "".join(tail).rstrip()
        raise ForkError(
            f"{title} failed (exit {child.returncode}); the whole log is {log}, its end:\n{end}"
        )


@dataclass(frozen=True)
class Tools:
    """A virtual environment for building: its python, and the variables that a build
    runs with.
    """

    python: Path
    environment: dict[str, str]


def tool_environment(cache: Path, lock: int) -> Tools:
    """Made at its first use; cmake and ninja come from the package index only where
    PATH has none.
    """
    needs = [BACK_END] + [name for name in ("cmake", "ninja") if not shutil.which(name)]
    home = cache / f"tools-{digest(sys.version.encode(), *(n.encode() for n in needs))[:8]}"
    python = home / "bin/python"
    ready = home / "ready"  # written last, so that an interrupted set-up is made anew
    if not ready.exists():
        shutil.rmtree(home, ignore_errors=True)
        try:
            venv.create(home, with_pip=True)
        except subprocess.CalledProcessError:
            raise ForkError(
                "Python's venv module does not work here (Debian: install python3-venv)."
            ) from None
        log = cache / "tools.log"
        run_logged(
            "fetching build tools",
            [str(python), "-m", "pip", "install", "-U", "pip", *needs],
            log,
            lock,
        )
        ready.touch()
    environment = {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # llama.cpp would report the version of a repository around the cache
        "GIT_CEILING_DIRECTORIES": str(cache),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": (
            os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        ),
    }
    return Tools(python, environment)


def get_sdist(fork: Fork, cache: Path, lock: int) -> Path:
    """The verified release, from the cache or through pip."""
    sdist = cache / "sdist" / fork.sdist_name
    if not sdist.exists():
        tools = tool_environment(cache, lock)
        part = cache / "sdist.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        # pip compares the hash itself before it runs any of the release's code to read
        # its metadata.
        pin = part / "pin.txt"
        pin.write_text(f"{fork.name}=={fork.version} --hash=sha256:{fork.sha256}\n")
        options = [
            "--no-deps",
            "--no-binary",
            fork.name,
            "--no-build-isolation",
            "--progress-bar",
            "off",
        ]
        options += ["--require-hashes", "-r", str(pin), "-d", str(part)]
        command = [str(tools.python), "-m", "pip", "download", *options]
        try:
            run_logged(
                f"fetching {fork.sdist_name}",
                command,
                cache / "fetch.log",
                lock,
                **tools.environment,
            )
            verify_sdist(fork, part / fork.sdist_name)
            sdist.parent.mkdir(exist_ok=True)
            os.replace(part / fork.sdist_name, sdist)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    verify_sdist(fork, sdist)
    return sdist


# The server's web page. It is optional: a server without it does the rest. CMake itself
# neither runs npm nor downloads anything.


class NoPage(Exception):
    """Why the page cannot be built, as the end of a sentence."""


def node_version() -> str:
    """The version of Node.js on PATH, with which npm runs."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NoPage(f"Node.js ({OLDEST_NODE} or newer) and npm are not on PATH")
    version = subprocess.run(["node", "--version"], text=True, capture_output=True).stdout.strip()
    number = re.match(r"v(\d+)\.", version)
    if not number or int(number[1]) < OLDEST_NODE:
        raise NoPage(
            f"Node.js {OLDEST_NODE} or newer is needed, found"
            f" {version or 'one that does not say its version'}"
        )
    return version


def page_folder(fork: Fork, cache: Path) -> Path:
    """Changes with the page's sources, which are the release's but for our patches, and
    with Node.js.
    """
    parts = [fork.sha256.encode(), node_version().encode(), json.dumps(PAGE_SETTINGS).encode()]
    for patch in fork.patches:
        if any(name.startswith(f"{PAGE_SOURCES}/") for name in touched_files(patch)):
            parts.append(patch.read_bytes())
    return cache / "webpage" / digest(*parts)[:16]


def find_page(fork: Fork, cache: Path, anew: bool = False) -> Path:
    """The page's folder, built at its first use; where that has failed, tried again
    only if `anew`.
    """
    home = page_folder(fork, cache)
    failed = home.with_suffix(".failed")
    if not home.exists():
        if failed.exists() and not anew:
            raise NoPage(f"npm has failed, see {failed}; `fork.py page` tries again")
        with locked(cache / "lock") as lock:
            if not home.exists():  # waiting for the lock may have taken minutes
                make_page(fork, get_sdist(fork, cache, lock), home, failed, lock)
    return home


def optional_page(fork: Fork, cache: Path) -> Path | None:
    """None, and one line on stderr the first time, where it cannot be built."""
    told = cache / "wheels" / full_key(fork) / "told"  # first: without a compiler nothing is built
    try:
        return find_page(fork, cache)
    except NoPage as reason:
        if not told.exists():
            say(f"The server will have no web page: {reason}.")
        return None


def built_page(fork: Fork, cache: Path) -> Path | None:
    """The page if it is in the cache."""
    with contextlib.suppress(NoPage):
        if (home := page_folder(fork, cache)).exists():
            return home
    return None


def make_page(fork: Fork, sdist: Path, home: Path, failed: Path, lock: int) -> None:
    """Builds the page in a tree of its own, as npm puts hundreds of megabytes beside
    its sources.
    """
    part, log = home.with_suffix(".part"), home.with_suffix(".log")
    shutil.rmtree(part, ignore_errors=True)
    try:
        patched_tree(fork, sdist, part)
        with open(log, "w") as out:
            wrong = run_npm(part / PAGE_SOURCES, out.fileno(), lock)
        if not wrong and (
            lacks := [name for name in PAGE_NEEDS if not any((part / PAGE).rglob(name))]
        ):
            wrong = f"npm built none with {', '.join(lacks)}"
        if wrong:
            os.replace(log, failed)
            raise NoPage(f"{wrong}, see {failed}; `fork.py page` tries again")
        os.rename(part / PAGE, home)
        log.unlink()
        failed.unlink(missing_ok=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def run_npm(sources: Path, out: int, lock: int) -> str:
    """Builds the page; returns what went wrong, or nothing."""
    environment = {**os.environ, **PAGE_SETTINGS}
    for command in NPM:
        say(f"building the web page ({' '.join(command[:3])}) ...")
        # The child inherits the lock, as a compiler does.
        try:
            done = subprocess.run(
                command,
                cwd=sources,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(lock,),
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            # a registry that cannot be reached is asked again and again
            return f"`{' '.join(command)}` took more than {PATIENCE // 60} minutes"
        if done.returncode:
            return f"`{' '.join(command)}` failed (exit {done.returncode})"
    return ""


def synchronize(new: Path, tree: Path) -> None:
    """Makes tree equal to new; an unchanged file keeps its time, so that it is not
    compiled again.
    """

    def relative(base: Path) -> set[Path]:
        return {p.relative_to(base) for p in base.rglob("*") if p.is_symlink() or not p.is_dir()}

    names = relative(new)
    for name in relative(tree) - names:
        (tree / name).unlink()
    for name in names:
        target = tree / name
        if not target.exists() or not filecmp.cmp(new / name, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, target)
            os.utime(target)


def prepare(fork: Fork, cache: Path, lock: int, page: Path | None) -> tuple[Path, Path]:
    """The patched tree, with the web page if there is one, and its build folder, up to
    date.
    """
    sdist = get_sdist(fork, cache, lock)
    work = cache / f"work-{place_key(fork)}"
    say(f"patching ({len(fork.patches)} patches, {len(fork.sources)} own files) ...")
    shutil.rmtree(work / "new", ignore_errors=True)
    patched_tree(fork, sdist, work / "new")
    if page:
        shutil.copytree(page, work / "new" / PAGE)
    synchronize(work / "new", work / "tree")
    shutil.rmtree(work / "new")
    return work / "tree", work / "build"


def cached(
    fork: Fork,
    cache: Path,
    kind: str,
    make: Callable[..., None],
    page: Path | None = None,
    tools: Callable[..., Tools | None] = tool_environment,
) -> Path:
    """The folder cache/kind/<key>, which `make` fills at its first use. It has that
    name only once it is complete.
    """
    home = cache / kind / full_key(fork, page)
    if home.exists():
        return home
    with locked(cache / "lock") as lock:
        # anew: waiting for the lock may have taken minutes
        home = cache / kind / full_key(fork, page)
        if not home.exists():
            tree, place = prepare(fork, cache, lock, page)
            if full_key(fork, page) != home.name:
                raise ForkError(
                    "A patch or source was edited while it was being copied: run it again."
                )
            part = cache / f"{kind}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(fork, part, tree, place, tools(cache, lock), lock)
            home.parent.mkdir(exist_ok=True)
            os.rename(part, home)
    return home


def check_wheel(fork: Fork, wheel: Path) -> None:
    """One file for each library, all in one folder, no version in a name: else two ggml
    could end up in one process.
    """
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if LIBRARY.search(name)]
    wrong = [
        name for name in libraries if not re.fullmatch(r"llama_cpp/lib/lib[\w-]+\.(so|dylib)", name)
    ]
    needed = {
        "libllama",
        "libggml",
        "libggml-base",
        "libggml-cpu",
        "libllama-server-impl",
        TEMPLATES,
    }
    missing = needed - {Path(name).name.partition(".")[0] for name in names}
    if wrong or missing or f"-{fork.local_version}-" not in wheel.name:
        raise ForkError(
            f"{wheel.name} is not as expected: no {wrong}, these too: {sorted(missing)}, version"
            f" {fork.local_version}."
        )


def make_wheel(fork: Fork, part: Path, tree: Path, place: Path, tools: Tools, lock: int) -> None:
    settings = [
        f"--config-settings=build-dir={place}",
        f"--config-settings=build.targets=llama-server-impl;{TEMPLATES}",
    ]
    command = [
        str(tools.python),
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        *settings,
    ]
    log = place.parent / "wheel.log"
    log.unlink(missing_ok=True)
    environment = {**tools.environment, "CMAKE_ARGS": shlex.join(flags(tests=False))}
    run_logged(
        "compiling the libraries", [*command, "-w", str(part), str(tree)], log, lock, **environment
    )
    (wheel,) = part.glob("*.whl")
    check_wheel(fork, wheel)


def build(fork: Fork, cache: Path, npm: bool = True) -> Path:
    """The fork's wheel, with the server's web page in it where that can be built, or
    without npm where it has been.
    """
    page = optional_page(fork, cache) if npm else built_page(fork, cache)
    home = cached(fork, cache, "wheels", make_wheel, page)
    if npm and page is None:
        (home / "told").touch()
    (wheel,) = home.glob("*.whl")
    return wheel


def program(fork: Fork, cache: Path, name: str) -> Path:
    """One of llama.cpp's programs, by its name in PROGRAMS, with the libraries that it
    finds through its relative run path.
    """
    target = PROGRAMS[name]

    def make(fork: Fork, part: Path, tree: Path, place: Path, tools: Tools, lock: int) -> None:
        log = place.parent / f"{target}.log"
        log.unlink(missing_ok=True)
        configure = ["cmake", "-S", str(tree), "-B", str(place), *flags(tests=True)]
        run_logged("configuring the tests", configure, log, lock, **tools.environment)
        command = ["cmake", "--build", str(place), "--target", target]
        run_logged(f"compiling {target}", command, log, lock, **tools.environment)
        for path in (place / "bin").iterdir():
            if path.name == target or LIBRARY.search(path.name):
                shutil.copy2(path, part)

    return (
        cached(
            fork, cache, name, make, optional_page(fork, cache) if name == "llama-server" else None
        )
        / target
    )


def pinned_sdist(fork: Fork, cache: Path) -> Path:
    with locked(cache / "lock") as lock:
        return get_sdist(fork, cache, lock)


# Another release

# in addition to what the patches touch: what moeoff/llamacpp/llama.py and the server
# depend on
WATCHED = ("llama_cpp/llama.py", "llama_cpp/_internals.py", "llama_cpp/llama_chat_format.py", "llama_cpp/_logger.py", "vendor/llama.cpp/include/llama.h",
           "vendor/llama.cpp/ggml/include/ggml.h", "vendor/llama.cpp/src/llama-arch.cpp", "vendor/llama.cpp/common/arg.cpp")  # fmt: skip
STEPS = (
    ["make", "patches-check"],
    [".ci/run"],
    [str(ROOT / ".venv/bin/python"), "scripts/faults/faults.py", "advisories"],
)


def llama_cpp_of(tree: Path) -> str:
    """The commit that the release's change log names for its own version, the first
    that it has.
    """
    commit = re.search(
        r"ggml-org/llama\.cpp@(\w+)", (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    )
    return commit[1] if commit else "unknown"


def changed(old: Path, new: Path, names: list[str]) -> list[str]:
    """A line for each file that differs."""
    lines = []
    for name in names:
        before, after = (
            (
                (tree / name).read_text(encoding="utf-8", errors="replace").splitlines()
                if (tree / name).exists()
                else None
            )
            for tree in (old, new)
        )
        if before == after:
            continue
        if before is None or after is None:
            lines.append(f"{name}: {'is new' if before is None else 'is gone'}")
            continue
        diff = [
            line[0]
            for line in difflib.unified_diff(before, after, n=0, lineterm="")
            if line[:3] not in ("+++", "---")
        ]
        lines.append(f"{name}: +{diff.count('+')} -{diff.count('-')}")
    return lines


def report(old: Fork, new: Fork) -> int:
    """Prints what has changed; the number of patches that do not fit."""
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / "old", Path(folder) / "new"]
        for fork, tree in zip((old, new), trees):
            unpack(pinned_sdist(fork, cache_root()), tree)
        print(
            f"{old.name} {old.version} -> {new.version}; llama.cpp {llama_cpp_of(trees[0])} ->"
            f" {llama_cpp_of(trees[1])}"
        )
        names = sorted(
            {name for patch in new.patches for name in touched_files(patch)} | set(WATCHED)
        )
        lines = changed(*trees, names)
        print(
            f"{len(lines)} of {len(names)} files that patches touch or moeoff depends on have"
            " changed:"
        )
        print("".join(f"  {line}\n" for line in lines), end="")
    failures = check(new, pinned_sdist(new, cache_root()))
    print(
        "every patch fits"
        if not failures
        else "".join(f"does not fit: {line}\n" for line in failures).rstrip()
    )
    return len(failures)


def repin(old: Fork, version: str, sha256: str, look: bool) -> int:
    """Tells what another release changes, and unless that is all, changes the pin and
    runs every test; stops at the first that fails.

    The pin stays changed then, so that the patches can be mended (`tree`, `refresh`);
    `git checkout llamacpp_patches/pin.json` takes it back.
    """
    new = replace(
        old,
        version=version,
        sha256=sha256.lower(),
        number=old.number if version == old.version else 1,
    )
    n_failures = report(old, new)
    if look:
        return 0
    pin = {"name": new.name, "version": new.version, "sha256": new.sha256, "fork": new.number}
    (new.folder / "pin.json").write_text(json.dumps(pin, indent=2) + "\n")
    print(f"llamacpp_patches/pin.json: {new.version}")
    if n_failures:
        say(
            "mend the patches first: python scripts/build/fork.py tree DIR, commit there, make"
            " patches-refresh DIR=DIR; then run this again"
        )
        return 1
    for command in STEPS:
        print(f"--- {' '.join(command)}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            say(f"{' '.join(command)} failed")
            return 1
    print(
        "every test passes: commit llamacpp_patches, and raise what tests and docs name of the"
        " version"
    )
    return 0


def ends_in_words(main: Callable[[list[str] | None], int]) -> Callable[[list[str] | None], int]:
    """A program's main function, with a sentence where it cannot go on, or is
    interrupted.
    """

    @functools.wraps(main)
    def ending(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except NoPage as reason:
            say(f"There is no web page: {reason}.")
        except ForkError as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("interrupted; run it again to go on from here")
            return 130
        return 1

    return ending


@ends_in_words
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    wheel = commands.add_parser(
        "build", help="make the wheel, or find it in the cache; prints its path"
    )
    wheel.add_argument(
        "--no-npm",
        action="store_true",
        help="with the server's web page only if that is in the cache",
    )
    for name, target in PROGRAMS.items():
        commands.add_parser(name, help=f"make {target}; prints its path")
    commands.add_parser(
        "page",
        help="build the server's web page, also where that has failed before; prints its folder",
    )
    commands.add_parser("check", help="do all patches apply cleanly to the pinned release?")
    for name, text in (
        ("tree", "unpack the release into DIR as a git repository, one commit for each patch"),
        ("refresh", "write the patch files anew from DIR's commits"),
    ):
        commands.add_parser(name, help=text).add_argument("dir", metavar="DIR", type=Path)
    other = commands.add_parser(
        "repin",
        help=(
            "move to another release of llama-cpp-python: say what has changed, change the pin, run"
            " every test"
        ),
    )
    other.add_argument(
        "--look", action="store_true", help="print what has changed, and change nothing"
    )
    other.add_argument("version")
    other.add_argument(
        "sha256", help="of the release's sdist, as its page on the package index says"
    )
    options = parser.parse_args(arguments)
    fork = Fork.load()
    if options.command == "refresh":
        print("\n".join(refresh(fork, options.dir)))
        return 0
    if options.command == "repin":
        return repin(fork, options.version, options.sha256, options.look)
    cache = cache_root()
    if options.command == "build":
        print(build(fork, cache, npm=not options.no_npm))
    elif options.command in PROGRAMS:
        print(program(fork, cache, options.command))
    elif options.command == "page":
        print(find_page(fork, cache, anew=True))
    elif options.command == "tree":
        make_tree(fork, pinned_sdist(fork, cache), options.dir)
        print(options.dir)
    elif failures := check(fork, pinned_sdist(fork, cache)):
        print("\n".join(failures))
        return 1
    else:
        print(
            f"{len(fork.patches)} patches and {len(fork.sources)} own files fit {fork.name}"
            f" {fork.version}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
