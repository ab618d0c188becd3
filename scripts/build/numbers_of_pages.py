"""Where each number of README.md and the guides comes from: a measurement in docs/results/data, or the line of code that makes it so.

usage: numbers_of_pages.py     says which numbers have no source, which sources say something else, and which are of text that is gone; fails if there are any

`SOURCES` names, for a phrase of a page, the data file whose cells hold its numbers to the digits that are printed (`data NAME`, of other units `data NAME / N`),
a file and a text that stands in it, or what other program's fact it is, which is not checked.
Numbers in code, in links, in tables that are made from data and in names (x86-64, Python 3.10, a footnote) need none.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "results" / "data"
PAGES = ("README.md", *(f"docs/guides/{path.name}" for path in sorted((ROOT / "docs" / "guides").glob("*.md"))))
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-])")
NAMES = re.compile(
    r"x86-64|AVX-512|WSL 2|SSE4\.2|Qwen3-30B-A3B|DeepSeek-V2-Lite|Python 3\.\d+|Node\.js \d+|glibc 2\.\d+|Debian \d+|Ubuntu [\d.]+|RHEL \d+|Zen \d"
    r"|April 2024|\((?:[\w ]+)?(?:19|20)\d\d\)|10⁹|exit status \d|at once with 1\b|\((?:\d)\)|\(\d, \d\)|§[\d.]+|^\d\. ",
    re.MULTILINE,
)
NOT_PROSE = re.compile(r"^```.*?^```|^<!-- results .*?^<!-- end of results -->|^    .*?$|`[^`]*`|\]\([^)]*\)|<[^>]*>", re.MULTILINE | re.DOTALL)

SOURCES: dict[str, dict[str, str]] = {
    "README.md": {
        "17.3 GiB: in 6.5 GiB": 'scripts/results.py: ("Qwen3-30B-A3B", 18.55)',
        "moeoff 8.93 and stock llama.cpp 0.12; with all of it in memory 17.48 and 16.86": "data real-qwen3",
        "shape, 17.3 GiB: random": 'scripts/results.py: ("Qwen3-30B-A3B", 18.55)',
        "a context of 1,024": "scripts/research/speed.py: max(1024, ",
    },
    "docs/guides/containers.md": {"takes 80 % of it": "moeoff/memory.py: DEFAULT_SHARE = 0.8"},
    "docs/guides/memory.md": {
        "reserve | 16 MiB": "moeoff/budget/memory_plan.py: RESERVE = 16 * MIB",
        "70 to 80 % of uses find their expert": "data cache-policies",
    },
    "docs/guides/platforms.md": {
        "whole pages of 16 KiB only": "fact: pages of Apple silicon",
        "two pages of 16 KiB": "fact: pages of Apple silicon",
        "takes 80 % of what is available": "moeoff/memory.py: DEFAULT_SHARE = 0.8",
    },
    "docs/guides/precision.md": {
        "holds 10, 25, 50 or 75 %": "moeoff/calibrate/precision_search.py: SHARES = (0.1, 0.25, 0.5, 0.75)",
        "each window of 512 tokens the first 64": "moeoff/calibrate/precision_search.py: PROMPT = 64",
        "by 12 % or more": "moeoff/calibrate/precision_search.py: STEP = 1.12",
        "one-sided 95 % interval": "moeoff/calibrate/statistics.py: 1 - 0.05",
        "below 10 % nothing is left out": "moeoff/calibrate/precision_search.py: SHARES = (0.1",
        "writes 8,192 tokens": "moeoff/calibrate/precision_search.py: OWN_TOKENS = 8192",
        "(15) bounds it": "moeoff/calibrate/precision_search.py: DEFAULT_MINUTES = 15",
        "fewer windows, at least 8": "moeoff/calibrate/precision_search.py: MIN_WINDOWS = 8",
        "Where 8 windows": "moeoff/calibrate/precision_search.py: MIN_WINDOWS = 8",
        "and 8,192 tokens of own text": "moeoff/calibrate/precision_search.py: OWN_TOKENS = 8192",
        "scaled to 1": "moeoff/policies/hobbit.py: all scaled to 1",
        "Intervals are of 95 %": "moeoff/calibrate/statistics.py: 1 - 0.025",
        "take 2 bytes x vocabulary": "moeoff/calibrate/perplexity.py: needed, folder = 2 * n_windows * n_tokens * n_vocab",
    },
    "docs/guides/scale.md": {
        "256 MiB for the actor": "moeoff/ray.py: _ACTOR = 256 * MIB",
        "workers at niceness 15": "fact: Ray's RAY_worker_niceness",
        "takes (2 x": "moeoff/ray.py: 2 * parallel",
        "health check of 10 s": "moeoff/ray.py: _ANSWERS = 10.0",
        "mean over 30 seconds": "fact: Ray's look_back_period_s, unless given",
    },
    "docs/guides/serving.md": {
        "4,096 for each of them": "moeoff/budget/dry_load.py: DEFAULT_CTX = 4096",
        "12 bytes for each answer": "moeoff/server/server.py: _SAMPLER_BYTES = 12",
        "up to 8, within that eighth": "moeoff/server/kept_prompts.py: _CHECKPOINTS = 8",
        "5 MiB: a process of its own": "moeoff/server/server.py: _TEMPLATE_BYTES = 5 << 20",
        "above 64 KiB": "llamacpp_patches/src/server/moeoff-server-hooks.cpp: IN_RESERVE = 10 << 16",
        "16 bytes for each pixel": "llamacpp_patches/src/server/moeoff-server-hooks.cpp: (int64_t) width * height * 16",
        "and 32 for each byte of a sound": "llamacpp_patches/src/server/moeoff-server-hooks.cpp: (int64_t) file.size() * 32",
        "more than 4 MiB, ": "llamacpp_patches/src/common/moeoff-templates.cpp: SMALL    = 4 << 20",
        "32 MiB and": "llamacpp_patches/src/common/moeoff-templates.cpp: LARGE    = 32 << 20",
        "64 times": "llamacpp_patches/src/common/moeoff-templates.cpp: TIMES    = 64",
        "10 s and that memory": "moeoff/templates.py: SECONDS = 10",
        "4 GiB unless said; 0": "moeoff/options.py: 0: none. Default: 4G",
        "8 GiB, checkpoints": "fact: llama-server's --cache-ram",
    },
    "docs/guides/start.md": {"takes 80 % of what is available": "moeoff/memory.py: DEFAULT_SHARE = 0.8"},
    "docs/guides/strategies.md": {
        "p is 25 % for every model": "moeoff/policies/fate.py: P = 0.25",
        "and may be 0": "moeoff/policies/fate.py: return 0",
        "or 4 MiB of it": "moeoff/engine/expert_buffer.py: READ_CHUNK = 4 << 20",
        "layers 0 and 1 are not predicted, with one layer 0 is not": "moeoff/policies/promoe.py: STRIDES = (1, 2)",
    },
}


def prose(page: str) -> str:
    """The page as one line, without what needs no source."""
    text = NAMES.sub(" ", NOT_PROSE.sub(" ", (ROOT / page).read_text(encoding="utf-8")))
    return " ".join(text.split())


def values(name: str) -> list[float]:
    """Every number in a data file."""
    text = (DATA / f"{name}.json").read_text(encoding="utf-8")
    return [float(found.replace(",", "")) for found in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text) if found.strip(",")]


def is_in(printed: str, found: list[float]) -> bool:
    """One of them is this, to the digits that are printed."""
    number = printed.replace(",", "")
    digits = len(number.partition(".")[2])
    return any(f"{value:.{digits}f}" == number for value in found)


def wrong(page: str, text: str, sources: dict[str, str]) -> list[str]:
    """What is wrong with the numbers of a page's prose."""
    out = []
    for phrase, source in sources.items():
        if " ".join(NAMES.sub(" ", phrase).split()) not in text:
            out.append(f"{page}: nothing says {phrase!r} any more")
            continue
        text = text.replace(phrase, re.sub(r"\d", "", phrase))
        if source.startswith("data "):
            name, _, divisor = source.removeprefix("data ").partition(" / ")
            found = [value / float(divisor or 1) for value in values(name)]
            out += [f"{page}: {number} of {phrase!r} is not in data/{name}.json" for number in NUMBER.findall(phrase) if not is_in(number, found)]
        elif not source.startswith("fact: "):
            path, _, words = source.partition(": ")
            if words not in (ROOT / path).read_text(encoding="utf-8"):
                out.append(f"{page}: {path} no longer has {words!r}, which {phrase!r} says")
    return out + [f"{page}: no source of {m[0]} in '...{text[max(m.start() - 40, 0) : m.end() + 30]}...'" for m in NUMBER.finditer(text)]


def main() -> int:
    found = [line for page in PAGES for line in wrong(page, prose(page), SOURCES.get(page, {}))]
    print("\n".join(found) or "every number has its source")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
