#!/usr/bin/env python3
"""Builds moeoff's llama-cpp-python: a pinned release, a few patches, and our own C++ sources.

Everything lives in the cache folder (MOEOFF_CACHE, else XDG_CACHE_HOME/moeoff, else ~/.cache/moeoff):

    sdist/           the verified release
    tools-*/         virtual environment with the build back end, and with cmake and ninja where PATH has none
    work-<place>/    source tree and CMake build folder; <place> depends on release, flags, compiler and CPU only, so
                     that after an edit of a patch or a source just what it touches is compiled again
    webpage/<key>/   the server's web page, built with npm where that is there (webpage.py)
    wheels/<key>/    finished wheels; <key> depends on everything, also on whether and which page is in
    archs/<key>/     test-llama-archs with the libraries that it was linked to
    perplexity/<key>/, llama-bench/<key>/, llama-server/<key>/  llama.cpp's programs of these names, likewise

The compiler is steered as usual: CMAKE_ARGS="-DGGML_CUDA=ON" (GGML_METAL, GGML_VULKAN, ...), CC, CXX, CFLAGS, CXXFLAGS.
Progress goes to stderr; the last line on stdout is the result's path.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import forktree
from forktree import Fork, ForkError, digest, say

try:
    import webpage
    from forkcache import cache_root, flags, full_key, locked, place_key
except ModuleNotFoundError as error:  # fcntl, which Windows lacks
    sys.exit(f"The fork is built on Linux or macOS; this system has no {error.name}.")

BACK_END = "scikit-build-core[pyproject]>=0.10,<2"
TEMPLATES = "moeoff-templates"  # the program that runs chat templates
LIBRARY = re.compile(r"(?:^|/)lib[\w-]+\.(?:so|dylib)[\d.]*$")


def run_logged(title: str, command: list[str], log: Path, lock: int, **environment: str) -> None:
    """Runs a command with its output in a log; of ninja's output, a line for every tenth of the way is shown."""
    say(f"{title} ...")
    shown = -1
    tail: deque[str] = deque(maxlen=30)
    log.parent.mkdir(parents=True, exist_ok=True)
    # The child inherits the lock: should this process be killed, a second build still waits for what it left running.
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
            if (step := re.match(r"\s*\[(\d+)/(\d+)\]", line)) and int(step[1]) * 10 // int(step[2]) > shown:
                shown = int(step[1]) * 10 // int(step[2])
                say(f"  {shown * 10:3d} %  ({step[1]} of {step[2]} steps)")
    if child.returncode:
        end = "".join(tail).rstrip()
        raise ForkError(f"{title} failed (exit {child.returncode}); the whole log is {log}, its end:\n{end}")


@dataclass(frozen=True)
class Tools:
    """A virtual environment for building: its python, and the variables that a build runs with."""

    python: Path
    environment: dict[str, str]


def tool_environment(cache: Path, lock: int) -> Tools:
    """Made at its first use; cmake and ninja come from the package index only where PATH has none."""
    needs = [BACK_END] + [name for name in ("cmake", "ninja") if not shutil.which(name)]
    home = cache / f"tools-{digest(sys.version.encode(), *(n.encode() for n in needs))[:8]}"
    python = home / "bin/python"
    ready = home / "ready"  # written last, so that an interrupted set-up is made anew
    if not ready.exists():
        shutil.rmtree(home, ignore_errors=True)
        try:
            venv.create(home, with_pip=True)
        except subprocess.CalledProcessError:
            raise ForkError("Python's venv module does not work here (Debian: install python3-venv).") from None
        log = cache / "tools.log"
        run_logged("fetching build tools", [str(python), "-m", "pip", "install", "-U", "pip", *needs], log, lock)
        ready.touch()
    environment = {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "GIT_CEILING_DIRECTORIES": str(cache),  # llama.cpp would report the version of a repository around the cache
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1),
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
        # pip compares the hash itself before it runs any of the release's code to read its metadata.
        pin = part / "pin.txt"
        pin.write_text(f"{fork.name}=={fork.version} --hash=sha256:{fork.sha256}\n")
        options = ["--no-deps", "--no-binary", fork.name, "--no-build-isolation", "--progress-bar", "off"]
        options += ["--require-hashes", "-r", str(pin), "-d", str(part)]
        command = [str(tools.python), "-m", "pip", "download", *options]
        try:
            run_logged(f"fetching {fork.sdist_name}", command, cache / "fetch.log", lock, **tools.environment)
            forktree.verify_sdist(fork, part / fork.sdist_name)
            sdist.parent.mkdir(exist_ok=True)
            os.replace(part / fork.sdist_name, sdist)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    forktree.verify_sdist(fork, sdist)
    return sdist


