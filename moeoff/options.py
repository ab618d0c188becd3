"""The table of options, declared as fields of `Config`, `Sampling` and `ServerOptions`.

The command line, its parsing, llama-server's arguments, docs/reference/options.md and
the flags in errors are derived from the fields (`moeoff.option`).

`moeoff --help` imports this module, so numpy and llama.cpp are imported inside
functions.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from .budget.plan import DeviceBound
from .errors import MoeoffError, OptionError
from .option import (
    MOST,
    Option,
    Options,
    integer,
    number,
    one_of,
    option_field,
    parse_switch,
    read,
    table_of,
)
from .precision import LOSSLESS, Precision
from .system.files import read_text
from .system.machine import n_cores
from .system.memory import MIB, parse_percent, parse_size

if TYPE_CHECKING:
    from .experts.sidecar import Sidecar
    from .gguf.model_index import ModelIndex
    from .policies import Strategy

Path = str | os.PathLike[str]

# ggml's numbers of the KV cache types that llama.cpp's programs accept
_CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
_UNQUANTIZED = ("f32", "f16", "bf16")
_SUMS = ("f16", "f32")
LONGEST_DRAFT = 16  # tokens
VRAM_MODES = ("cooperative", "centric", "reordered", "waves", "cpu", "auto")
# the device computes with all experts, or with none
_ALL_UPLOADED = ("centric", "reordered", "waves")
# llama_cpp.Llama's numbers of these names
_POOLINGS = ("none", "mean", "cls", "last", "rank")
_SPLIT_MODES = {"none": 0, "layer": 1}
_ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}
_NUMA_STRATEGIES = {"distribute": 1, "isolate": 2, "numactl": 3}
NO_RPC = (
    "llama.cpp's RPC backend needs whole tensors on the other machine, while experts are read "
    "here, slice by slice; to use several machines, run a replica on each: moeoff.ray"
)


# --- parsers, which raise ValueError or OptionError without the option's name ---


def parse_loss(text: str | float) -> float:
    """Parse a relative increase of perplexity: "1%", "0.01" and 0.01 give 0.01.

    Raises:
        OptionError: The value is not between 0 and 1.
    """
    with contextlib.suppress(ValueError, OverflowError):
        loss = (
            parse_percent(text)
            if isinstance(text, str) and text.strip().endswith("%")
            else float(text)
        )
        if 0 < loss < 1:
            return loss
    raise OptionError(f"expected an increase of perplexity, e.g. 1%, got {text!r}")


def _auto_file_none(value: Any) -> Any:
    """Return "auto", a path, False for none, or an opened object as it is."""
    if value is True:
        raise OptionError("expected auto, a file or none, got True")
    if value is False or value == "none":
        return False
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else value


def _numbered(numbers: dict[str, int]) -> dict[str, Any]:
    """Return the declaration of an option whose names have numbers in llama_cpp."""
    return {
        "parse": one_of(tuple(numbers), numbers),
        "number": numbers.get,
        "choices": tuple(numbers),
    }


def _n_predict(value: str | int) -> int:
    if not (number := integer(-1)(value)):
        raise OptionError("expected at least 1 token, or -1 for as many as fit, got 0")
    return number


def _stop(text: str) -> str:
    if not text:
        raise OptionError("expected a text, got an empty one")
    return text


def _flash_attn(value: str | bool | int) -> bool:
    return value in ("auto", -1) or parse_switch(value)  # llama.cpp's auto means on where supported


def _layers(value: str | int) -> int:
    if value == "auto":  # llama-server's default
        return 0 if _no_gpu() else -1
    return -1 if value == "all" else integer(-1)(value)


def _parallel(value: str | int) -> int | None:
    return None if value in ("auto", "-1", -1) else integer(1, 256)(value)


def _n_ctx(value: str | int) -> int:
    number = integer(0)(value)
    if 0 < number < 8:
        raise OptionError(
            f"expected at least 8 tokens, or 0 for the model's trained length, got {number}"
        )
    return number


def _split_mode(value: str | int) -> str | None:
    if value in ("row", "tensor"):
        raise OptionError(
            f"expected layer or none, got {value}: the expert buffer holds whole rows"
        )
    return one_of(tuple(_SPLIT_MODES), _SPLIT_MODES)(value)


def _shares(value: str | list[float]) -> list[float]:
    try:
        return [
            number(0)(share) for share in (value.split(",") if isinstance(value, str) else value)
        ]
    except OptionError:
        raise OptionError(f"expected shares of the GPUs, e.g. 3,1, got {value!r}") from None


def _device_bound(value: Any) -> DeviceBound:
    return value if isinstance(value, DeviceBound) else DeviceBound.parse(value)


def _strategy(value: Any) -> Strategy:
    from .policies import get_strategy

    return get_strategy(value)


def _refuse_rpc(value: Any) -> None:
    if value:
        raise OptionError(NO_RPC)


def _key(value: str) -> str:
    if not any(part.strip(' "') for part in value.split(",")):
        raise OptionError(
            "expected a key, got an empty one: leave the option out to serve without a key"
        )
    return value


def _key_file(value: Path) -> str:
    if not any(line and not line.startswith("#") for line in read_text(value).split("\n")):
        raise OptionError(f"{value}: expected a key on a line, got none")
    return os.fspath(value)


def _cache_size(value: str | int) -> int:
    if value in ("-1", -1):  # bounded by --memory alone, see `PromptMemory.of`
        return -1
    if isinstance(value, str) and value.strip().isdigit():  # MiB, as in llama-server
        return int(value) * MIB
    return 0 if value == 0 else parse_size(value)


def _disk_size(value: str | int) -> int:
    if str(value).strip() == "0":
        return 0
    if isinstance(value, str) and value.strip().endswith("%"):
        raise OptionError(f"expected a size, e.g. 4G, or 0, got {value!r}")
    return parse_size(value)


_OPEN = "run serve"
_RUN_EVAL = "run serve eval"
_MEASURE = "run serve eval calibrate"
_TYPES = "f16, bf16, f32, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"
_SWITCH: dict[str, Any] = {"metavar": "on|off", "parse": parse_switch, "choices": ("on", "off")}
# One function for each heading
_expert = functools.partial(option_field, group="Experts", commands=_RUN_EVAL)
_context = functools.partial(
    option_field,
    group="Context and batches",
    commands=f"{_RUN_EVAL} inspect bench",
    llama=True,
    server=True,
)
_gpu = functools.partial(option_field, group="GPU", commands=_MEASURE)
_positions = functools.partial(
    option_field, group="Positions", commands=_MEASURE, llama=True, server=True
)
_sampling = functools.partial(option_field, group="Sampling", commands="run", server=True)
_server = functools.partial(option_field, group="Server", commands="serve", server=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The validated options of an open model. `Config.make` parses them.

    Attributes:
        precision: Rules for experts served in lower precision or skipped. Default:
            lossless. `make` also accepts its fields as options.
        direct_io: False to read through the page cache.
        gate_input: True for gate events with the router's input
            (`Llama.set_gate_callback`) and batches with the logits of all tokens
            (`Llama.decode_batch`). llama.cpp's last layers else skip tokens without
            logits.
        replay: Trace of a run with the same prompts, whose decisions are repeated: the
            results are bit-identical whatever is resident.
        llama_cpp: Options of `llama_cpp.Llama` that the table lacks, except `use_mmap`
            and `use_mlock`: experts are not mapped.

    Raises:
        OptionError: An option or strategy is unknown, or a value is invalid.
    """

    # fmt: off
    model_path: str
    memory: int | None = option_field(
        "--memory", metavar="SIZE", parse=parse_size, commands=f"{_MEASURE} inspect bench",
        help="Memory limit of the whole process, e.g. 6G, 700MiB or 80%. Default: 80% of "
             "available memory, lowered while other programs need memory.",
    )
    max_loss: float | None = option_field(
        "--max-loss", metavar="PERCENT", parse=parse_loss, commands=f"{_RUN_EVAL} bench",
        help="Allowed increase of perplexity for speed, e.g. 1%, as measured by calibrate "
             "--max-loss. Default: lossless.",
    )
    n_ctx: int | None = option_field(
        "-c", "--ctx-size", metavar="N", parse=_n_ctx, commands=f"{_OPEN} inspect bench",
        llama=True,
        help="Context length in tokens, rounded up to a multiple of 256; 0: the model's trained "
             "length. Default: the same, at most 4096 (serve: for each answer).",
    )
    n_threads: int | None = option_field(
        "-t", "--threads", metavar="N", parse=integer(1), unset=0,
        commands=f"{_MEASURE} inspect bench", llama=True, server=True,
        help="Compute threads. Default: every core this process may use.",
    )
    n_gpu_layers: int = option_field(
        "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", parse=_layers, default=0,
        commands=f"{_MEASURE} inspect bench", llama=True, server=True,
        help="Layers whose dense part is on the GPU; -1 or all: all, the default of run and serve "
             "with a GPU.",
    )

    expert_memory: int | None = _expert(
        "--expert-memory", metavar="SIZE", parse=parse_size,
        help="Memory limit of the expert cache alone, instead of --memory.",
    )
    strategy: Strategy = _expert(
        "--strategy", metavar="NAME", parse=_strategy, commands=f"{_RUN_EVAL} bench",
        help="Cache policy and predictor: auto, lru, fate, ... Default: auto.",
    )
    stride: int | None = _expert(
        "--stride", metavar="N", parse=integer(-MOST),
        help="Layers that a learned predictor looks ahead, 1 or 2. Default: the strategy's.",
    )
    profile: Path | Literal[False] = _expert(
        "--profile", metavar="auto|FILE|none", parse=_auto_file_none, is_file=True, default="auto",
        commands=f"{_OPEN} bench",
        help="Profile made by moeoff calibrate; auto: MODEL.profile.npz, if it exists.",
    )
    experts: Sidecar | Path | bool = _expert(
        "--experts", metavar="auto|FILE|none", parse=_auto_file_none, is_file=True, default="auto",
        commands=f"{_RUN_EVAL} bench",
        help="Sidecar made by moeoff convert; auto: MODEL.experts.gguf, if it exists.",
    )
    tier: str | None = _expert(
        "--tier", metavar="NAME", commands=f"{_RUN_EVAL} bench",
        help="Precision of the sidecar to run with, e.g. Q2_K, or int4 or lowest. Default: the "
             "model's own.",
    )
    verify_reads: bool = _expert(
        "--verify-reads", default=False, commands=_OPEN,
        help="Compare every expert read with its hash in the sidecar.",
    )
    warm: bool = _expert(
        "--warm", **_SWITCH, default=False, usual=True, commands=_OPEN,
        help="Preload in the background: all experts if they fit, else those cached at the last "
             "exit. While the model waits for a prompt, fill the cache.",
    )
    io_threads: int | None = _expert(
        "--io-threads", metavar="N", parse=integer(1, 64), commands=f"{_OPEN} bench",
        help="Threads that read experts. Default: 4 to 16, as the disk gains from more.",
    )
    deterministic: bool = _expert(
        "--deterministic", default=False,
        help="With --max-loss: decide by a simulated cache, so that a run can be repeated.",
    )
    trace: Path | None = _expert(
        "--trace", metavar="FILE", parse=os.fspath, is_file=True, commands="run",
        help="Append the router's selections to FILE, for moeoff simulate.",
    )

    flash_attn: bool = _context(
        "-fa", "--flash-attn", metavar="on|off|auto", parse=_flash_attn, default=True,
        choices=("on", "off", "auto"),
        help="Flash attention: smaller compute buffers, and faster in long contexts.",
    )
    attention: str = _context(
        "--attention", metavar="f16|f32", parse=one_of(_SUMS), choices=_SUMS, default="f16",
        commands=_RUN_EVAL, llama=False, server="",
        help="Precision of the sums in flash attention: f16, as llama.cpp, or f32: faster and "
             "more exact in long contexts, but not bit-identical to llama.cpp.",
    )
    n_batch: int | None = _context(
        "-b", "--batch-size", metavar="N", parse=integer(1),
        help="Batch size: tokens of a prompt given to llama.cpp at once. Default: as -ub.",
    )
    n_ubatch: int | None = _context(
        "-ub", "--ubatch-size", metavar="N", parse=integer(1),
        help="Micro-batch size: tokens of a prompt computed at once, at most -b. Default: 512, or "
             "a size that is expected to be faster.",
    )
    type_k: str | None = _context(
        "-ctk", "--cache-type-k", metavar="TYPE", **_numbered(_CACHE_TYPES),
        help=f"Type of the KV cache's keys: {_TYPES}. Default: f16.",
    )
    type_v: str | None = _context(
        "-ctv", "--cache-type-v", metavar="TYPE", **_numbered(_CACHE_TYPES),
        help="Type of the KV cache's values; quantized ones need flash attention. Default: f16.",
    )
    swa_full: bool | None = _context(
        "--swa-full", **_SWITCH, commands=f"{_RUN_EVAL} inspect", server="",
        help="Keep the whole context in layers with a sliding window. Default: on.",
    )
    spec_type: str | None = _context(
        "--spec-type", metavar="NAME", commands=_OPEN, llama=False,
        help="Speculative decoding: ngram-simple drafts from the text, draft-simple with -md, "
             "draft-mtp with the model's own layers; serve also takes llama-server's others.",
    )
    draft: str | None = _context(
        "-md", "--model-draft", metavar="FILE", is_file=True, commands=_OPEN, llama=False,
        help="Draft model for speculative decoding: a small model with the same vocabulary, "
             "loaded completely.",
    )
    draft_max: int | None = _context(
        "--draft-max", "--spec-draft-n-max", metavar="N", parse=integer(1, LONGEST_DRAFT),
        commands=_OPEN, llama=False, server="--spec-draft-n-max",
        help="Maximum tokens of a draft. Default: as many as pay off; in serve 3, as in "
             "llama-server.",
    )
    context_shift: bool = _context(
        "--context-shift", default=False, commands=_OPEN, llama=False,
        help="When the context is full, discard its older half and continue.",
    )
    n_keep: int = _context(
        "--keep", metavar="N", parse=integer(-1), default=0, commands=_OPEN, llama=False,
        help="Tokens of the prompt that a context shift keeps; -1: all.",
    )
    n_threads_batch: int | None = _context(
        "-tb", "--threads-batch", metavar="N", parse=integer(1), unset=0, commands=_RUN_EVAL,
        help="Compute threads for prompts. Default: as -t.",
    )

    vram: DeviceBound | None = _gpu(
        "--vram", metavar="SIZE", parse=_device_bound, commands=f"{_RUN_EVAL} bench",
        help="Memory limit on each GPU: e.g. 8G, 80% of what is free, or auto (all but a reserve; "
             "the default of run and serve). Experts get what -ngl leaves.",
    )
    vram_mode: str = _gpu(
        "--vram-mode", metavar="MODE", parse=one_of(VRAM_MODES), choices=VRAM_MODES, default="auto",
        commands=f"{_RUN_EVAL} bench",
        help="How a GPU computes with experts: cooperative, centric, reordered, waves, cpu, or "
             "auto (the fastest, found while it runs).",
    )
    tensor_split: list[float] | None = _gpu(
        "-ts", "--tensor-split", metavar="N0,N1,...", parse=_shares, llama=True, server=True,
        help="Share of the layers for each GPU, e.g. 3,1.",
    )
    split_mode: str | None = _gpu(
        "-sm", "--split-mode", metavar="MODE", unset=1,
        **_numbered(_SPLIT_MODES) | {"parse": _split_mode}, llama=True, server=True,
        help="How layers go to several GPUs: layer, or none for -mg alone. Default: layer.",
    )
    main_gpu: int | None = _gpu(
        "-mg", "--main-gpu", metavar="N", parse=integer(0), llama=True, server=True,
        help="The GPU for -sm none.",
    )
    override_tensor: str | None = _gpu(
        "-ot", "--override-tensor", metavar="PATTERN=BUFFER,...",
        help="Memory for tensors outside the experts by name, e.g. CPU or CUDA0.",
    )
    rpc_servers: None = _gpu(
        "--rpc", metavar="HOSTS", parse=_refuse_rpc, hidden=True,
        help="Refused.",
    )

    rope_scaling_type: str | None = _positions(
        "--rope-scaling", metavar="METHOD", **_numbered(_ROPE_SCALINGS), unset=-1,
        help="Scaling of positions: none, linear or yarn. Default: the model's.",
    )
    rope_scale: float | None = _positions(
        "--rope-scale", metavar="N", parse=number(above=0), llama=False, server="",
        help="Context scaling factor: expands the context N times.",
    )
    rope_freq_base: float | None = _positions(
        "--rope-freq-base", metavar="N", parse=number(above=0), unset=0,
        help="Base frequency. Default: the model's.",
    )
    rope_freq_scale: float | None = _positions(
        "--rope-freq-scale", metavar="N", parse=number(above=0), unset=0,
        help="Frequency scale: expands the context 1/N times.",
    )
    yarn_orig_ctx: int | None = _positions(
        "--yarn-orig-ctx", metavar="N", parse=integer(1), unset=0,
        help="YaRN: context length of the original training. Default: the model's.",
    )
    yarn_ext_factor: float | None = _positions(
        "--yarn-ext-factor", metavar="N", parse=number(),
        help="YaRN: share of extrapolation; 0: interpolation alone. Default: the model's.",
    )
    yarn_attn_factor: float | None = _positions(
        "--yarn-attn-factor", metavar="N", parse=number(),
        help="YaRN: scale of attention. Default: the model's.",
    )
    yarn_beta_slow: float | None = _positions(
        "--yarn-beta-slow", metavar="N", parse=number(),
        help="YaRN: high correction dimension. Default: the model's.",
    )
    yarn_beta_fast: float | None = _positions(
        "--yarn-beta-fast", metavar="N", parse=number(),
        help="YaRN: low correction dimension. Default: the model's.",
    )

    numa: str | None = option_field(
        "--numa", metavar="STRATEGY", **_numbered(_NUMA_STRATEGIES), unset=0, llama=True,
        server=True, group="Machine", commands=_MEASURE,
        help="Placement of threads on several NUMA nodes, by llama.cpp: distribute, isolate or "
             "numactl.",
    )
    verbose: bool = option_field(
        "-v", "--verbose", default=False, commands="run serve eval", llama=True, group="Machine",
        help="Show llama.cpp's log.",
    )

    # fmt: on
    precision: Precision = LOSSLESS
    direct_io: bool = True
    gate_input: bool = False
    replay: Path | None = None
    llama_cpp: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, model_path: Path | Config, **options: Any) -> Config:
        """Parse options: names, sizes, percentages, paths. None means not given.

        A `Config` in place of the path is returned as it is.
        """
        if isinstance(model_path, Config):
            return model_path
        if (precision := Precision.pop(options)) is not None:
            if options.get("precision") is not None:
                raise OptionError("give `precision` or its thresholds, not both")
            options["precision"] = precision
        ours = {f.name for f in fields(cls)} - {"llama_cpp"}
        values = read(cls, {name: value for name, value in options.items() if name in ours})
        others = {name: value for name, value in options.items() if name not in ours}
        return cls(model_path=os.fspath(model_path), llama_cpp=others, **_completed(values))

    def __post_init__(self) -> None:
        from .llamacpp.llama import KEYWORDS

        unknown = sorted(set(self.llama_cpp) - set(KEYWORDS))
        if unknown:
            raise OptionError(
                f"unknown option {unknown[0]!r}: neither moeoff.Llama nor llama_cpp.Llama takes it"
            )
        if self.llama_cpp.get("use_mmap") or self.llama_cpp.get("use_mlock"):
            raise OptionError(
                "`use_mmap` and `use_mlock` are not supported: experts are not mapped"
            )
        if self.n_keep and not self.context_shift:
            raise OptionError("`n_keep` has no effect without `context_shift`")
        if self.draft_max is not None and not (self.spec_type or self.draft):
            raise OptionError("`draft_max` has no effect without `spec_type` or `draft`")
        if self.memory is not None and self.expert_memory is not None:
            raise OptionError("give `memory` or `expert_memory`, not both")
        if self.max_loss is not None and (
            not self.precision.lossless or self.tier not in (None, "original")
        ):
            raise OptionError("`max_loss` chooses the precision: give no other")
        if self.type_v not in (None, *_UNQUANTIZED) and not self.flash_attn:
            raise OptionError(f"`type_v` {self.type_v}: needs flash attention, which is off")
        if self.attention == "f32" and not self.flash_attn:
            raise OptionError("`attention` f32: needs flash attention, which is off")
        self.check_precision(self.precision)
        self._check_gpu()

    def _check_gpu(self) -> None:
        gpu = [name for name in (*_OF_GPUS, "vram") if getattr(self, name)]
        if gpu and gpu[0] != "vram" and (why := _no_gpu()):
            raise OptionError(f"`{gpu[0]}`: {why}")
        if gpu and not self.n_gpu_layers:
            raise OptionError(
                f"`{gpu[0]}` has no effect while no layer goes to the GPU",
                hint={"n_gpu_layers": ...},
            )
        if self.vram is None:
            return
        if self.vram_mode not in _ALL_UPLOADED and (self.deterministic or self.replay is not None):
            raise OptionError(
                "`vram` depends on timing: a repeatable run needs `vram_mode` centric, reordered or"
                " waves"
            )
        self.check_adapters(bool(self.llama_cpp.get("lora_path")))

    def check_adapters(self, adapters: bool) -> None:
        """Raise `OptionError` if adapters (LoRA) are not supported in this `vram_mode`."""
        modes = ("cpu",) if self.precision.uses_low else ("centric", "cpu")
        if adapters and self.vram is not None and self.vram_mode not in modes:
            low = " with experts in low precision" if self.vram_mode == "centric" else ""
            raise OptionError(
                f"`vram_mode` {self.vram_mode}: no adapters (LoRA){low}; give {' or '.join(modes)}"
            )

    def check_precision(self, precision: Precision) -> None:
        """Raise `OptionError` if the strategy does not support a precision."""
        name = self.strategy.name
        if not self.strategy.eager and not (precision.lossless and self.replay is None):
            raise OptionError(f"strategy {name!r} supports neither lower precision nor replay")
        if not precision.mispredicted_low:
            return
        if self.strategy.predictor is None or self.strategy.ab_tested:
            raise OptionError(
                f"`mispredicted_low` needs a strategy that always prefetches, as fate, not {name!r}"
            )
        if self.deterministic:
            raise OptionError(
                "`mispredicted_low` depends on timing: give it or `deterministic`, not both"
            )

    def check_model(self, model_index: ModelIndex) -> None:
        """Raise `OptionError` for options without effect or that crash."""
        from .llamacpp.llama import KEYWORDS

        others = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")
        yarn_options = [
            name for name in others if getattr(self, name) not in (None, KEYWORDS[name])
        ]
        yarn = (self.rope_scaling_type or model_index.hparams.get("rope.scaling.type")) == "yarn"
        if (
            yarn_options
            and not yarn
            and (self.yarn_ext_factor is None or self.yarn_ext_factor <= 0)
        ):
            raise OptionError(
                f"`{yarn_options[0]}` has no effect: rope scaling is not YaRN; set"
                " `rope_scaling_type`"
            )
        if self.context_shift and self.type_k not in (None, *_UNQUANTIZED):
            widths = model_index.key_widths
            if len(widths) > 1 or any(width % _HADAMARD for width in widths):
                # llama.cpp reads a null pointer for other sizes
                keys = f"quantized keys of width {', '.join(map(str, sorted(widths)))}"
                way_out = "give f16, bf16 or f32 as `type_k`"
                raise OptionError(f"`context_shift`: cannot shift {keys}: {way_out}")

    @property
    def repeatable(self) -> bool:
        """True if results must not depend on memory or timing."""
        return self.deterministic or self.trace is not None or self.replay is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of llama_cpp.Llama."""
        n_threads = self.n_threads or n_cores()
        values = {
            name: getattr(self, name) for name, line in table_of(Config).items() if line.llama
        }
        options = {
            **_MODELS_OWN,
            **self.llama_cpp,
            **llama_keywords(values),
            "use_mmap": False,
            "n_threads": n_threads,
        }
        # llama_cpp's 512 would cap n_ubatch
        if "n_batch" not in options and options.get("n_ubatch"):
            options["n_batch"] = options["n_ubatch"]
        return options | {"n_threads_batch": self.n_threads_batch or n_threads}


_OF_GPUS = ("n_gpu_layers", "tensor_split", "split_mode", "main_gpu")


def _no_gpu() -> str:
    """Return why llama.cpp cannot use a GPU here, empty if it can."""
    from .llamacpp.devices import backends, why_none
    from .llamacpp.llama import supports_gpu

    if supports_gpu():
        return ""
    if backends():
        return why_none()
    return (
        "this build has no GPU backend; rebuild with CMAKE_ARGS=-DGGML_CUDA=ON (or METAL, VULKAN)"
    )


def without_gpu(values: dict[str, Any]) -> list[str]:
    """Remove GPU options on a machine without a GPU, and return a remark on them.

    Nothing is removed where `vram` gives a size, which `Config` refuses.
    """
    names = [name for name in (*_OF_GPUS, "vram") if values.get(name)]
    if (
        not names
        or "vram" in names
        and not _device_bound(values["vram"]).auto
        or not (why := _no_gpu())
    ):
        return []
    for name in names:
        del values[name]
    return [
        f"{' and '.join(TABLE[name].flag for name in names)} {'has' if len(names) == 1 else 'have'}"
        f" no effect: {why}"
    ]


def with_gpu(values: dict[str, Any], adapters: bool = False) -> None:
    """Default to all layers on the GPU, and to experts in the rest of its memory.

    A repeatable run stays on the CPU, as do experts with adapters or `vram_mode` cpu.
    """
    if (
        values.get("n_gpu_layers") == 0
        or any(values.get(name) for name in ("deterministic", "trace", "replay"))
        or _no_gpu()
    ):
        return
    values.setdefault("n_gpu_layers", -1)
    if not adapters and values.get("vram_mode") != "cpu":
        values.setdefault("vram", _device_bound("auto"))


# -1 keeps the model file's values, which llama_cpp.Llama's defaults would override
_MODELS_OWN = {"yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}
_HADAMARD = 64  # elements of a head that llama.cpp rotates together before quantizing


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Add the strategy's own precision, tier and `vram_mode` where the values have
    none.
    """
    strategy = values.get("strategy") or _strategy("auto")
    if values.get("stride") is not None:
        strategy = strategy.with_stride(values["stride"])
    own = {
        name: values.get(name) or getattr(strategy, name)
        for name in ("precision", "vram_mode", "tier")
    }
    if values.get("rope_scale") is not None:
        if values.get("rope_freq_scale") is not None:
            raise OptionError("give `rope_scale` or its inverse `rope_freq_scale`, not both")
        values["rope_freq_scale"] = 1 / values["rope_scale"]
    return values | own | {"strategy": strategy}


