"""llama-server's web page, built once with npm from the release's own sources. It is optional: a server without it does the rest.

    webpage/<key>/         the page, which CMake finds in the tree and compiles in
    webpage/<key>.failed   what npm said, where it could not be built

Knows nothing about wheels. CMake itself neither runs npm nor downloads anything (forkcache.FIXED_FLAGS, and a patch).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import forktree
from forkcache import locked
from forktree import Fork, digest, say

SOURCES = "vendor/llama.cpp/tools/ui"
DIST = f"{SOURCES}/dist"
OLDEST_NODE = 20
PATIENCE = 900  # seconds for each of npm's commands, which take 2 to 4 minutes
NPM = (
    # --include: whoever sets NODE_ENV=production would otherwise get no build tools
    ("npm", "ci", "--include=dev", "--no-audit", "--no-fund"),
    ("npm", "run", "build"),
)
# What the release's CMake script insists on: a page without one of them would end the whole build.
NEEDED = ("index.html", "manifest.webmanifest", "sw.js", "build.json", "version.json", "bundle*.js", "bundle*.css", "workbox*.js")


class NoPage(Exception):
    """Why the page cannot be built, as the end of a sentence."""


def node_version() -> str:
    """Of Node.js on PATH, with which npm runs."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NoPage(f"Node.js ({OLDEST_NODE} or newer) and npm are not on PATH")
    version = subprocess.run(["node", "--version"], text=True, capture_output=True).stdout.strip()
    number = re.match(r"v(\d+)\.", version)
    if not number or int(number[1]) < OLDEST_NODE:
        raise NoPage(f"Node.js {OLDEST_NODE} or newer is needed, found {version or 'one that does not say its version'}")
    return version


def page_key(fork: Fork, node: str) -> str:
    """Changes with the page's sources, which are the release's but for our patches, and with Node.js."""
    parts = [fork.sha256.encode(), node.encode()]
    for patch in fork.patches:
        if any(name.startswith(f"{SOURCES}/") for name in forktree.touched_files(patch)):
            parts.append(patch.read_bytes())
    return digest(*parts)[:16]


def find(fork: Fork, cache: Path, get_sdist: Callable[[Fork, Path, int], Path], settled: bool = False) -> Path | None:
    """The page's folder, built at its first use; None, and one line on stderr, where it cannot be built.

    `settled`: a missing npm was reported before, and a build that failed is not tried again.
    """
    try:
        home = cache / "webpage" / page_key(fork, node_version())
        if not home.exists():
            if settled and failure(home).exists():
                return None
            settled = False  # what goes wrong from here on is new
            with locked(cache / "lock") as lock:
                if not home.exists():  # waiting for the lock may have taken minutes
                    make(fork, get_sdist(fork, cache, lock), home, lock)
        return home
    except NoPage as reason:
        if not settled:
            say(f"The server will have no web page: {reason}.")
        return None


def failure(home: Path) -> Path:
    """What npm said when it failed."""
    return home.with_suffix(".failed")


def make(fork: Fork, sdist: Path, home: Path, lock: int) -> None:
    """Builds the page in a tree of its own, as npm puts hundreds of megabytes beside its sources."""
    part, log = home.with_suffix(".part"), home.with_suffix(".log")
    shutil.rmtree(part, ignore_errors=True)
    try:
        forktree.patched_tree(fork, sdist, part)
        with open(log, "w") as out:
            wrong = run_npm(part / SOURCES, out.fileno(), lock) or missing(part / DIST)
        if wrong:
            os.replace(log, failure(home))
            raise NoPage(f"{wrong}, see {failure(home)}; `fork.py page` tries again")
        os.rename(part / DIST, home)
        log.unlink()
        failure(home).unlink(missing_ok=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def run_npm(sources: Path, out: int, lock: int) -> str:
    """What went wrong, or nothing."""
    environment = {**os.environ, "LLAMA_UI_OUT_DIR": "dist"}
    for command in NPM:
        say(f"building the web page ({' '.join(command[:3])}) ...")
        # The child inherits the lock, as a compiler does.
        try:
            done = subprocess.run(command, cwd=sources, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, pass_fds=(lock,), timeout=PATIENCE)
        except subprocess.TimeoutExpired:  # a registry that cannot be reached is asked again and again
            return f"`{' '.join(command)}` took more than {PATIENCE // 60} minutes"
        if done.returncode:
            return f"`{' '.join(command)}` failed (exit {done.returncode})"
    return ""


def missing(dist: Path) -> str:
    """What the page lacks, or nothing."""
    lacks = [name for name in NEEDED if not any(dist.rglob(name))]
    return f"npm built none with {', '.join(lacks)}" if lacks else ""
