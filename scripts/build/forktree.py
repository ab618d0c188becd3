"""The fork's source tree: the pinned sdist, our patches on top of it, our own sources copied in.

Knows nothing about compilers or wheels (fork.py does). Standard library only: it runs before anything is installed.

Invariants: nothing is unpacked whose sha256 was not checked; a patch counts as applied only when every file that it
names has changed; what we add to the tree never replaces a file of the pinned release.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".moeoff-patches"  # inside a patched tree: which patches it holds, by name and digest
REASONS = ("upstreamable", "build only", "incompatible by nature")
# Several folders of ours may share one place in the tree.
SOURCE_FOLDERS = (
    ("ggml-cpu", "vendor/llama.cpp/ggml/src/ggml-cpu/moeoff"),
    ("core", "vendor/llama.cpp/ggml/src/ggml-cpu/moeoff"),
    ("llama", "vendor/llama.cpp/src"),
    ("common", "vendor/llama.cpp/common/moeoff"),
    ("server", "vendor/llama.cpp/tools/server/moeoff"),
)


class ForkError(Exception):
    """An expected failure: its text is all that the user gets to see."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: bytes) -> str:
    """sha256 over length-prefixed parts, so that moving a byte from one part to the next changes it."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


@dataclass(frozen=True)
class Fork:
    """What pin.json, the patches and src/ beside it say."""

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
        wanted = {"name": str, "version": str, "sha256": str, "fork": int}
        if {key: type(value) for key, value in pin.items()} != wanted:
            raise ForkError(f"{path}: expected exactly name, version, sha256 (text) and fork (a number), found {pin}")
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
        found = []
        for folder, place in SOURCE_FOLDERS:
            base = self.folder / "src" / folder
            files = sorted(p for p in base.rglob("*") if p.is_file() and not p.name.startswith("."))
            found += [(p, f"{place}/{p.relative_to(base).as_posix()}") for p in files]
        return found

    def digest(self) -> str:
        """Changes whenever the patched tree would."""
        parts = [(self.folder / "pin.json").read_bytes()]
        for path in self.patches:
            parts += [path.name.encode(), path.read_bytes()]
        for path, place in self.sources:
            parts += [place.encode(), path.read_bytes()]
        return digest(*parts)


def git_env(tree: Path) -> dict[str, str]:
    """Surroundings in which git neither reads the user's settings nor finds a repository around the tree."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Inside another repository's work tree `git apply` would exit 0 without touching a file.
    env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "moeoff contributors", f"GIT_{who}_EMAIL": "moeoff@example.invalid"}
    return env


def git(tree: Path, *args: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["git", *args], cwd=tree, env=git_env(tree), text=True, capture_output=True)
    except FileNotFoundError:
        raise ForkError("git was not found on PATH: install it, the patches are applied with it.") from None