def llama_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to llama_cpp.Llama's arguments. Others stay as they are."""
    table, out = table_of(Config), {}
    for name, value in values.items():
        line = table.get(name)
        if line is not None and value is not None:
            value = line.read(value)
            value = line.number(value) if line.number and value is not None else value
        if value is not None:
            out[name] = value
    return out


@dataclass(frozen=True, kw_only=True)
class Sampling(Options):
    """llama-server's sampling options, declared for validation and the help of `run`.

    The defaults are llama.cpp's or the model's.
    """

    # fmt: off
    n_predict: int = _sampling(
        "-n", "--predict", "--n-predict", metavar="N", parse=_n_predict, default=-1, group="",
        help="Tokens to generate at most; -1: as many as fit.",
    )
    temp: float = _sampling(
        "--temp", "--temperature", metavar="T", parse=number(0), default=0.8, group="",
        help="Temperature; 0 takes the likeliest token.",
    )
    top_k: int = _sampling(
        "--top-k", metavar="K", parse=integer(-MOST), default=40,
        help="Sample from the K likeliest tokens; 0: from all.",
    )
    top_p: float = _sampling(
        "--top-p", metavar="P", parse=number(0, 1), default=0.95,
        help="Sample from the likeliest tokens that make up this probability.",
    )
    min_p: float = _sampling(
        "--min-p", metavar="P", parse=number(0, 1), default=0.05,
        help="Exclude tokens below this share of the likeliest token's probability.",
    )
    repeat_penalty: float = _sampling(
        "--repeat-penalty", metavar="N", parse=number(above=0), default=1.0,
        help="Penalty on recent tokens; 1: none.",
    )
    presence_penalty: float = _sampling(
        "--presence-penalty", metavar="N", parse=number(-2, 2), default=0.0,
        help="Penalty on tokens that occurred; 0: none.",
    )
    frequency_penalty: float = _sampling(
        "--frequency-penalty", metavar="N", parse=number(-2, 2), default=0.0,
        help="Penalty on tokens by their number of occurrences; 0: none.",
    )
    seed: int = _sampling(
        "-s", "--seed", metavar="N", parse=integer(-MOST, 2**32 - 1), default=-1,
        help="Seed of the sampler; -1: a random one.",
    )
    stop: tuple[str, ...] = _sampling(
        "-r", "--reverse-prompt", "--stop", metavar="TEXT", parse=_stop, multiple=True, default=(),
        help="Text that ends the answer and is not part of it. May be given several times.",
    )
    ignore_eos: bool = _sampling(
        "--ignore-eos", default=False,
        help="Ignore the end token and generate -n tokens.",
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Options of a server in addition to `Config`.

    Attributes:
        args: Arguments passed on to llama-server.
    """

    # fmt: off
    host: str = _server(
        "--host", metavar="ADDRESS", default="127.0.0.1", group="",
        help="Address to listen on; 0.0.0.0: all (then give an --api-key).",
    )
    port: int = _server(
        "--port", metavar="N", parse=integer(0, 65535), default=8080, group="",
        help="Port to listen on; 0: a free one.",
    )
    parallel: int | None = _server(
        "-np", "--parallel", metavar="N|auto", parse=_parallel, group="",
        help="Slots: answers at a time, which share the context. Default: 4, or fewer in a small "
             "budget.",
    )
    kv_unified: bool = _server(
        "--kv-unified", **_SWITCH, default=True, server="",
        help="Slots share the context; off: each has its own part.",
    )
    api_key: str | None = _server(
        "--api-key", metavar="KEY", parse=_key, envvar="MOEOFF_API_KEY", group="",
        help="Refuse requests without this bearer token; several, separated by commas.",
    )
    api_key_file: str | None = _server(
        "--api-key-file", metavar="FILE", parse=_key_file, is_file=True,
        help="File with API keys, one a line.",
    )
    alias: str | None = _server(
        "-a", "--alias", metavar="NAME", server="--alias", group="",
        help="Model name in /v1/models. Default: the file name.",
    )
    cors: tuple[str, ...] = _server(
        "--cors", metavar="ORIGIN", multiple=True, default=(), server="--cors-origins",
        help="Allow requests from web pages of this origin, e.g. https://example.org or *; may be "
             "repeated.",
    )
    allowed_hosts: tuple[str, ...] = _server(
        "--allowed-hosts", metavar="NAME", multiple=True, default=(), server="",
        help="Also allow this name in the Host header (*: any), if there is no API key and only "
             "this machine can connect; may be repeated.",
    )
    cache_ram: int | None = _server(
        "-cram", "--cache-ram", metavar="SIZE", parse=_cache_size, server="",
        help="Prompt cache: memory for prompts outside the context, part of --memory; -1: all but "
             "the experts' minimum. Default: at most an eighth of the experts' memory, and what "
             "experts cannot use.",
    )
    kv_disk: int | None = _server(
        "--kv-disk", commands=_OPEN, metavar="SIZE", parse=_disk_size, server="",
        help="Disk space in the user's cache folder for prompts evicted from memory. A prompt is "
             "restored if reading it is faster than computing it. 0: none. Default: 4G, in run "
             "none.",
    )
    ctx_checkpoints: int | None = _server(
        "-ctxcp", "--ctx-checkpoints", commands=_OPEN, metavar="N", parse=integer(0, 1024),
        server="",
        help="Checkpoints of each slot's recurrent state, part of --memory. Default: as many as "
             "fit, up to 8.",
    )
    mmproj: str | None = _server(
        "--mmproj", commands=_OPEN, metavar="FILE", is_file=True,
        help="Projector for images and sound.",
    )
    embedding: bool = _server("--embedding", default=False, help="Serve embeddings.")
    pooling: str | None = _server(
        "--pooling", metavar="TYPE", parse=one_of(_POOLINGS), choices=_POOLINGS,
        help="Pooling of token embeddings: none, mean, cls, last or rank. Default: the model's, "
             "or mean.",
    )
    rerank: bool = _server("--rerank", default=False, help="Serve /rerank, with a reranking model.")
    # fmt: on
    args: tuple[str, ...] = ()

    @property
    def has_key(self) -> bool:
        """True if requests need a key. llama-server reads LLAMA_API_KEY, too."""
        return bool(self.api_key or self.api_key_file or os.environ.get("LLAMA_API_KEY"))

    @property
    def open_to(self) -> str | None:
        """First address that accepts requests of other machines without a key, or None."""
        hosts = () if self.has_key else (host.strip() for host in self.host.split(","))
        return next(
            (
                host
                for host in hosts
                if not (
                    host.endswith(".sock")
                    or host in ("localhost", "::1", "")
                    or host.startswith("127.")
                )
            ),
            None,
        )

    @property
    def sites(self) -> tuple[str, ...] | None:
        """Names allowed as Host or Origin besides the loopback names. None allows any
        name.

        This stops web pages whose name resolves to 127.0.0.1 (DNS rebinding), as a key
        does. A server open to other machines does not know its own names.
        """
        is_open = self.has_key or self.open_to or "*" in self.allowed_hosts
        return None if is_open else self.allowed_hosts


TABLE: dict[str, Option] = {
    name: line
    for kind in (Config, Precision, Sampling, ServerOptions)
    for name, line in table_of(kind).items()
}


def spelled(
    name: str,
    value: object,
    flags: Mapping[str, tuple[str, str]] = {},  # noqa: B006
) -> str:
    """Spell an option and its value for the command line.

    Args:
        value: True gives the flag alone, `...` the flag and its metavar.
        flags: Flag and metavar of the running command's options, by name.
    """
    line = TABLE.get(name)
    flag, form = flags.get(name) or (
        (line.flag, line.metavar) if line else ("--" + name.replace("_", "-"), name.upper())
    )
    if value is True:
        return flag
    if value is ...:
        # auto|FILE|none: FILE
        value = next((part for part in form.split("|") if part.isupper()), form)
    return f"{flag} {line.spell(value) if line else value}"


def in_flags(error: MoeoffError, flags: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return an error's message with flags instead of Python's option names.

    Args:
        flags: Flags as in `spelled`. Only ways out with these flags are named. None:
            all.
    """
    message = re.sub(r"`(\w+)`", lambda match: spelled(match[1], True, flags or {}), error.message)
    ways_out = [
        spelled(name, value, flags or {})
        for name, value in error.hint.items()
        if flags is None or name in flags
    ]
    return message + (": give " + ", or ".join(ways_out) if ways_out else "")