def synchronize(new: Path, tree: Path) -> None:
    """Makes tree equal to new; an unchanged file keeps its time, so that it is not compiled again."""

    def relative(base: Path) -> set[Path]:
        return {p.relative_to(base) for p in base.rglob("*") if p.is_symlink() or not p.is_dir()}

    wanted = relative(new)
    for name in relative(tree) - wanted:
        (tree / name).unlink()
    for name in wanted:
        target = tree / name
        if not target.exists() or not filecmp.cmp(new / name, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / name, target)
            os.utime(target)


def prepare(fork: Fork, cache: Path, lock: int, page: Path | None) -> tuple[Path, Path]:
    """The patched tree, with the web page if there is one, and its build folder, up to date."""
    sdist = get_sdist(fork, cache, lock)
    work = cache / f"work-{place_key(fork)}"
    say(f"patching ({len(fork.patches)} patches, {len(fork.sources)} own files) ...")
    shutil.rmtree(work / "new", ignore_errors=True)
    forktree.patched_tree(fork, sdist, work / "new")
    if page:
        shutil.copytree(page, work / "new" / webpage.DIST)
    synchronize(work / "new", work / "tree")
    shutil.rmtree(work / "new")
    return work / "tree", work / "build"


def check_wheel(fork: Fork, wheel: Path) -> None:
    """One file for each library, all in one folder, no version in a name: else two ggml could end up in one process."""
    names = zipfile.ZipFile(wheel).namelist()
    libraries = [name for name in names if LIBRARY.search(name)]
    wrong = [name for name in libraries if not re.fullmatch(r"llama_cpp/lib/lib[\w-]+\.(so|dylib)", name)]
    found = {Path(name).name.partition(".")[0] for name in libraries}
    missing = ({"libllama", "libggml", "libggml-base", "libggml-cpu"} - found) | ({TEMPLATES} - {Path(name).name for name in names})
    if wrong or missing or f"-{fork.local_version}-" not in wheel.name:
        wanted = f"no {wrong}, these too: {sorted(missing)}, version {fork.local_version}"
        raise ForkError(f"{wheel.name} is not as expected: {wanted}.")


def cached(fork: Fork, cache: Path, kind: str, make: Callable[..., None], page: Path | None = None) -> Path:
    """The folder cache/kind/<key>, which `make` fills at its first use. It has that name only once it is complete."""
    home = cache / kind / full_key(fork, page)
    if home.exists():
        return home
    with locked(cache / "lock") as lock:
        home = cache / kind / full_key(fork, page)  # anew: waiting for the lock may have taken minutes
        if not home.exists():
            tree, place = prepare(fork, cache, lock, page)
            if full_key(fork, page) != home.name:
                raise ForkError("A patch or source was edited while it was being copied: run it again.")
            part = cache / f"{kind}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(fork, part, tree, place, tool_environment(cache, lock), lock)
            home.parent.mkdir(exist_ok=True)
            os.rename(part, home)
    return home


