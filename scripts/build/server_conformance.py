#!/usr/bin/env python3
"""llama-server's own test suite as a differential test: what the pinned llama-server
passes with the demo model, moeoff's server passes too.

usage: server_conformance.py [--tests EXPRESSION]
       server_conformance.py serve ARGUMENTS...

The suite comes from the pinned release. It runs twice, in a virtual environment of its
own: with llama-server, and with the second form in its place, which serves with
`moeoff.Server`: the experts get so little memory that they really come from disk.
conformance_conftest.py gives every test the demo model.

What does not count, for either of them:
- the files in `NOT_OFFERED`: of the router, of a model that sleeps, of tools that start
  programs. moeoff refuses these options, as docs/guides/serving.md says;
- tests that llama-server itself fails or skips here: they need the words of another
  model, its adapter, projector or classifier, or a download.

Where a test starts the router only to have a server without a model (of CORS, of
streams that are taken up again) both get the demo model. Everything else counts. What
moeoff's server fails of it is printed; that it may is said in `EXCEPTIONS`, with the
reason, and without one the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import fork
from fork import ROOT, Fork, digest

MODEL = ROOT / "moeoff/data/demo-moe-q8_0.gguf"
TESTS = Path("tools/server/tests")
NEEDED = (str(TESTS), "models/templates")  # of llama.cpp's tree
TIMEOUT = "300"  # seconds for a test: an answer that never ends would hold up everything
NOT_OFFERED = {
    "test_router.py": "one model for each server",
    "test_sleep.py": "unloading an idle model is not supported",
    "test_tools_builtin.py": "answers that start programs on this machine",
    "test_mcp_servers.py": "answers that start programs on this machine",
}
# at most 8; docs/guides/serving.md has them as a table (scripts/build/docs.py cli)
EXCEPTIONS: dict[str, str] = {
    "test_security::test_cors_options[localhost-Access-Control-Allow-Origin-localhost]": (
        "web pages of other origins may read answers only with --cors"
    ),
    "test_security::test_cors_options[web.mydomain.fr-Access-Control-Allow-Origin-web.mydomain.fr]": (
        "web pages of other origins may read answers only with --cors"
    ),
    "test_metrics::test_metrics_disabled": "/metrics is always there",
    "test_speculative::test_synth_is_deterministic": (
        "drafts are judged while answers are written: two answers need not have the same number of"
        " them"
    ),
}
EXPERT_MEMORY = "4M"
# the level from which on llama-server's --verbose shows in answers; moeoff's own
# verbose is its log alone
MOST_VERBOSE = "10"


def options(argv: list[str]) -> dict[str, Any]:
    """Keyword arguments of `moeoff.Server`: a command line of llama-server's is one of
    ours, but for what this build and this suite want.
    """
    from moeoff.server.arguments import CommandLine

    line = CommandLine.read(argv, own={"--model": True})
    out, args = line.options, line.passed_on
    if out.get("verbose"):
        args += ["-lv", MOST_VERBOSE]
    # llama-server shares the context among the slots where their number is its own
    # choice, or it is told to
    if "parallel" in out:
        out.setdefault("kv_unified", False)
    out |= {
        "args": tuple(args),
        "expert_memory": EXPERT_MEMORY,
        "kv_disk": 0,
        "profile": False,
        "experts": False,
    }
    return out | ({"model": line.own[-1]} if line.own else {})


def serve(argv: list[str]) -> None:
    import moeoff

    def end(*_: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    keywords = options(argv)
    if "model" not in keywords:
        sys.exit("moeoff serves one model, which is given at the start: there is no router")
    try:
        with moeoff.Server(keywords.pop("model"), **keywords) as server:
            server.wait()
    except moeoff.MoeoffError as error:
        sys.exit(str(error))


def environment(cache: Path, requirements: str) -> Path:
    """The python that has what the suite needs: at least the versions that it pins, as
    the package index has them.
    """
    needs = [line.replace("~=", ">=") for line in requirements.split()] + ["pytest-timeout"]
    home = cache / f"venv-{digest(sys.version.encode(), *(need.encode() for need in needs))[:8]}"
    python, ready = home / "bin/python", home / "ready"
    if not ready.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needs], check=True)
        ready.touch()
    return python


def unpack(sdist: Path, place: Path) -> None:
    """The suite, and what it reads, as llama.cpp has them."""
    with tarfile.open(sdist) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        for member in tar:
            member.name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.name.startswith(NEEDED):
                tar.extract(member, place)
    shutil.copy(Path(__file__).with_name("conformance_conftest.py"), place / TESTS / "conftest.py")


def stand_in(place: Path) -> Path:
    """A program, as the suite wants one, that is the second form of this one."""
    path = place / "moeoff-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" serve "$@"\n')
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(python: Path, tests: Path, program: Path, result: Path, expression: str) -> None:
    """Leaves the outcomes in `result`, and all that was written beside it."""
    command = [
        python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-v",
        "-m",
        "not slow",
        "--timeout",
        TIMEOUT,
        f"--junitxml={result}",
        "unit",
    ]
    command += [f"--ignore=unit/{name}" for name in NOT_OFFERED] + (
        ["-k", expression] if expression else []
    )
    surroundings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_", "PYTEST_")) and name != "DEBUG"
    }
    surroundings |= {
        "LLAMA_SERVER_BIN_PATH": str(program),
        "CONFORMANCE_MODEL": str(MODEL),
        "PORT": str(free_port()),
        "LLAMA_CACHE": str(tests / "tmp"),
    }
    surroundings["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    result.unlink(missing_ok=True)
    with open(result.with_suffix(".log"), "w") as log:
        subprocess.run(
            command,
            cwd=tests,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if not result.exists():
        sys.exit(f"pytest ended before there was a result: {log.name}")


def outcomes(result: Path) -> dict[str, str]:
    """Why each test did not pass; empty: it did."""
    out: dict[str, str] = {}
    for case in ElementTree.parse(result).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        wrong = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        message = (
            ""
            if wrong is None
            else f"{wrong.tag}: {(wrong.get('message') or '').strip().partition(chr(10))[0]}"
        )
        out[name] = out.get(name) or message
    return out


def compare(
    stock: dict[str, str], ours: dict[str, str], exceptions: dict[str, str] = EXCEPTIONS
) -> int:
    """Prints what is different. Returns how many tests fail that are no exceptions."""
    passed = [name for name, wrong in stock.items() if not wrong]
    failed = {name: ours.get(name, "not run") for name in passed if ours.get(name, "not run")}
    unexpected = {name: wrong for name, wrong in failed.items() if name not in exceptions}
    for name in failed:
        if name in exceptions:
            print(f"exception  {name}\n           {exceptions[name]}")
    for name, wrong in unexpected.items():
        print(f"FAILED     {name}\n           {' '.join(wrong.split())[:200]}")
    for name in exceptions:
        if name in stock and name not in failed:
            print(
                f"no longer  {name}:"
                f" {'both pass it' if not stock[name] else 'llama-server does not pass it'}; take"
                " it off the list"
            )
    print(
        f"llama-server passes {len(passed)} of {len(stock)} tests; of these moeoff's server passes"
        f" {len(passed) - len(failed)}, {len(unexpected)} fail"
    )
    return len(unexpected)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tests", default="", metavar="EXPRESSION", help="these alone, as pytest -k takes it"
    )
    options = parser.parse_args()
    pinned, root = Fork.load(), fork.cache_root()
    program, sdist = fork.program(pinned, root, "llama-server"), fork.pinned_sdist(pinned, root)
    cache = root / "conformance"
    with fork.locked(cache / "lock"), tempfile.TemporaryDirectory() as place:
        tests = Path(place) / TESTS
        unpack(sdist, Path(place))
        python = environment(cache, (tests / "requirements.txt").read_text())
        results = {}
        for name, server in (("llama-server", program), ("moeoff", stand_in(Path(place)))):
            result = cache / f"{name}.xml"
            print(
                f"llama-server's tests with {name}: {result.with_suffix('.log')} ...",
                file=sys.stderr,
                flush=True,
            )
            run(python, tests, server, result, options.tests)
            results[name] = outcomes(result)
    return 1 if compare(results["llama-server"], results["moeoff"]) else 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2:]) if sys.argv[1:2] == ["serve"] else main())
