"""The table of options: each is declared once (`moeoff.option`), as a field of `Config`, `Sampling` or `ServerOptions`, and everything else is made from that.

From a field come click's option, the reading of what people write, llama-server's argument, the line in docs/reference/options.md, and the
flag that an error names. An option is added by its line here and where it is used.

Light on purpose: `moeoff --help` imports this, and neither numpy nor llama.cpp; what reads with them imports them inside.
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
from .option import MOST, Option, Options, integer, number, one_of, option, parse_switch, read, table_of
from .precision import LOSSLESS, Precision
from .system.files import read_text
from .system.machine import n_cores
from .system.memory import MIB, parse_percent, parse_size

if TYPE_CHECKING:
    from .experts.sidecar import Sidecar
    from .gguf.model_index import ModelIndex
    from .policies import Strategy

Path = str | os.PathLike[str]

# ggml's numbers of these types; llama.cpp's programs take no others
_CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}
_UNQUANTIZED = ("f32", "f16", "bf16")
_SUMS = ("f16", "f32")
LONGEST_DRAFT = 16  # tokens
VRAM_MODES = ("cooperative", "centric", "waves", "cpu", "auto")
_ALL_UPLOADED = ("centric", "waves")  # the device computes with all experts, or with none
# llama_cpp.Llama's numbers of these names
_POOLINGS = ("none", "mean", "cls", "last", "rank")
_SPLIT_MODES = {"none": 0, "layer": 1}
_ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}
_NUMA_STRATEGIES = {"distribute": 1, "isolate": 2, "numactl": 3}
NO_RPC = (
    "llama.cpp's RPC server would be handed whole tensors, and addresses that mean nothing on another machine, while experts are read here, slice by slice; "
    "on several machines run a replica on each: moeoff.ray"
)


# --- reading what people write; each raises ValueError or OptionError, without the option's name ---


def parse_loss(text: str | float) -> float:
    """A relative increase of perplexity: 0.01 of "1%", "0.01" or 0.01.

    Raises:
        OptionError: not a share above 0 and below 1.
    """
    with contextlib.suppress(ValueError, OverflowError):
        loss = parse_percent(text) if isinstance(text, str) and text.strip().endswith("%") else float(text)
        if 0 < loss < 1:
            return loss
    raise OptionError(f"not a loss: {text!r}; write for example 1%: the increase of perplexity that is allowed")


def _auto_file_none(value: Any) -> Any:
    """ "auto", a path, or False for "none" and False; an object that was opened already stays."""
    if value is True:
        raise OptionError("auto, a file, or none, not True")
    if value is False or value == "none":
        return False
    return os.fspath(value) if isinstance(value, (str, os.PathLike)) else value


def _numbered(numbers: dict[str, int]) -> dict[str, Any]:
    """How an option is declared whose names llama_cpp has numbers for."""
    return {"parse": one_of(tuple(numbers), numbers), "number": numbers.get, "choices": tuple(numbers)}


def _tokens(value: str | int) -> int:
    number = integer(-MOST)(value)
    if number < 1:
        raise OptionError(f"at least 1 token, not {number}")
    return number


def _n_predict(value: str | int) -> int:
    if (number := integer(-MOST)(value)) == 0 or number < -1:
        raise OptionError(f"at least 1 token, or -1 for as many as fit, not {number}")
    return number


def _stop(text: str) -> str:
    if not text:
        raise OptionError("an empty text would end every answer before it begins")
    return text


def _flash_attn(value: str | bool | int) -> bool:
    return value in ("auto", -1) or parse_switch(value)  # llama.cpp's auto is on wherever it can be


def _layers(value: str | int) -> int:
    if value == "auto":  # llama-server's default: what there is
        return 0 if _no_gpu() else -1
    return -1 if value == "all" else integer(-1)(value)


def _parallel(value: str | int) -> int | None:
    return None if value in ("auto", "-1", -1) else integer(1, 256)(value)


def _n_ctx(value: str | int) -> int:
    number = integer(0)(value)
    if 0 < number < 8:
        raise OptionError(f"at least 8 tokens, or 0 for as many as the model was trained with, not {number}")
    return number


def _split_mode(value: str | int) -> str | None:
    if value in ("row", "tensor"):
        raise OptionError(f"layer or none, not {value}: experts are computed from the expert buffer, which holds whole rows")
    return one_of(tuple(_SPLIT_MODES), _SPLIT_MODES)(value)


def _shares(value: str | list[float]) -> list[float]:
    try:
        return [number(0)(share) for share in (value.split(",") if isinstance(value, str) else value)]
    except OptionError:
        raise OptionError(f"shares of the GPUs as 3,1, not {value!r}") from None


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
        raise OptionError("an empty key would let everyone in; leave it out if that is meant")
    return value


def _key_file(value: Path) -> str:
    if not any(line and not line.startswith("#") for line in read_text(value).split("\n")):
        raise OptionError(f"{value}: has no key, and would let everyone in")
    return os.fspath(value)


def _cache_size(value: str | int) -> int:
    if value in ("-1", -1):  # no bound but the process's, see `PromptMemory.of`
        return -1
    if isinstance(value, str) and value.strip().isdigit():  # as llama-server reads it
        return int(value) * MIB
    return 0 if value == 0 else parse_size(value)


def _disk_size(value: str | int) -> int:
    if str(value).strip() == "0":
        return 0
    if isinstance(value, str) and value.strip().endswith("%"):
        raise OptionError(f"a size as 4G, or 0, not {value!r}")
    return parse_size(value)


_OPEN = "run serve"
_RUN_EVAL = "run serve eval"
_MEASURE = "run serve eval calibrate"
_TYPES = "f16, bf16, f32, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl"
# the lines of one heading; those of a context have llama.cpp's own names in all its programs
_expert = functools.partial(option, group="Experts", commands=_RUN_EVAL)
_context = functools.partial(option, group="Context and batches", commands=f"{_RUN_EVAL} inspect bench", llama=True, server=True)
_gpu = functools.partial(option, group="GPU", commands=_MEASURE)
_positions = functools.partial(option, group="Positions", commands=_MEASURE, llama=True, server=True)
_sampling = functools.partial(option, group="Sampling", commands="run", server=True)
_server = functools.partial(option, group="Server", commands="serve", server=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a model is opened: one validated, frozen object, built by `Llama`, the command line, the server and calibration alike.

    `Config.make` takes the options as people write them. Options of `llama_cpp.Llama` that are not in the table lie in `llama_cpp`; `n_threads` is every core
    this process may use by default, and `use_mmap` and `use_mlock` are not available, because the experts are not mapped.

    Attributes:
        precision: which experts may be served in lower precision, or not at all; the default is lossless. `make` takes its fields one by one, too.
        direct_io: False reads through the page cache.
        gate_input: gate events carry the router's input (see `Llama.set_gate_callback`), and batches may give the logits of all their
            tokens (`Llama.decode_batch`): llama.cpp's last layers leave out the tokens whose logits are not asked for.
        replay: trace of an earlier run with the same prompts: its decisions are taken again instead of new ones, so that the
            results are the same bit for bit whatever is resident.

    Raises:
        OptionError: an unknown option or strategy, or a value that makes no sense.
    """

    model_path: str
    memory: int | None = option("--memory", metavar="SIZE", parse=parse_size, commands=f"{_MEASURE} inspect bench",
                                help="Memory limit of the whole process, e.g. 6G, 700MiB or 80%. Default: 80% of what is available, "
                                     "lowered while other programs need memory.")  # fmt: skip
    max_loss: float | None = option("--max-loss", metavar="PERCENT", parse=parse_loss, commands=f"{_RUN_EVAL} bench",
                                    help="Perplexity that may be lost for speed, e.g. 1%, by what calibrate --max-loss measured. Default: lossless.")  # fmt: skip
    n_ctx: int | None = option("-c", "--ctx-size", metavar="N", parse=_n_ctx, commands=f"{_OPEN} inspect bench", llama=True,
                               help="Context in tokens, rounded up to a multiple of 256; 0: as many as the model was trained with. Default: the same, "
                                    "but at most 4096 (serve: for each answer).")  # fmt: skip
    n_threads: int | None = option("-t", "--threads", metavar="N", parse=integer(1), unset=0, commands=f"{_MEASURE} inspect bench", llama=True, server=True,
                                   help="Compute threads. Default: every core this process may use.")  # fmt: skip
    n_gpu_layers: int = option("-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", parse=_layers, default=0, commands=f"{_MEASURE} inspect bench", llama=True,
                               server=True, help="Layers whose dense part goes to the GPU; -1 or all: all of them, the default of run and serve if "
                                                 "there is a GPU.")  # fmt: skip

    expert_memory: int | None = _expert("--expert-memory", metavar="SIZE", parse=parse_size,
                                        help="Memory limit of the expert cache alone, instead of --memory.")  # fmt: skip
    strategy: Strategy = _expert("--strategy", metavar="NAME", parse=_strategy, commands=f"{_RUN_EVAL} bench",
                                 help="Cache policy and predictor: auto, lru, fate, ... Default: auto.")  # fmt: skip
    stride: int | None = _expert("--stride", metavar="N", parse=integer(-MOST),
                                 help="Layers that a learned predictor looks ahead, 1 or 2. Default: the strategy's.")  # fmt: skip
    profile: Path | Literal[False] = _expert("--profile", metavar="auto|FILE|none", parse=_auto_file_none, is_file=True, default="auto",
                                             commands=f"{_OPEN} bench", help="Profile made by moeoff calibrate; auto: MODEL.profile.npz, if it exists.")  # fmt: skip
    experts: Sidecar | Path | bool = _expert("--experts", metavar="auto|FILE|none", parse=_auto_file_none, is_file=True, default="auto",
                                             commands=f"{_RUN_EVAL} bench", help="Sidecar made by moeoff convert; auto: MODEL.experts.gguf, if it exists.")  # fmt: skip
    tier: str | None = _expert("--tier", metavar="NAME", commands=f"{_RUN_EVAL} bench",
                               help="Precision of the sidecar to run with, e.g. Q2_K, or int4 or lowest. Default: the model's own.")  # fmt: skip
    verify_reads: bool = _expert("--verify-reads", default=False, commands=_OPEN, help="Compare every expert read with its hash in the sidecar.")
    warm: bool = _expert("--warm", metavar="on|off", parse=parse_switch, default=False, usual=True, choices=("on", "off"), commands=_OPEN,
                         help="Preload in the background: all experts if they fit, else those cached at the last exit. While the model waits for a "
                              "prompt, fill the cache.")  # fmt: skip
    io_threads: int | None = _expert("--io-threads", metavar="N", parse=integer(1, 64), commands=f"{_OPEN} bench",
                                     help="Threads that read experts. Default: as many as the disk is seen to gain from, 4 to 16.")  # fmt: skip
    deterministic: bool = _expert("--deterministic", default=False,
                                  help="With --max-loss: decide by a simulated cache instead of the real one, so that a run can be repeated.")  # fmt: skip
    trace: Path | None = _expert("--trace", metavar="FILE", parse=os.fspath, is_file=True, commands="run",
                                 help="Append which experts the router selected to FILE, for moeoff simulate.")  # fmt: skip

    flash_attn: bool = _context("-fa", "--flash-attn", metavar="on|off|auto", parse=_flash_attn, default=True, choices=("on", "off", "auto"),
                                help="Flash attention: smaller compute buffers, and faster in long contexts.")  # fmt: skip
    attention: str = _context("--attention", metavar="f16|f32", parse=one_of(_SUMS), choices=_SUMS, default="f16", commands=_RUN_EVAL, llama=False, server="",
                              help="How flash attention adds up values: f16, as llama.cpp, or f32: faster and more exact in long contexts, but not with "
                                   "llama.cpp's bits.")  # fmt: skip
    n_batch: int | None = _context("-b", "--batch-size", metavar="N", parse=_tokens, help="Tokens of a prompt given to llama.cpp at once. Default: as -ub.")
    n_ubatch: int | None = _context("-ub", "--ubatch-size", metavar="N", parse=_tokens,
                                    help="Tokens of a prompt computed at once, at most -b. Default: 512, or fewer or more if prompts are expected to "
                                         "be faster.")  # fmt: skip
    type_k: str | None = _context("-ctk", "--cache-type-k", metavar="TYPE", **_numbered(_CACHE_TYPES),
                                  help=f"Type of the KV cache's keys: {_TYPES}. Default: f16.")  # fmt: skip
    type_v: str | None = _context("-ctv", "--cache-type-v", metavar="TYPE", **_numbered(_CACHE_TYPES),
                                  help="Type of the KV cache's values; quantized ones need flash attention. Default: f16.")  # fmt: skip
    swa_full: bool | None = _context("--swa-full", metavar="on|off", parse=parse_switch, choices=("on", "off"), commands=f"{_RUN_EVAL} inspect", server="",
                                     help="Whether layers with a sliding window keep the whole context. Default: on.")  # fmt: skip
    spec_type: str | None = option("--spec-type", metavar="NAME", group="Context and batches", commands="run serve", server=True,
                                   help="Draft tokens ahead and verify several at once: ngram-simple, from the text itself, draft-simple, with -md, or "
                                        "draft-mtp, with the model's own layers; serve also llama-server's others.")  # fmt: skip
    draft: str | None = option("-md", "--model-draft", metavar="FILE", is_file=True, group="Context and batches", commands="run serve", server=True,
                               help="Draft model for speculative decoding: a small one with the same vocabulary, in memory as a whole.")  # fmt: skip
    draft_max: int | None = option("--draft-max", "--spec-draft-n-max", metavar="N", parse=integer(1, LONGEST_DRAFT), group="Context and batches",
                                   commands="run serve", server="--spec-draft-n-max",
                                   help="Tokens of a draft, at most. Default: as many as pay; in serve 3, as llama-server's.")  # fmt: skip
    context_shift: bool = _context("--context-shift", default=False, commands=_OPEN, llama=False,
                                   help="When the context is full, forget the older half of it and go on.")  # fmt: skip
    n_keep: int = _context("--keep", metavar="N", parse=integer(-MOST), default=0, commands=_OPEN, llama=False,
                           help="Tokens of the prompt that a context shift keeps; -1: all.")  # fmt: skip
    n_threads_batch: int | None = _context("-tb", "--threads-batch", metavar="N", parse=integer(1), unset=0, commands=_RUN_EVAL,
                                           help="Compute threads of prompts. Default: as -t.")  # fmt: skip

    vram: DeviceBound | None = _gpu("--vram", metavar="SIZE", parse=_device_bound, commands=f"{_RUN_EVAL} bench",
                                    help="Memory limit on each GPU: e.g. 8G, 80% of what is free, or auto (all but a reserve; the default of run and "
                                         "serve). Experts get what -ngl leaves.")  # fmt: skip
    vram_mode: str = _gpu("--vram-mode", metavar="MODE", parse=one_of(VRAM_MODES), choices=VRAM_MODES, default="auto", commands=f"{_RUN_EVAL} bench",
                          help="How a GPU computes with experts: cooperative, centric, waves, cpu, or auto (the fastest, found while it runs).")  # fmt: skip
    tensor_split: list[float] | None = _gpu("-ts", "--tensor-split", metavar="N0,N1,...", parse=_shares, llama=True, server=True,
                                            help="Share of the layers for each GPU, e.g. 3,1.")  # fmt: skip
    split_mode: str | None = _gpu("-sm", "--split-mode", metavar="MODE", unset=1, **_numbered(_SPLIT_MODES) | {"parse": _split_mode}, llama=True, server=True,
                                  help="How layers go to several GPUs: layer, or none for -mg alone. Default: layer.")  # fmt: skip
    main_gpu: int | None = _gpu("-mg", "--main-gpu", metavar="N", parse=integer(0), llama=True, server=True, help="The GPU for -sm none.")
    override_tensor: str | None = _gpu("-ot", "--override-tensor", metavar="PATTERN=BUFFER,...",
                                       help="Memory for tensors outside the experts whose names match, e.g. CPU or CUDA0.")  # fmt: skip
    rpc_servers: None = _gpu("--rpc", metavar="HOSTS", parse=_refuse_rpc, hidden=True, help="Refused.")

    rope_scaling_type: str | None = _positions("--rope-scaling", metavar="METHOD", **_numbered(_ROPE_SCALINGS), unset=-1,
                                               help="Scaling of positions: none, linear or yarn. Default: the model's.")  # fmt: skip
    rope_scale: float | None = _positions("--rope-scale", metavar="N", parse=number(above=0), llama=False, server="",
                                          help="Context scaling factor: expands the context N times.")  # fmt: skip
    rope_freq_base: float | None = _positions("--rope-freq-base", metavar="N", parse=number(above=0), unset=0, help="Base frequency. Default: the model's.")
    rope_freq_scale: float | None = _positions("--rope-freq-scale", metavar="N", parse=number(above=0), unset=0,
                                               help="Frequency scale: expands the context 1/N times.")  # fmt: skip
    yarn_orig_ctx: int | None = _positions("--yarn-orig-ctx", metavar="N", parse=integer(1), unset=0,
                                           help="YaRN: context that the model was trained with first. Default: the model's.")  # fmt: skip
    yarn_ext_factor: float | None = _positions("--yarn-ext-factor", metavar="N", parse=number(),
                                               help="YaRN: share of extrapolation; 0: interpolation alone. Default: the model's.")  # fmt: skip
    yarn_attn_factor: float | None = _positions("--yarn-attn-factor", metavar="N", parse=number(), help="YaRN: scale of attention. Default: the model's.")
    yarn_beta_slow: float | None = _positions("--yarn-beta-slow", metavar="N", parse=number(), help="YaRN: high correction dimension. Default: the model's.")
    yarn_beta_fast: float | None = _positions("--yarn-beta-fast", metavar="N", parse=number(), help="YaRN: low correction dimension. Default: the model's.")

    numa: str | None = option("--numa", metavar="STRATEGY", **_numbered(_NUMA_STRATEGIES), unset=0, llama=True, server=True, group="Machine", commands=_MEASURE,
                              help="For several NUMA nodes: distribute, isolate or numactl. Threads are then placed by llama.cpp.")  # fmt: skip
    verbose: bool = option("-v", "--verbose", default=False, commands="run serve eval", llama=True, group="Machine", help="Show llama.cpp's log.")

    precision: Precision = LOSSLESS
    direct_io: bool = True
    gate_input: bool = False
    replay: Path | None = None
    llama_cpp: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, model_path: Path | Config, **options: Any) -> Config:
        """Reads options as people write them: names, sizes, percentages, paths. What is None was not given; what the table does not have is llama_cpp's.

        A `Config` in the place of the path stays as it is.
        """
        if isinstance(model_path, Config):
            return model_path
        if (precision := Precision.pop(options)) is not None:
            if options.get("precision") is not None:
                raise OptionError("give `precision`, or its thresholds one by one, not both")
            options["precision"] = precision
        ours = {f.name for f in fields(cls)} - {"llama_cpp"}
        values = read(cls, {name: value for name, value in options.items() if name in ours})
        others = {name: value for name, value in options.items() if name not in ours}
        return cls(model_path=os.fspath(model_path), llama_cpp=others, **_completed(values))

    def __post_init__(self) -> None:
        from .llamacpp.llama import KEYWORDS

        unknown = sorted(set(self.llama_cpp) - set(KEYWORDS))
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}: neither moeoff.Llama nor llama_cpp.Llama takes it")
        if self.llama_cpp.get("use_mmap") or self.llama_cpp.get("use_mlock"):
            raise OptionError("`use_mmap` and `use_mlock` cannot be used: the experts are read from the file, not mapped")
        if self.n_keep and not self.context_shift:
            raise OptionError("`n_keep` has no effect without `context_shift`")
        if self.draft_max is not None and not (self.spec_type or self.draft):
            raise OptionError("`draft_max` has no effect without `spec_type` or `draft`")
        if self.n_keep < -1:
            raise OptionError(f"`n_keep`: a number of tokens, or -1 for the whole prompt, not {self.n_keep}")
        if self.memory is not None and self.expert_memory is not None:
            raise OptionError("give `memory` or `expert_memory`, not both")
        if self.max_loss is not None and (not self.precision.lossless or self.tier not in (None, "original")):
            raise OptionError("`max_loss` finds the precision by itself, measured against the model's own: give no other")
        if self.type_v not in (None, *_UNQUANTIZED) and not self.flash_attn:
            raise OptionError(f"`type_v` {self.type_v}: quantized values need flash attention, which is off")
        if self.attention == "f32" and not self.flash_attn:
            raise OptionError("`attention` f32: needs flash attention, which is off")
        self.check_precision(self.precision)
        self._check_gpu()

    def _check_gpu(self) -> None:
        gpu = [name for name in _OF_GPUS if getattr(self, name)]
        if gpu and (why := _no_gpu()):
            raise OptionError(f"`{gpu[0]}`: {why}")
        if gpu and not self.n_gpu_layers:
            raise OptionError(f"`{gpu[0]}` has no effect while no layer goes to the GPU", hint={"n_gpu_layers": ...})
        if self.vram is None:
            return
        if not self.n_gpu_layers:
            raise OptionError("`vram` has no effect while no layer goes to the GPU", hint={"n_gpu_layers": ...})
        if self.vram_mode not in _ALL_UPLOADED and (self.deterministic or self.replay is not None):
            raise OptionError(
                "`vram`: what a device holds depends on time, and it rounds differently from the CPU: a run that repeats needs `vram_mode` centric or waves"
            )
        self.check_adapters(bool(self.llama_cpp.get("lora_path")))

    def check_adapters(self, adapters: bool) -> None:
        """Checks that not both a device and the CPU compute with experts, if there are adapters. Raises OptionError."""
        if adapters and self.vram is not None and self.vram_mode not in ("centric", "cpu"):
            raise OptionError(f"`vram_mode` {self.vram_mode}: adapters (LoRA) are computed on one side alone; give `vram_mode` centric or cpu")
        if adapters and self.vram is not None and self.vram_mode == "centric" and self.precision.uses_low:
            raise OptionError("`vram_mode` centric: adapters (LoRA) are not computed with low versions of experts; give `vram_mode` cpu")

    def check_precision(self, precision: Precision) -> None:
        """Checks that the strategy can serve experts in this precision, and repeat a run's decisions. Raises OptionError."""
        if not self.strategy.eager and not (precision.lossless and self.replay is None):
            raise OptionError(f"strategy {self.strategy.name!r} serves every expert in its own precision")
        if precision.mispredicted_low and (self.strategy.predictor is None or self.strategy.ab_tested):
            raise OptionError(f"strategy {self.strategy.name!r} does not always predict: only with those that do, as fate, is anything mispredicted")
        if precision.mispredicted_low and self.deterministic:
            raise OptionError("what is predicted in time depends on time: a deterministic run cannot serve what is not in low precision")

    def check_model(self, model_index: ModelIndex) -> None:
        """Checks that all values have an effect with this model, and that llama.cpp does not crash over them. Raises OptionError."""
        from .llamacpp.llama import KEYWORDS

        others = ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")
        yarn_options = [name for name in others if getattr(self, name) not in (None, KEYWORDS[name])]
        yarn = (self.rope_scaling_type or model_index.hparams.get("rope.scaling.type")) == "yarn"
        if yarn_options and not yarn and (self.yarn_ext_factor is None or self.yarn_ext_factor <= 0):
            raise OptionError(f"`{yarn_options[0]}` has no effect: the model's rope scaling is not YaRN; ask for it with `rope_scaling_type`")
        if self.context_shift and self.type_k not in (None, *_UNQUANTIZED):
            widths = model_index.key_widths
            if len(widths) > 1 or any(width % _HADAMARD for width in widths):
                # it rotates them back first, with a matrix that it has for these sizes alone, and reads a null pointer where it has none
                raise OptionError(
                    f"`context_shift`: quantized keys of {', '.join(map(str, sorted(widths)))} numbers cannot be moved: take f16, bf16 or f32 for `type_k`"
                )

    @property
    def repeatable(self) -> bool:
        """True if nothing that is computed may depend on memory or time: so that the text repeats, or the run can be compared with a recorded one."""
        return self.deterministic or self.trace is not None or self.replay is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of llama_cpp.Llama."""
        n_threads = self.n_threads or n_cores()
        values = {name: getattr(self, name) for name, line in table_of(Config).items() if line.llama}
        options = {**_MODELS_OWN, **self.llama_cpp, **llama_keywords(values), "use_mmap": False, "n_threads": n_threads}
        if "n_batch" not in options and options.get("n_ubatch"):  # llama_cpp's 512 would cap it
            options["n_batch"] = options["n_ubatch"]
        return options | {"n_threads_batch": self.n_threads_batch or n_threads}


_OF_GPUS = ("n_gpu_layers", "tensor_split", "split_mode", "main_gpu")


def _no_gpu() -> str:
    """Why nothing can be computed on a GPU here; empty: it can."""
    from .llamacpp.devices import backends, why_none
    from .llamacpp.llama import supports_gpu

    if supports_gpu():
        return ""
    if backends():
        return why_none()
    return "this build of llama.cpp has no GPU backend; rebuild with CMAKE_ARGS=-DGGML_CUDA=ON (or METAL, VULKAN)"


def without_gpu(values: dict[str, Any]) -> list[str]:
    """Takes out of a command line's options those of GPUs where there is none, as llama.cpp's programs go on without; why, a sentence each.

    Where a size of a GPU's memory is asked for (`vram`), they stay, and are refused.
    """
    names = [name for name in (*_OF_GPUS, "vram") if values.get(name)]
    if not names or "vram" in names and not _device_bound(values["vram"]).auto or not (why := _no_gpu()):
        return []
    for name in names:
        del values[name]
    return [f"{' and '.join(TABLE[name].flag for name in names)} {'has' if len(names) == 1 else 'have'} no effect: {why}"]


def with_gpu(values: dict[str, Any], adapters: bool = False) -> None:
    """Gives a command line what a GPU can do for it, where there is one and nothing else was said: all layers, and experts in what they leave.

    Not a run that must repeat, and no experts there with adapters or `vram_mode` cpu.
    """
    if values.get("n_gpu_layers") == 0 or any(values.get(name) for name in ("deterministic", "trace", "replay")) or _no_gpu():
        return
    values.setdefault("n_gpu_layers", -1)
    if not adapters and values.get("vram_mode") != "cpu":
        values.setdefault("vram", _device_bound("auto"))


# llama_cpp.Llama has numbers for these, and so overrides what a model's file says; llama.cpp's programs do not
_MODELS_OWN = {"yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}
_HADAMARD = 64  # numbers of a head that llama.cpp rotates together before it quantizes them


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Completes values that were read with what follows from them: the strategy's own where nothing else is asked for."""
    chosen = values.get("strategy") or _strategy("auto")
    strategy = chosen if values.get("stride") is None else chosen.with_stride(values["stride"])
    precision = values.get("precision") or chosen.precision  # naming the strategy is asking for it
    vram_mode = values.get("vram_mode") or chosen.vram_mode
    if values.get("rope_scale") is not None:
        if values.get("rope_freq_scale") is not None:
            raise OptionError("give `rope_scale` or `rope_freq_scale`, not both: one is 1 divided by the other")
        values["rope_freq_scale"] = 1 / values["rope_scale"]
    return values | {"strategy": strategy, "precision": precision, "vram_mode": vram_mode, "tier": values.get("tier") or chosen.tier}