def make_wheel(fork: Fork, part: Path, tree: Path, place: Path, tools: Tools, lock: int) -> None:
    settings = [f"--config-settings=build-dir={place}", "--config-settings=build.targets=llama;llama-server-impl;moeoff-templates"]
    command = [str(tools.python), "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", *settings]
    log = place.parent / "wheel.log"
    log.unlink(missing_ok=True)
    environment = {**tools.environment, "CMAKE_ARGS": shlex.join(flags(tests=False))}
    run_logged("compiling the libraries", [*command, "-w", str(part), str(tree)], log, lock, **environment)
    (wheel,) = part.glob("*.whl")
    check_wheel(fork, wheel)


def find_page(fork: Fork, cache: Path) -> Path | None:
    settled = (cache / "wheels" / full_key(fork)).exists()  # then there is a wheel without, and what led to it is not tried again
    return webpage.find(fork, cache, get_sdist, settled)


def build(fork: Fork, cache: Path) -> Path:
    """The fork's wheel, with the server's web page in it where that can be built."""
    (wheel,) = cached(fork, cache, "wheels", make_wheel, find_page(fork, cache)).glob("*.whl")
    return wheel


def program_maker(target: str) -> Callable[..., None]:
    """For `cached`: one of llama.cpp's programs, with the libraries that it finds through its relative run path."""

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

    return make


def archs(fork: Fork, cache: Path) -> Path:
    """llama.cpp's test-llama-archs, which writes a small model for each architecture; shares the wheel's objects."""
    return cached(fork, cache, "archs", program_maker("test-llama-archs")) / "test-llama-archs"


def perplexity(fork: Fork, cache: Path) -> Path:
    """llama-perplexity, which `moeoff eval` must agree with."""
    return cached(fork, cache, "perplexity", program_maker("llama-perplexity")) / "llama-perplexity"


def llama_bench(fork: Fork, cache: Path) -> Path:
    """llama-bench, which `moeoff bench` must agree with where everything is in memory."""
    return cached(fork, cache, "llama-bench", program_maker("llama-bench")) / "llama-bench"


def llama_server(fork: Fork, cache: Path) -> Path:
    """llama-server, which `moeoff serve` must do everything of that it does; without hooks it is stock's."""
    return cached(fork, cache, "llama-server", program_maker("llama-server"), find_page(fork, cache)) / "llama-server"


def pinned_sdist(fork: Fork, cache: Path) -> Path:
    with locked(cache / "lock") as lock:
        return get_sdist(fork, cache, lock)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="make the wheel, or find it in the cache; prints its path")
    commands.add_parser("archs", help="make test-llama-archs (expert count: LLAMA_TEST_N_EXPERT); prints its path")
    commands.add_parser("perplexity", help="make llama-perplexity; prints its path")
    commands.add_parser("llama-bench", help="make llama-bench; prints its path")
    commands.add_parser("page", help="build the server's web page, also where that has failed before; prints its folder")
    commands.add_parser("llama-server", help="make llama-server; prints its path")
    commands.add_parser("check", help="do all patches apply cleanly to the pinned release?")
    for name, text in (
        ("tree", "unpack the release into DIR as a git repository, one commit for each patch"),
        ("refresh", "write the patch files anew from DIR's commits"),
    ):
        commands.add_parser(name, help=text).add_argument("dir", metavar="DIR", type=Path)
    options = parser.parse_args(arguments)
    try:
        fork = Fork.load()
        if options.command == "refresh":
            print("\n".join(forktree.refresh(fork, options.dir)))
            return 0
        cache = cache_root()
        makers = {"build": build, "archs": archs, "perplexity": perplexity, "llama-bench": llama_bench, "llama-server": llama_server}
        if options.command in makers:
            print(makers[options.command](fork, cache))
        elif options.command == "page":
            if not (page := webpage.find(fork, cache, get_sdist)):
                return 1
            print(page)
        elif options.command == "tree":
            forktree.make_tree(fork, pinned_sdist(fork, cache), options.dir)
            print(options.dir)
        elif failures := forktree.check(fork, pinned_sdist(fork, cache)):
            print("\n".join(failures))
            return 1
        else:
            print(f"{len(fork.patches)} patches and {len(fork.sources)} own files fit {fork.name} {fork.version}")
    except ForkError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
