#!/usr/bin/env python3
"""Do finished wheels install and run where there is no compiler? In a fresh Debian
folder, by the steps of the container's last stage.

usage: clean_install.py WHEELS [--root FOLDER]      (needs root, debootstrap and unshare; qemu-user-static for CPUs that this machine does not have)

WHEELS is the folder that wheels.py wrote. Wheels for another architecture run emulated,
however long that takes, if the kernel knows its programs (binfmt_misc). What it does:

1. makes a minimal Debian with Python and nothing else (kept in --root, if that is
    given), and looks that no compiler is in it;
2. downloads moeoff's dependencies, so that only what the wheels themselves do is timed;
3. runs the RUN, ENV, USER and ENTRYPOINT lines of scripts/build/container/Dockerfile's
    last stage in it, and asks the demo model something: at most a minute from `pip
    install` to the answer;
4. runs again with every level of CPU, and on an emulated older CPU, which must get the
    lowest by itself.

The last line on stdout is a JSON object of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONTAINER = Path(__file__).parent / "container" / "Dockerfile"
SUITE = "bookworm"
LIMIT = 60  # seconds
QUESTION = ["run", "-p", "How many apples?", "-n", "16", "--temp", "0"]
OLD_CPU = {"x86_64": "Nehalem", "aarch64": "cortex-a53"}
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
_WHICH = (
    "from moeoff.llamacpp import llama; from moeoff.system import machine; print(machine.LEVEL)"
)


class Failure(Exception):
    """A failed check."""


def stage(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile's last stage; continued lines are joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    instructions = [
        (line.split()[0], line.partition(" ")[2].strip())
        for line in lines
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return instructions[max(i for i, (name, _) in enumerate(instructions) if name == "FROM") + 1 :]


class Place:
    """A folder with a system in it, and what the Dockerfile has said about it so far."""

    def __init__(self, root: Path):
        self.root, self.user, self.entry = root, "root", list[str]()
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
        }

    def run(self, command: list[str], **environment: str) -> str:
        """Inside, with /proc and /dev as a container has them; its standard output."""
        mounts = (
            'root=$1 user=$2; shift 2; mount -t proc none "$root/proc" && mount --bind /dev'
            ' "$root/dev" && exec chroot --userspec="$user" "$root" "$@"'
        )
        inside = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            mounts,
            "sh",
            str(self.root),
            self.user,
            *command,
        ]
        home = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"}
        done = subprocess.run(
            inside, env=home | self.environment | environment, capture_output=True, text=True
        )
        if done.returncode:
            raise Failure(
                f"{shlex.join(command)}: exit {done.returncode}:"
                f" {(done.stderr or done.stdout).strip()[-2000:]}"
            )
        return done.stdout

    def follow(self, instruction: str, rest: str) -> None:
        if instruction == "RUN":
            # the folder was made with it
            steps = [
                step
                for step in rest.split(" && ")
                if not step.startswith("apt-get") and "/var/lib/apt" not in step
            ]
            if steps:
                self.run(["sh", "-c", " && ".join(steps)], PIP_NO_INDEX="1")
        elif instruction == "ENV":
            self.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif instruction == "USER":
            self.user = rest
        elif instruction == "ENTRYPOINT":
            self.entry = json.loads(rest)
        elif instruction not in ("COPY", "VOLUME", "WORKDIR", "EXPOSE", "CMD"):
            raise Failure(
                f"{CONTAINER.name} has an instruction that this script does not know: {instruction}"
            )


def architecture(wheels: Path) -> str:
    architectures = [
        arch
        for wheel in wheels.glob("llama_cpp_python-*.whl")
        for arch in DEBIAN
        if wheel.stem.endswith(arch)
    ]
    if len(architectures) != 1:
        raise Failure(f"{wheels} has {len(architectures)} wheels of the fork, expected one")
    return architectures[0]


def make_root(root: Path, arch: str) -> None:
    if not (root / "usr/bin/python3").exists():
        say(f"making a Debian {SUITE} for {arch} in {root} ...")
        command = [
            "debootstrap",
            f"--arch={DEBIAN[arch]}",
            "--variant=minbase",
            "--include=python3-venv,ca-certificates",
            SUITE,
            str(root),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        root.chmod(0o755)  # a temporary folder is closed to the container's user
    compilers = [
        name
        for name in ("cc", "gcc", "c++", "g++", "clang", "make", "cmake")
        if shutil.which(name, path=f"{root}/usr/bin:{root}/usr/local/bin")
    ]
    if compilers:
        raise Failure(f"{root} has {', '.join(compilers)}: it is to be a place without a compiler")


def bring(wheels: Path, root: Path, version: str, arch: str) -> None:
    """The wheels and what they depend on, as files."""
    target = root / "wheels"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(wheels, target)
    moeoff = next(target.glob("moeoff-*.whl"))
    say("downloading the dependencies ...")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "-d",
        str(target),
        "--find-links",
        str(target),
        "--only-binary",
        ":all:",
    ]
    system = [
        f"--platform={name}_{arch}"
        for name in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)))
    ]
    subprocess.run(
        [*command, *system, "--python-version", version, f"{moeoff}[hub]"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def check(wheels: Path, root: Path) -> dict[str, object]:
    arch = architecture(wheels)
    make_root(root, arch)
    for old in ("opt/moeoff", "models"):
        shutil.rmtree(root / old, ignore_errors=True)
    place = Place(root)
    version = place.run(
        ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    ).strip()
    bring(wheels, root, version, arch)
    if "moeoff:" in (root / "etc/passwd").read_text():
        place.run(["userdel", "--remove", "moeoff"])

    say("installing, and asking the first question ...")
    started = time.monotonic()
    for instruction, rest in stage(CONTAINER.read_text()):
        place.follow(instruction, rest)
    answer = place.run([*place.entry, *QUESTION])
    seconds = time.monotonic() - started
    say(f"{seconds:.1f} s from the first step to the answer: {answer.strip()!r}")
    if len(answer.split()) < 3:
        raise Failure(f"no answer: {answer!r}")
    if seconds > LIMIT and arch == platform.machine():
        raise Failure(f"{seconds:.0f} s, expected at most {LIMIT}")

    python = "/opt/moeoff/bin/python"
    best = place.run([python, "-c", _WHICH]).strip()
    able = place.run([python, "-c", "from moeoff.system import machine; import importlib.util as u; from pathlib import Path;"
                      "print(*machine.supported(Path(u.find_spec('llama_cpp').submodule_search_locations[0]) / 'lib'))"]).split()  # fmt: skip
    if best != able[0]:
        raise Failure(f"level {best} was taken, and {able[0]} is the best that this CPU can run")
    levels = {}
    for level in able:
        if place.run([python, "-c", _WHICH], MOEOFF_CPU_LEVEL=level).strip() != level:
            raise Failure(f"MOEOFF_CPU_LEVEL={level} had no effect")
        levels[level] = place.run([*place.entry, *QUESTION], MOEOFF_CPU_LEVEL=level).strip()
        say(f"{level}: {levels[level]!r}")
    report: dict[str, object] = {
        "arch": arch,
        "seconds": round(seconds, 1),
        "python": version,
        "best": best,
        "levels": levels,
    }
    name, cpu = f"qemu-{arch}-static", OLD_CPU[arch]
    if emulator := shutil.which(name):
        shutil.copy2(emulator, root / "usr/bin")
        old = [f"/usr/bin/{name}", "-cpu", cpu, python]
        report["old_cpu"] = place.run([*old, "-c", _WHICH]).strip()
        if report["old_cpu"] != able[-1]:
            raise Failure(f"{cpu} got {report['old_cpu']}, expected {able[-1]}")
        report["old_cpu_answer"] = place.run([*old, "-m", "moeoff.cli", *QUESTION]).strip()
        say(f"{cpu}, emulated: {report['old_cpu']}: {report['old_cpu_answer']!r}")
    else:
        say(f"{name} is not installed: an older CPU was not tried")
    return report


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path)
    parser.add_argument(
        "--root", type=Path, help="folder of the Debian system; made if it is empty, kept"
    )
    options = parser.parse_args(arguments)
    if os.geteuid():
        parser.error("needs root: it runs programs in another root folder")
    try:
        if options.root:
            report = check(options.wheels, options.root)
        else:
            with tempfile.TemporaryDirectory(prefix="moeoff-root-") as folder:
                report = check(options.wheels, Path(folder))
    except Failure as error:
        say(f"error: {error}")
        return 1
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
