"""Pages that are made from the program and the repository: docs/reference/cli.md, man
pages, and what mkdocs needs of files outside docs/.

usage: docs.py cli [--check]      writes docs/reference/cli.md from `--help`, stats.md there from moeoff/engine/stats.py, and the tables of options.md there
                                  from moeoff/options.py and of docs/guides/serving.md
                                  from server_conformance.py and
                                  tests/helpers/clients.py, or fails if they are not
                                  what these say
       docs.py man FOLDER         one man page for moeoff and one for each of its commands; needs click-man, which the extra `docs` brings

wheels.py puts the man pages into moeoff's wheel, where `man` finds them if the
environment's bin is on PATH. .mkdocs.yml names this file for its hooks: pages are
written for a reader of the repository, where a link may lead to any file. On the site
README.md, CONTRIBUTING.md and their like are pages below project/; what a link to a
source file or a folder says stays as plain text.
"""

from __future__ import annotations

import dataclasses
import itertools
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
PROJECT = "project"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
CLI = ROOT / "docs" / "reference" / "cli.md"
OPTIONS = ROOT / "docs" / "reference" / "options.md"
STATS = ROOT / "docs" / "reference" / "stats.md"
LLAMA_CPP_OPTIONS = re.compile(
    r"(?<=<!-- llama.cpp options -->\n).*(?=<!-- llama.cpp options end -->)", re.DOTALL
)
TABLE = re.compile(r"(?<=<!-- options -->\n).*(?=<!-- end options -->)", re.DOTALL)
SERVING = ROOT / "docs" / "guides" / "serving.md"
EXCEPTIONS = re.compile(r"(?<=<!-- exceptions -->\n).*(?=<!-- exceptions end -->)", re.DOTALL)
CLIENTS = re.compile(r"(?<=<!-- clients -->\n).*(?=<!-- clients end -->)", re.DOTALL)


def cli_page() -> str:
    """docs/reference/cli.md as it has to be."""
    from moeoff.cli.main import main
    from moeoff.cli.options import HELP_ALL

    parts = [
        "# The command line\n\nMade by `python scripts/build/docs.py cli` from `--help-all`. An"
        " option of several commands is described at the first.\n"
    ]
    shown: set[str] = set()
    # as the program makes them: a context made by hand would leave out the commands'
    # settings, -h among them
    width = {"max_content_width": 100, "terminal_width": 100, "resilient_parsing": True}
    top = main.make_context("moeoff", [], **width)
    parts.append(f"```\n{main.get_help(top)}\n```\n")
    for name in sorted(main.list_commands(top), key=lambda name: (name != "run", name)):
        command = main.get_command(top, name)
        context = command.make_context(name, [], parent=top, **width)
        context.meta[HELP_ALL] = True
        text, alike = without_shown(command.get_help(context), shown)
        parts.append(
            f"## moeoff {name}\n\n```\n{text}\n```\n"
            + (f"\nAs above: {', '.join(alike)}.\n" if alike else "")
        )
    return "\n".join(parts)


def without_shown(text: str, shown: set[str]) -> tuple[str, list[str]]:
    """Return a command's help without the options that an earlier one has shown in the
    same words, and the names of those.
    """
    new, alike = [], []
    for entry in re.split(r"\n(?=  -|\S|\n)", text):
        words = " ".join(entry.split())
        if not entry.startswith("  -"):
            new.append(entry)
        elif words in shown:
            alike.append(f"`{re.match(r'[^ ,]+', words)[0]}`")
        else:
            shown.add(words)
            new.append(entry)
    sections = [
        part
        for part in "\n".join(new).split("\n\n")
        if "\n" in part or part[0] == " " or not part.endswith(":")
    ]
    return "\n\n".join(sections).strip(), alike


def options_page() -> str:
    """docs/reference/options.md as it has to be: its text with the table of options as
    it is.
    """
    from moeoff.llamacpp import llama_cpp_options
    from moeoff.option import table_of
    from moeoff.options import Config, Sampling, ServerOptions
    from moeoff.precision import Precision

    groups: dict[str, list[str]] = {}
    for kind, name in (
        (Config, "moeoff.Llama"),
        (Precision, "moeoff.Llama"),
        (Sampling, ""),
        (ServerOptions, "moeoff.Server"),
    ):
        for line in table_of(kind).values():
            if line.flags and not line.hidden:
                flags = ", ".join(f"`{flag}`" for flag in line.flags) + (
                    f" `{line.metavar}`".replace("|", "\\|") if line.metavar else ""
                )
                python = f"`{line.name}`" if name else ""
                groups.setdefault(line.group or "First", []).append(f"| {flags} | {python} |")
    parts = [
        f"\n## {group}\n\n| option | in Python |\n|---|---|\n" + "\n".join(rows) + "\n"
        for group, rows in groups.items()
    ]
    what = {
        llama_cpp_options.ANYWAY: "so it is anyway",
        llama_cpp_options.IDLE: "no effect",
        llama_cpp_options.REFUSED: "refused",
    }
    rows: dict[tuple[str, ...], list[str]] = {}
    known = {program: llama_cpp_options.options_of(program) for program in ("run", "serve")}
    for name in dict.fromkeys(itertools.chain(*known.values())):
        for llama_option in dict.fromkeys(of[name] for of in known.values() if name in of):
            programs = ", ".join(
                program for program, of in known.items() if of.get(name) == llama_option
            )
            rows.setdefault((programs, what[llama_option.verdict], llama_option.why), []).append(
                f"`{name}`"
            )
    lines = [
        f"| {programs} | {', '.join(names)} | {verdict} | {why} |".replace("|off", "\\|off")
        for (programs, verdict, why), names in rows.items()
    ]
    page = LLAMA_CPP_OPTIONS.sub(
        lambda _: (
            "\n| command | option | | because |\n|---|---|---|---|\n" + "\n".join(lines) + "\n\n"
        ),
        OPTIONS.read_text(),
    )
    return TABLE.sub(lambda _: "".join(parts) + "\n", page)


