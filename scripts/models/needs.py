"""The memory that published models need, computed by the planner from their headers:
docs/results/data/needs.json.

Each header has the published names, shapes and types of all tensors (header_model.py),
so that nothing is downloaded. The planner is the one of `moeoff inspect` and `moeoff
run`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent.parent))

from header_model import header_model
from moeoff.budget.inspection import examine
from moeoff.cli.options import command
from moeoff.system.memory import MIB, parse_size
from results import HELP, ResultsFile

NAMES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-4-26b-a4b": "gemma-4-26B-A4B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "glm-4.5-air": "GLM-4.5-Air",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "qwen3.8-flash-next": "Qwen3.8-Flash-Next",
    "glm-5.3-flash": "GLM-5.3-Flash",
}
N_CTX = 4096
SHARES = (0.25, 0.5)  # of the experts in memory
SHOWN, BUDGET = "qwen3-30b-a3b", "12G"  # of the picture of a budget's parts


@command()
@click.option("--json", "path", metavar="FILE", type=click.Path(dir_okay=False), help=HELP)
def main(path: str | None) -> None:
    """Print what each model needs, and the parts of one budget."""
    parts = {}
    with ResultsFile(path) as results, tempfile.TemporaryDirectory() as folder:
        columns = [
            "model",
            "file, GiB",
            "least",
            *(f"{share:.0%} of the experts" for share in SHARES),
            "all",
        ]
        needs = results.table("needs", f"MiB of --memory at a context of {N_CTX:,} tokens", columns)
        for shape, name in NAMES.items():
            file = Path(folder, f"{shape}.gguf")
            header_model(shape, str(file))
            report = examine(str(file), ctx_size=N_CTX, probe_disk=False)
            fixed = report.floor_bytes - report.arena_floor_bytes
            shares = [fixed + share * report.arena_full_bytes for share in (*SHARES, 1)]
            sizes = [report.floor_bytes, *(max(size, report.floor_bytes) for size in shares)]
            needs.row(
                name,
                f"{file.stat().st_size / 2**30:.1f}",
                *(f"{-(-size // MIB):.0f}" for size in sizes),
            )
            if shape == SHOWN:
                parts = {
                    "Python, samplers": report.process_bytes + report.extra_bytes,
                    "weights outside the experts": report.host_weight_bytes,
                    "KV cache": report.kv_bytes,
                    "buffers": report.compute_bytes
                    + report.work_bytes
                    + report.output_bytes
                    + report.row_cache_bytes,
                    "reserve": report.reserve_bytes,
                }
            file.unlink()
        parts["expert cache: the rest"] = parse_size(BUDGET) - sum(parts.values())
        table = results.table("parts", f"{NAMES[SHOWN]} at --memory {BUDGET}", ["part", "MiB"])
        for part, nbytes in parts.items():
            table.row(part, f"{nbytes / MIB:.0f}")


if __name__ == "__main__":
    main()
