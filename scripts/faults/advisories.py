"""Known advisories about llama.cpp and llama-cpp-python, against the pinned release.

The list is kept by hand in advisories.json, with sources. For each of them there is one
reason why it does not concern this build: lines that its fix brought are in the pinned
sources; the part is not built; the option is refused; a script tries it. What is left
is open, and said so. Where a reason does not hold the pin is too old, or the list has
to be looked at again.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import click

from common import HELP, ROOT, findings, main

sys.path.append(str(ROOT / "scripts" / "build"))
LIST = Path(__file__).with_name("advisories.json")
REASONS = {"marks", "absent", "refused", "open"}


def sources(names: set[str]) -> dict[str, str]:
    """Texts of the pinned release by path, from the verified sdist."""
    import fork

    with tarfile.open(fork.pinned_sdist(fork.Fork.load(), fork.cache_root())) as archive:
        top = archive.next().name.split("/")[0]
        return {name: archive.extractfile(f"{top}/{name}").read().decode() for name in names}


def path_of(name: str) -> str:
    """Return the path of a name of the list, which is below llama.cpp or beside it."""
    return name.removeprefix("../../") if name.startswith("../../") else f"vendor/llama.cpp/{name}"


def why(entry: dict, texts: dict[str, str]) -> tuple[str, bool]:
    """The reason in words, and whether it holds."""
    (kind,) = REASONS & set(entry)
    if kind == "marks":
        missing = [
            mark
            for name, marks in entry["marks"].items()
            for mark in marks
            if mark not in texts[path_of(name)]
        ]
        return (
            "the fix is in the pinned sources"
            if not missing
            else f"not in the pinned sources: {missing[0]}"
        ), not missing
    if kind == "absent":
        import llama_cpp

        built = list((Path(llama_cpp.__file__).parent / "lib").glob(f"*{entry['absent']}*"))
        return ("the part is not built" if not built else f"built: {built[0].name}"), not built
    if kind == "refused":
        from moeoff.llamacpp.llama_cpp_options import REFUSED, options_of

        llama_option = options_of("serve").get(entry["refused"])
        return (
            ("the option is refused", True)
            if llama_option is not None and llama_option.verdict == REFUSED
            else (f"{entry['refused']} is not refused", False)
        )
    return f"open: {entry['open']}", True


@main.command("advisories", help=__doc__)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def check_advisories(json_file: str | None) -> None:
    entries = json.loads(LIST.read_text(encoding="utf-8"))
    texts = sources({path_of(name) for entry in entries for name in entry.get("marks", ())})
    pin = json.loads((ROOT / "llamacpp_patches" / "pin.json").read_text())
    columns = ["advisory", "source", "what", "fixed in", "here"]
    with findings(
        json_file, "advisories", f"advisories against {pin['name']} {pin['version']}", columns
    ) as (table, problems):
        for entry in entries:
            reason, holds = why(entry, texts)
            problems += [] if holds else [f"{entry['id']}: {reason}"]
            table.row(entry["id"], entry["source"], entry["what"], entry["fixed"], reason)
