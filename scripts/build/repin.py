"""Moves the fork to another release of llama-cpp-python: fetches it, says what has changed, changes the pin, and runs every test.

usage: repin.py [--look] VERSION SHA256        (of the release's sdist, as its page on the package index says; or: make repin VERSION=... SHA256=...)

First it prints, before anything is changed: the llama.cpp that the release has, which of our patches do not fit it, and of the files that our patches
touch or that moeoff depends on (docs/internals/patches.md) the ones that differ, with their sizes of change. Then, without --look, pin.json gets
the new version, and what .ci/run runs, and the list of advisories, run on it. If a step fails, it stops there: the pin stays changed, so that the
patches can be mended (`fork.py tree DIR`, `make patches-refresh`), and `git checkout llamacpp_patches/pin.json` takes it back.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import fork as build
import forktree
from forkcache import cache_root
from forktree import ROOT, Fork, ForkError

# beside what the patches touch: what moeoff/binding.py and the server depend on
WATCHED = ("llama_cpp/llama.py", "llama_cpp/_internals.py", "llama_cpp/llama_chat_format.py", "llama_cpp/_logger.py", "vendor/llama.cpp/include/llama.h",
           "vendor/llama.cpp/ggml/include/ggml.h", "vendor/llama.cpp/src/llama-arch.cpp", "vendor/llama.cpp/common/arg.cpp")  # fmt: skip
STEPS = (["make", "patches-check"], [".ci/run"], [str(ROOT / ".venv/bin/python"), "scripts/faults/advisories.py"])


def llama_cpp_of(tree: Path) -> str:
    """The commit that the release's change log names for its own version, the first that it has."""
    found = re.search(r"ggml-org/llama\.cpp@(\w+)", (tree / "CHANGELOG.md").read_text(encoding="utf-8"))
    return found[1] if found else "unknown"


def changed(old: Path, new: Path, names: list[str]) -> list[str]:
    """A line for each file that differs."""
    lines = []
    for name in names:
        before, after = ((tree / name).read_text(encoding="utf-8", errors="replace").splitlines() if (tree / name).exists() else None for tree in (old, new))
        if before == after:
            continue
        if before is None or after is None:
            lines.append(f"{name}: {'is new' if before is None else 'is gone'}")
            continue
        diff = [line[0] for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("+++", "---")]
        lines.append(f"{name}: +{diff.count('+')} -{diff.count('-')}")
    return lines


def report(old: Fork, new: Fork) -> int:
    """Prints what has changed; the number of patches that do not fit."""
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / "old", Path(folder) / "new"]
        for fork, tree in zip((old, new), trees):
            forktree.unpack(build.pinned_sdist(fork, cache_root()), tree)
        print(f"{old.name} {old.version} -> {new.version}; llama.cpp {llama_cpp_of(trees[0])} -> {llama_cpp_of(trees[1])}")
        names = sorted({name for patch in new.patches for name in forktree.touched_files(patch)} | set(WATCHED))
        lines = changed(*trees, names)
        print(f"{len(lines)} of {len(names)} files that patches touch or moeoff depends on have changed:")
        print("".join(f"  {line}\n" for line in lines), end="")
    failures = forktree.check(new, build.pinned_sdist(new, cache_root()))
    print("every patch fits" if not failures else "".join(f"does not fit: {line}\n" for line in failures).rstrip())
    return len(failures)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="print what has changed, and change nothing")
    parser.add_argument("version")
    parser.add_argument("sha256")
    options = parser.parse_args(arguments)
    try:
        old = Fork.load()
        new = dataclasses.replace(old, version=options.version, sha256=options.sha256.lower(), number=1)
        n_failures = report(old, new)
    except ForkError as error:
        print(error, file=sys.stderr)
        return 1
    if options.look:
        return 0
    pin = {"name": new.name, "version": new.version, "sha256": new.sha256, "fork": new.number if new.version != old.version else old.number}
    (new.folder / "pin.json").write_text(json.dumps(pin, indent=2) + "\n")
    print(f"llamacpp_patches/pin.json: {new.version}")
    if n_failures:
        print("mend the patches first: python scripts/build/fork.py tree DIR, commit there, make patches-refresh DIR=DIR; then run this again", file=sys.stderr)
        return 1
    for command in STEPS:
        print(f"--- {' '.join(command)}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            print(f"{' '.join(command)} failed", file=sys.stderr)
            return 1
    print("every test passes: commit llamacpp_patches, and raise what tests and docs name of the version")
    return 0


if __name__ == "__main__":
    sys.exit(main())