def stats_page() -> str:
    """docs/reference/stats.md as it has to be."""
    from moeoff.engine.stats import Stats

    rows = []
    for field in dataclasses.fields(Stats):
        line = field.metadata
        name = field.name if line["metric"] is True else line["metric"]
        metric = f"`moeoff_{name}{'_total' if line['counter'] else ''}`" if name else ""
        unit = " ".join(filter(None, [line["unit"], "(counter)" if line["counter"] else ""]))
        rows.append(f"| `{field.name}` | {unit} | {metric} | {line['text']} |")
    head = (
        "# Statistics\n\nMade by `python scripts/build/docs.py cli` from `moeoff/engine/stats.py`:"
        " what `Llama.stats()` and `Server.stats()` return, `--stats-json` writes and `run"
        " --json`\nprints as `stats`. A slice is one matrix of one expert. `/metrics` also has"
        " `moeoff_expert_uses_total` by precision, `moeoff_tier_info`,\n`moeoff_device_bytes` by"
        " device, `moeoff_layer_hits_total` and `moeoff_layer_misses_total` by layer,"
        " `moeoff_prompts_disk_*` and\n`moeoff_resident_memory_bytes`.\n\n| name | unit | in"
        " /metrics | |\n|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def serving_page() -> str:
    """docs/guides/serving.md as it has to be: its text with the clients that are
    tested, and the tests of llama-server that moeoff's server need not pass.
    """
    from server_conformance import EXCEPTIONS as exceptions

    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.clients import table

    tests: dict[str, list[str]] = {}
    for name, reason in exceptions.items():
        tests.setdefault(reason, []).append(f"`{name.partition('::')[2].partition('[')[0]}`")
    rows = [f"| {', '.join(dict.fromkeys(names))} | {reason} |" for reason, names in tests.items()]
    page = EXCEPTIONS.sub(
        lambda _: "\n| test | because |\n|---|---|\n" + "\n".join(rows) + "\n\n",
        SERVING.read_text(),
    )
    return CLIENTS.sub(lambda _: f"\n{table()}\n", page)


# that are made from the program
PAGES = {CLI: cli_page, OPTIONS: options_page, STATS: stats_page, SERVING: serving_page}


def write_man_pages(folder: Path) -> None:
    import click_man.core

    import moeoff
    from moeoff.cli.main import main

    folder.mkdir(parents=True, exist_ok=True)
    click_man.core.write_man_pages(
        "moeoff", main, version=moeoff.__version__, target_dir=str(folder)
    )


# mkdocs calls these by their names


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path in sorted(ROOT.glob("*.md")):
        files.append(
            File.generated(
                config, f"{PROJECT}/{_on_site(path.name)}", content=path.read_text(encoding="utf-8")
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with every relative link as it has to be on the site."""
    here = page.file.src_uri
    # the folder that the links start from
    source = "" if here.startswith(f"{PROJECT}/") else posixpath.join(DOCS, posixpath.dirname(here))

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(source, target))
        if "/" not in path and path.endswith(".md"):
            on_site = f"{PROJECT}/{_on_site(path)}"
        elif path.startswith(f"{DOCS}/") and (ROOT / path).is_file():
            on_site = path.removeprefix(f"{DOCS}/")
        elif (ROOT / path).exists():
            return text[1:-1]
        else:
            return match[0]  # mkdocs will complain
        return f"{text}({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


def _on_site(name: str) -> str:
    # mkdocs takes a README for the page of its folder
    return "overview.md" if name == "README.md" else name


def main(arguments: list[str]) -> int | str | None:
    match arguments:
        case ["cli"]:
            for path, page in PAGES.items():
                path.write_text(page())
        case ["cli", "--check"]:
            stale = [
                str(path)
                for path, page in PAGES.items()
                if not path.exists() or path.read_text() != page()
            ]
            return f"out of date: {', '.join(stale)}; run {__file__} cli" if stale else None
        case ["man", folder]:
            write_man_pages(Path(folder))
        case _:
            return __doc__
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