def git_or_fail(tree: Path, *args: str) -> str:
    done = git(tree, *args)
    if done.returncode:
        raise ForkError(f"git {args[0]} failed in {tree}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def verify_sdist(fork: Fork, sdist: Path) -> None:
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != fork.sha256:
        sdist.unlink()
        raise ForkError(f"{sdist.name}: expected sha256 {fork.sha256}, found {found}; the file was removed.")


def unpack(sdist: Path, tree: Path) -> None:
    """Unpacks a verified sdist without its top folder, and without the stray .git entries that it ships."""
    tree.mkdir(parents=True)
    with tarfile.open(sdist) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)  # absent before 3.10.12
        for member in tar:
            member.name = member.name.partition("/")[2]
            if member.name and ".git" not in member.name.split("/"):
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
                failures.append(f"{patch.name}: the tree holds another version of it; unpack the sdist again")
            continue
        files = [tree / name for name in touched_files(patch)]
        before = [f.read_bytes() if f.exists() else None for f in files]
        done = git(tree, "apply", "--whitespace=nowarn", str(patch.resolve()))
        if done.returncode:
            failures.append(f"{patch.name}: " + "; ".join(done.stderr.splitlines() or ["git apply failed"]))
            continue
        after = [f.read_bytes() if f.exists() else None for f in files]
        still = [str(f.relative_to(tree)) for f, old, new in zip(files, before, after) if old == new]
        if still or not files:
            where = ", ".join(still) or "any file"
            failures.append(f"{patch.name}: git apply reported success but changed nothing in {where}")
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
    """Own files that would replace a file of the release, or each other. Ask before copy_sources."""
    places = [place for _, place in fork.sources]
    taken = [f"{place}: the release has a file of this name" for place in places if (tree / place).exists()]
    return taken + [f"{place}: two of our files want this place" for place in set(places) if places.count(place) > 1]


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
    """Every way in which the patch set is not sound, one line each. Raises only for a wrong sdist."""
    verify_sdist(fork, sdist)
    failures = [line for patch in fork.patches for line in header_failures(patch)]
    numbers = [patch.name[:4] for patch in fork.patches]
    failures += [f"{n}: two patches have this number" for n in sorted(set(numbers)) if numbers.count(n) > 1]
    with tempfile.TemporaryDirectory(prefix="moeoff-check-") as folder:
        tree = Path(folder) / "tree"
        unpack(sdist, tree)
        failures += source_conflicts(fork, tree)
        failures += apply_patches(fork, tree)
        files = sorted({tree / name for patch in fork.patches for name in touched_files(patch)})
        once = [f.read_bytes() for f in files if f.exists()]
        failures += [f"second run: {line}" for line in apply_patches(fork, tree) if line not in failures]
        if once != [f.read_bytes() for f in files if f.exists()]:
            failures.append("applying the patches a second time changed the tree")
        init = (tree / "llama_cpp/__init__.py").read_text()
        if f'__version__ = "{fork.local_version}"' not in init:
            failures.append(f"llama_cpp/__init__.py: expected version {fork.local_version} (pin.json) after patching")
    return failures


def make_tree(fork: Fork, sdist: Path, tree: Path) -> None:
    """A git repository for editing: the release as first commit (tag `pristine`), then one commit for each patch."""
    if tree.exists() and any(tree.iterdir()):
        raise ForkError(f"{tree} is not empty: name a folder that does not exist yet.")
    verify_sdist(fork, sdist)
    if tree.exists():
        tree.rmdir()
    unpack(sdist, tree)
    git_or_fail(tree, "init", "-q", "-b", "main")
    git_or_fail(tree, "add", "-A", "-f", ".")  # -f: the release's own .gitignore names folders that it ships
    git_or_fail(tree, "commit", "-q", "-m", f"{fork.name} {fork.version}")
    git_or_fail(tree, "tag", "pristine")
    if fork.patches:
        git_or_fail(tree, "am", "-q", "--keep-cr", *(str(p.resolve()) for p in fork.patches))
    with open(tree / ".git/info/exclude", "a") as exclude:
        exclude.writelines(f"/{place}\n" for _, place in fork.sources)
    copy_sources(fork, tree)


def refresh(fork: Fork, tree: Path) -> list[str]:
    """Writes the patch files anew from the tree's commits; returns their names. A title keeps its number."""
    if git(tree, "rev-parse", "-q", "--verify", "refs/tags/pristine").returncode:
        raise ForkError(f"{tree} was not made by `fork.py tree`: it has no tag `pristine`.")
    if dirty := git_or_fail(tree, "status", "--porcelain", "--untracked-files=all"):
        raise ForkError(f"{tree} has changes that are not committed:\n{dirty.rstrip()}")
    kept = {patch.name[5:]: int(patch.name[:4]) for patch in fork.patches}
    written: dict[str, bytes] = {}
    number = 0
    with tempfile.TemporaryDirectory(prefix="moeoff-refresh-") as out:
        # Full index lines and no diffstat: both would otherwise depend on the repository's size or the terminal's.
        options = ["--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--no-stat", "--no-renames"]
        git_or_fail(tree, "format-patch", "-q", *options, "-o", out, "pristine..HEAD")
        for path in sorted(Path(out).glob("*.patch")):
            title = path.name[5:].lower()
            number = max(number + 1, kept.get(title, 0))
            written[f"{number:04d}-{title}"] = path.read_bytes()
    for patch in fork.patches:
        if patch.name not in written:
            patch.unlink()
    for name, content in written.items():
        (fork.folder / name).write_bytes(content)
    return list(written)
