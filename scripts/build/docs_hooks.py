"""For mkdocs (.mkdocs.yml): pages of the repository's top folder on the site, and links that lead out of docs/.

The pages are written for a reader of the repository, where a link may lead to any file. On the site README.md, CONTRIBUTING.md and their
like are pages below project/; what a link to a source file or a folder says stays as plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
PROJECT = "project"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for path in sorted(ROOT.glob("*.md")):
        files.append(File.generated(config, f"{PROJECT}/{_on_site(path.name)}", content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """With every relative link as it has to be on the site."""
    here = page.file.src_uri
    source = "" if here.startswith(f"{PROJECT}/") else posixpath.join(DOCS, posixpath.dirname(here))  # the folder that the links start from

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        if ":" in target:
            return match[0]
        wanted = posixpath.normpath(posixpath.join(source, target))
        if "/" not in wanted and wanted.endswith(".md"):
            on_site = f"{PROJECT}/{_on_site(wanted)}"
        elif wanted.startswith(f"{DOCS}/") and (ROOT / wanted).is_file():
            on_site = wanted.removeprefix(f"{DOCS}/")
        elif (ROOT / wanted).exists():
            return text[1:-1]
        else:
            return match[0]  # mkdocs will complain
        return f"{text}({posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(replaced, markdown)


def _on_site(name: str) -> str:
    return "overview.md" if name == "README.md" else name  # mkdocs takes a README for the page of its folder
