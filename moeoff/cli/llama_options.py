"""Options that llama.cpp's programs have, under their names; docs/reference/options.md says what becomes of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..errors import OptionError

# llama.cpp's names for cache types and so on; the library has them, too, but loads llama.cpp, which --help should not
_CACHE_TYPES = "f16, bf16, f32, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"

BATCH = (
    click.option("-b", "--batch-size", "n_batch", type=click.IntRange(1, 2**31 - 1), help="Tokens of a prompt given to llama.cpp at once. Default: as -ub."),
    click.option(
        "-ub",
        "--ubatch-size",
        "n_ubatch",
        type=click.IntRange(1, 2**31 - 1),
        help="Tokens computed at once, at most -b. Default: 512, or what memory and the disk make faster.",
    ),
)
CACHE = (
    click.option("-ctk", "--cache-type-k", "type_k", metavar="TYPE", help=f"Type of the KV cache's keys: {_CACHE_TYPES}. Default: f16."),
    click.option("-ctv", "--cache-type-v", "type_v", metavar="TYPE", help="Type of the KV cache's values; quantized ones need flash attention. Default: f16."),
    click.option("--swa-full/--no-swa-full", "swa_full", default=None, help="Whether layers with a sliding window keep the whole context. Default: they do."),
)
FLASH = (click.option("-fa/-no-fa", "--flash-attn/--no-flash-attn", default=True, show_default=True, help="Flash attention: smaller compute buffers."),)
GPU_LAYERS = (
    click.option("-ngl", "--n-gpu-layers", type=click.IntRange(min=-1), default=0, show_default=True, help="Layers whose dense part goes to the GPU; -1: all."),
)
GPU = (
    *GPU_LAYERS,
    click.option("-ts", "--tensor-split", metavar="N0,N1,...", help="Share of the layers for each GPU, as 3,1."),
    click.option("-sm", "--split-mode", metavar="MODE", help="How layers go to several GPUs: layer, or none for -mg alone. Default: layer."),
    click.option("-mg", "--main-gpu", type=click.IntRange(min=0), help="The GPU for -sm none."),
    click.option("-ot", "--override-tensor", metavar="PATTERN=BUFFER,...", help="Memory for tensors outside the experts whose names match, as CPU or CUDA0."),
    click.option("--rpc", "rpc_servers", hidden=True),  # refused, with the reason
)
VRAM = (
    click.option(
        "--vram", metavar="SIZE", help="Bound of what is allocated on each GPU, as 8G or 80% of what is free there: what -ngl leaves of it holds experts."
    ),
    click.option(
        "--vram-mode",
        metavar="MODE",
        help="How a GPU computes with experts: cooperative, centric, waves, cpu, or auto: the fastest, found while it computes. Default: auto.",
    ),
)
ROPE = (
    click.option("--rope-scaling", "rope_scaling_type", metavar="METHOD", help="Scaling of positions: none, linear or yarn. Default: the model's."),
    click.option("--rope-scale", type=click.FloatRange(0, min_open=True), metavar="N", help="Context scaling factor: expands the context N times."),
    click.option("--rope-freq-base", type=click.FloatRange(0, min_open=True), metavar="N", help="Base frequency. Default: the model's."),
    click.option("--rope-freq-scale", type=click.FloatRange(0, min_open=True), metavar="N", help="Frequency scale: expands the context 1/N times."),
    click.option("--yarn-orig-ctx", type=click.IntRange(min=1), metavar="N", help="YaRN: context that the model was trained with first. Default: the model's."),
    click.option("--yarn-ext-factor", type=float, metavar="N", help="YaRN: share of extrapolation; 0: interpolation alone. Default: the model's."),
    click.option("--yarn-attn-factor", type=float, metavar="N", help="YaRN: scale of attention. Default: the model's."),
    click.option("--yarn-beta-slow", type=float, metavar="N", help="YaRN: high correction dimension. Default: the model's."),
    click.option("--yarn-beta-fast", type=float, metavar="N", help="YaRN: low correction dimension. Default: the model's."),
)
SYSTEM = (
    click.option("--numa", metavar="STRATEGY", help="For several NUMA nodes: distribute, isolate or numactl. Threads are then placed by llama.cpp."),
    click.option("--prio", "priority", type=click.IntRange(-1, 3), default=0, show_default=True,
                 help="Priority of the process: -1 low, 0 normal, 1 medium, 2 high, 3 realtime."),
)  # fmt: skip
SHIFT = (
    click.option("--context-shift/--no-context-shift", default=False, show_default=True,
                 help="When the context is full, forget the older half of it and go on."),
    click.option("--keep", "n_keep", type=click.IntRange(min=-1), default=0, show_default=True,
                 help="Tokens of the prompt that a context shift keeps; -1: all."),
)  # fmt: skip
_UNSET = {"n_batch", "n_ubatch", "type_k", "type_v", "swa_full", "tensor_split", "split_mode", "main_gpu", "rope_scaling_type", "rope_freq_base",
          "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast", "numa", "n_lanes", "rpc_servers",
          "vram", "vram_mode"}  # fmt: skip


def with_options(*groups: tuple[Callable[..., Any], ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command these groups of options; `llama_arguments` takes them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def llama_arguments(*, rope_scale: float | None = None, **options: Any) -> dict[str, Any]:
    """The values of the groups above, and of any other options, as `Config.make` takes them; what was not given is left out."""
    if rope_scale is not None:
        if options.get("rope_freq_scale") is not None:
            raise OptionError("give --rope-scale or --rope-freq-scale, not both: one is 1 divided by the other")
        options["rope_freq_scale"] = 1 / rope_scale
    return {name: value for name, value in options.items() if value is not None or name not in _UNSET}