def llama_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of llama_cpp.Llama: options of the table in its numbers, what was not given left out, and any others as they are."""
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
    """How an answer is drawn: llama-server's own options, declared for what they may be and for the help of `run`. Its defaults are llama.cpp's, or the model's."""

    n_predict: int = _sampling("-n", "--predict", "--n-predict", metavar="N", parse=_n_predict, default=-1, group="",
                               help="Tokens to generate at most; -1: as many as fit.")  # fmt: skip
    temp: float = _sampling("--temp", "--temperature", metavar="T", parse=number(0), default=0.8, group="", help="Temperature; 0 takes the likeliest token.")
    top_k: int = _sampling("--top-k", metavar="K", parse=integer(-MOST), default=40, help="Draw from the likeliest K tokens; 0: from all.")
    top_p: float = _sampling("--top-p", metavar="P", parse=number(0, 1), default=0.95, help="Draw from the likeliest tokens that make up this probability.")
    min_p: float = _sampling("--min-p", metavar="P", parse=number(0, 1), default=0.05,
                             help="Leave out tokens below this share of the likeliest one's probability.")  # fmt: skip
    repeat_penalty: float = _sampling("--repeat-penalty", metavar="N", parse=number(above=0), default=1.0,
                                      help="Penalty on tokens that occurred lately; 1: none.")  # fmt: skip
    presence_penalty: float = _sampling("--presence-penalty", metavar="N", parse=number(-2, 2), default=0.0, help="Penalty on tokens that occurred; 0: none.")
    frequency_penalty: float = _sampling("--frequency-penalty", metavar="N", parse=number(-2, 2), default=0.0,
                                         help="Penalty on tokens by how often they occurred; 0: none.")  # fmt: skip
    seed: int = _sampling("-s", "--seed", metavar="N", parse=integer(-MOST, 2**32 - 1), default=-1, help="Seed of the sampler; -1 draws one.")
    stop: tuple[str, ...] = _sampling("-r", "--reverse-prompt", "--stop", metavar="TEXT", parse=_stop, multiple=True, default=(),
                                      help="Text that ends the answer and is not part of it. May be given several times.")  # fmt: skip
    ignore_eos: bool = _sampling("--ignore-eos", default=False, help="Generate -n tokens even if the model wants to stop.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """Options of a server beside its model's.

    Attributes:
        args: of llama-server, passed on.
    """

    host: str = _server("--host", metavar="ADDRESS", default="127.0.0.1", group="",
                        help="Address to listen on; 0.0.0.0 for every one (give an --api-key then).")  # fmt: skip
    port: int = _server("--port", metavar="N", parse=integer(0, 65535), default=8080, group="", help="Port to listen on; 0 takes a free one.")
    parallel: int | None = _server("-np", "--parallel", metavar="N|auto", parse=_parallel, group="",
                                   help="Answers at a time; they share the context. Default: 4, or fewer if the budget is small.")  # fmt: skip
    kv_unified: bool = _server("--kv-unified", metavar="on|off", parse=parse_switch, default=True, choices=("on", "off"), server="",
                               help="Answers share the context; off: each has its part.")  # fmt: skip
    api_key: str | None = _server("--api-key", metavar="KEY", parse=_key, envvar="MOEOFF_API_KEY", group="",
                                  help="Refuse requests without this bearer token; several, separated by commas.")  # fmt: skip
    api_key_file: str | None = _server("--api-key-file", metavar="FILE", parse=_key_file, is_file=True, help="File with such tokens, one a line.")
    alias: str | None = _server("-a", "--alias", metavar="NAME", server="--alias", group="", help="What /v1/models calls the model. Default: its file name.")
    cors: tuple[str, ...] = _server("--cors", metavar="ORIGIN", multiple=True, default=(), server="--cors-origins",
                                    help="Allow requests from web pages of this origin, e.g. https://example.org or *; may be repeated.")  # fmt: skip
    allowed_hosts: tuple[str, ...] = _server(
        "--allowed-hosts",
        metavar="NAME",
        multiple=True,
        default=(),
        server="",
        help="Also answer requests whose Host header has this name (*: any name) when there is no API key and only this machine can connect; may be repeated.",
    )
    cache_ram: int | None = _server("-cram", "--cache-ram", metavar="SIZE", parse=_cache_size, server="",
                                    help="Prompt cache: memory for prompts outside the context, part of --memory; -1: all that the experts can do "
                                         "without. Default: at most an eighth of what experts would have, and what they cannot use.")  # fmt: skip
    kv_disk: int | None = _server("--kv-disk", commands="run serve", metavar="SIZE", parse=_disk_size, server="",
                                  help="Disk space in the user's cache folder for prompts that leave memory; they are restored if reading is faster "
                                       "than computing. 0: none. Default: 4G, in run none.")  # fmt: skip
    ctx_checkpoints: int | None = _server("-ctxcp", "--ctx-checkpoints", commands="run serve", metavar="N", parse=integer(0, 1024), server="",
                                          help="Checkpoints of each answer's recurrent state, part of --memory. Default: up to 8, as they fit.")  # fmt: skip
    mmproj: str | None = _server("--mmproj", commands="run serve", metavar="FILE", is_file=True, help="Projector for images and sound.")
    embedding: bool = _server("--embedding", default=False, help="Serve embeddings.")
    pooling: str | None = _server("--pooling", metavar="TYPE", parse=one_of(_POOLINGS), choices=_POOLINGS,
                                  help="How the tokens' embeddings become one: none, mean, cls, last or rank. Default: the model's own, or mean.")  # fmt: skip
    rerank: bool = _server("--rerank", default=False, help="Serve /rerank, with a model that was made for it.")
    args: tuple[str, ...] = ()

    @property
    def has_key(self) -> bool:
        """Return True if requests need a key."""
        # llama-server reads the variable
        return bool(self.api_key or self.api_key_file or os.environ.get("LLAMA_API_KEY"))

    @property
    def open_to(self) -> str | None:
        """The first address from which other machines may send requests without a key, if there is one."""
        hosts = () if self.has_key else (host.strip() for host in self.host.split(","))
        return next((host for host in hosts if not (host.endswith(".sock") or host in ("localhost", "::1", "") or host.startswith("127."))), None)

    @property
    def sites(self) -> tuple[str, ...] | None:
        """Return the names that requests may give as Host or Origin besides the loopback names.

        None allows any name. A web page can point a name of its own at 127.0.0.1 (DNS
        rebinding). An API key stops that page, and a server that other machines reach does
        not know its own names.
        """
        is_open = self.has_key or self.open_to or "*" in self.allowed_hosts
        return None if is_open else self.allowed_hosts


TABLE: dict[str, Option] = {name: line for kind in (Config, Precision, Sampling, ServerOptions) for name, line in table_of(kind).items()}


def spelled(name: str, value: object, flags: Mapping[str, tuple[str, str]] = {}) -> str:  # noqa: B006  # is only read
    """An option and a value as people type them; of True the flag alone, of `...` the form of a value.

    Args:
        flags: of the running command, by name: the flag, and the form of its value.
    """
    line = TABLE.get(name)
    flag, form = flags.get(name) or ((line.flag, line.metavar) if line else ("--" + name.replace("_", "-"), name.upper()))
    if value is True:
        return flag
    if value is ...:
        value = next((part for part in form.split("|") if part.isupper()), form)  # FILE of auto|FILE|none
    return f"{flag} {line.spell(value) if line else value}"


def in_flags(error: MoeoffError, flags: Mapping[str, tuple[str, str]] | None = None) -> str:
    """An error's sentence in the terms of the command line.

    Args:
        flags: as `spelled` takes them: a way out is named that this command has. None: any.
    """
    message = re.sub(r"`(\w+)`", lambda match: spelled(match[1], True, flags or {}), error.message)
    ways_out = [spelled(name, value, flags or {}) for name, value in error.hint.items() if flags is None or name in flags]
    return message + (": give " + ", or ".join(ways_out) if ways_out else "")
