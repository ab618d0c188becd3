"""How a model is opened: one validated, frozen object, built by `Llama`, the command line, the server and calibration alike."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..binding import KEYWORDS
from ..budget.device_plan import DeviceBound
from ..budget.loss_contract import parse_loss
from ..budget.precision import LOSSLESS, Precision
from ..companion.file import KEEP, Companion
from ..companion.settings import CHANGE_RESULTS, OPTIONS, Tuning
from ..errors import OptionError
from ..machine import n_cores
from ..memory import parse_size
from .device_tier import AUTO, MODES, WAVES
from .llama_options import check_options, read_options
from .strategy import Strategy, get_strategy

__all__ = ["Config"]

# llama_cpp.Llama has numbers for these, and so overrides what a model's file says; llama.cpp's programs do not
_MODELS_OWN = {"yarn_attn_factor": -1.0, "yarn_beta_fast": -1.0, "yarn_beta_slow": -1.0}

VRAM_MODES = (*MODES, "cpu", AUTO)
_ALL_UPLOADED = ("centric", WAVES)  # the device computes with all experts, or with none
Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `moeoff.Llama`; `make` takes them as people write them.

    Attributes:
        model_path: a GGUF with routed experts; of a split model the first part.
        memory: bound of this process's resident memory, in bytes; `make` takes "6G" and "80%", too. None: 80 % of what is available.
        expert_memory: bound of the experts' arena alone, instead of `memory`.
        strategy: what stays in memory and what is prefetched; `make` takes its name (`moeoff.engine.strategy.strategy_names()`,
            docs/guides/strategies.md), too.
        profile: of `moeoff calibrate`; "auto" takes the one beside the model if there is one, False none.
        n_lanes: I/O workers.
        direct_io: False reads through the page cache.
        experts: companion file of `moeoff convert`; "auto" takes the one beside the model if there is one, False none.
        tier: of the companion, as "Q2_K". The default, "keep", is the model's own precision.
        verify_reads: compares everything read of the experts with its hash in the companion; `ReadError` if it differs.
        gate_input: gate events carry the router's input (see `Llama.set_gate_callback`), and batches may give the logits of all their
            tokens (`Llama.decode_batch`): llama.cpp's last layers leave out the tokens whose logits are not asked for.
        trace: file that gets every gate event, for `moeoff simulate`; a trace of the same model is continued.
        warm: loads in the background: all experts if all fit, else those that were resident, in which version, when the model was last closed,
            which closing remembers.
        precision: which experts may be served in lower precision, not at all, or by others; the default is lossless.
        max_loss: instead of `precision`: the bound of lost perplexity, 0.01 or for `make` "1%"; takes what `moeoff calibrate --max-loss` measured
            on this very model.
        deterministic: lossy decisions look at the gates alone, or at a cache that these drive (`Precision.resident`), and not at what is resident,
            so that the text does not depend on timing, memory or what was asked before. An expert that is resident may then be served
            in low precision, or give its place to one that is not.
        replay: trace of an earlier run with the same prompts: its decisions are taken again instead of new ones, so that the
            results are the same bit for bit whatever is resident.
        context_shift: an answer does not end where the context is full: the older half of it is forgotten, but for `n_keep` tokens.
        n_keep: tokens of the prompt, beside the one that begins a text, that a context shift keeps; -1: all of them.
        override_tensor: where other tensors than routed experts go, as llama.cpp's --override-tensor has it: "PATTERN=BUFFER,...".
        priority: of the process, -1 (low) to 3 (realtime); it stays when the model is closed.
        vram: bound of what is allocated on each device, experts and llama.cpp's own together, in bytes; `make` takes "2G" and "80%" (of what
            is free there), too. None: no experts on devices. Needs `n_gpu_layers`.
        vram_mode: how a device computes with experts (docs/guides/gpu.md): "cooperative", "centric", "waves", "cpu": not at all, or "auto": whichever is the
            fastest, found while it computes. `make` takes the strategy's: "auto", or for the papers' presets "centric".
        settings: of `moeoff tune`; "auto" takes those beside the model if there are any, False none. They fill in what is in `open_options`.
        open_options: options that the user has said nothing about, of those that settings may choose; `make` knows them.
        llama_cpp: options of `llama_cpp.Llama`; `n_threads` is every core this process may use by default, and
            `use_mmap` and `use_mlock` are not available, because the experts are not mapped. `make` takes names for `type_k`
            and `type_v` ("q8_0"), `rope_scaling_type`, `split_mode` and `numa`, and shares as "3,1" for `tensor_split`.

    Raises:
        OptionError: an unknown option or strategy, or a value that makes no sense.
    """

    model_path: str
    memory: int | None = None
    expert_memory: int | None = None
    strategy: Strategy = field(default_factory=lambda: get_strategy("auto"))
    profile: Path | bool = "auto"
    n_lanes: int = 4
    direct_io: bool = True
    experts: Companion | Path | bool = "auto"
    tier: str | None = None
    verify_reads: bool = False
    gate_input: bool = False
    trace: Path | None = None
    warm: bool = False
    precision: Precision = LOSSLESS
    max_loss: float | None = None
    deterministic: bool = False
    replay: Path | None = None
    context_shift: bool = False
    n_keep: int = 0
    override_tensor: str | None = None
    priority: int = 0
    settings: Path | bool = "auto"
    vram: DeviceBound | None = None
    vram_mode: str = AUTO
    open_options: frozenset[str] = frozenset()
    llama_cpp: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, model_path: Path, *, memory: str | int | None = None, expert_memory: str | int | None = None,
             strategy: str | Strategy | None = None, stride: int | None = None, max_loss: str | float | None = None, vram: str | int | None = None,
             **options: Any) -> Config:  # fmt: skip
        """Of the keyword arguments of `moeoff.Llama`: sizes, strategies and losses may be text; what is not ours is llama_cpp's.

        Args:
            stride: how many layers ahead the strategy's predictor looks, where it can choose (ProMoE §4.4); None: as the strategy has it.
        """
        ours = {f.name for f in fields(cls)} - {"llama_cpp", "open_options"}
        given = {name for name, value in options.items() if value is not None}
        given |= {name for name, value in (("strategy", strategy), ("max_loss", max_loss)) if value is not None}
        if stride is not None:  # of the strategy that was named, or of the default
            given.add("strategy")
        if options.get("profile") in (True, "auto"):  # what is there, if there is one
            given.discard("profile")
        if "n_batch" in given:
            given.add("n_ubatch")
        chosen = get_strategy("auto" if strategy is None else strategy)
        if options.get("precision") is None and chosen.precision is not LOSSLESS:  # naming the strategy is asking for it
            options["precision"] = chosen.precision
            given.add("precision")
        if given & {"precision", "tier"}:  # lossy or not, that has been said
            given.add("max_loss")
        if options.get("vram_mode") is None:  # a device cannot compute with the experts of a lossy run
            is_lossy = max_loss is not None or not (options.get("precision") or LOSSLESS).lossless
            options["vram_mode"] = AUTO if is_lossy else chosen.vram_mode
        return cls(
            model_path=os.fspath(model_path),
            memory=None if memory is None else parse_size(memory),
            expert_memory=None if expert_memory is None else parse_size(expert_memory),
            strategy=chosen if stride is None else chosen.ahead(stride),
            open_options=frozenset(OPTIONS) - given,
            max_loss=None if max_loss is None else parse_loss(max_loss),
            vram=None if vram is None else DeviceBound.parse(vram),
            llama_cpp=read_options({name: value for name, value in options.items() if name not in ours}),
            **{name: value for name, value in options.items() if name in ours},
        )

    def __post_init__(self) -> None:
        unknown = sorted(set(self.llama_cpp) - KEYWORDS)
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}: neither moeoff.Llama nor llama_cpp.Llama takes it")
        if self.llama_cpp.get("use_mmap") or self.llama_cpp.get("use_mlock"):
            raise OptionError("use_mmap and use_mlock cannot be used: the experts are read from the file, not mapped")
        check_options(self.llama_cpp)
        if self.n_keep and not self.context_shift:
            raise OptionError("n_keep has no effect without context_shift")
        if self.n_keep < -1:
            raise OptionError(f"n_keep: a number of tokens, or -1 for the whole prompt, not {self.n_keep}")
        if self.memory is not None and self.expert_memory is not None:
            raise OptionError("give memory or expert_memory, not both")
        if self.max_loss is not None and (self.precision is not LOSSLESS or self.tier not in (None, KEEP)):
            raise OptionError("max_loss finds the precision by itself, measured against the model's own: give no other")
        self.check_precision(self.precision)
        self._check_vram()

    def _check_vram(self) -> None:
        if self.vram_mode not in VRAM_MODES:
            raise OptionError(f"vram_mode: one of {', '.join(VRAM_MODES)}, not {self.vram_mode!r}")
        if self.vram is None:
            return
        if not self.llama_cpp.get("n_gpu_layers"):
            raise OptionError("vram has no effect while no layer goes to the GPU: give n_gpu_layers")
        if self.vram_mode not in _ALL_UPLOADED and (self.deterministic or self.replay is not None):
            raise OptionError(
                "vram: what a device holds depends on time, and it rounds differently from the CPU: a run that repeats needs vram_mode centric or waves"
            )
        if self.vram_mode in _ALL_UPLOADED and (self.max_loss is not None or not self.precision.lossless):
            raise OptionError(f"vram_mode {self.vram_mode}: a device computes with experts in their own precision alone")
        self.check_adapters(bool(self.llama_cpp.get("lora_path")))

    def check_adapters(self, given: bool) -> None:
        """Raises OptionError if there are adapters and both a device and the CPU compute with experts."""
        if given and self.vram is not None and self.vram_mode not in ("centric", "cpu"):
            raise OptionError(f"vram_mode {self.vram_mode}: adapters (LoRA) are computed on one side alone; give vram_mode centric or cpu")

    @property
    def devices(self) -> str:
        """What lies on GPUs, as options; empty: nothing."""
        if not (n_layers := self.llama_cpp.get("n_gpu_layers")):
            return ""
        return f"-ngl {n_layers}" + (f" --vram {self.vram}" if self.vram else "")

    def tuned(self, tuning: Tuning) -> Config:
        """With the tuning's choice for every option that the user has said nothing about."""
        taken = set(self.open_options)
        if self.repeatable:  # tunings differ by budget and machine
            taken -= set(CHANGE_RESULTS)
        if self.vram is not None and self.vram_mode in _ALL_UPLOADED:
            taken -= {"max_loss"}
        if not self.llama_cpp.get("flash_attn"):  # quantized values need it
            taken -= {"type_k", "type_v"}
        chosen = {name: choice.value for name, choice in tuning.choices.items() if name in taken}
        ours: dict[str, Any] = {name: chosen.pop(name) for name in ("profile", "n_lanes", "max_loss") if name in chosen}
        if "strategy" in chosen:
            ours["strategy"] = get_strategy(chosen.pop("strategy"))
        return replace(self, **ours, llama_cpp={**self.llama_cpp, **read_options(chosen)}, open_options=frozenset())

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError if the strategy cannot serve experts in this precision, or cannot repeat a run's decisions."""
        if not self.strategy.eager and not (precision.lossless and self.replay is None):
            raise OptionError(f"strategy {self.strategy.name!r} serves every expert in its own precision")
        if precision.mispredicted_low and (self.strategy.predictor is None or self.strategy.ab_tested):
            raise OptionError(f"strategy {self.strategy.name!r} does not always predict: only with those that do, as fate, is anything mispredicted")
        if precision.mispredicted_low and self.deterministic:
            raise OptionError("what is predicted in time depends on time: a deterministic run cannot serve what is not in low precision")

    @property
    def repeatable(self) -> bool:
        """Whether nothing that is computed may depend on memory or time: so that the text repeats, or the run can be compared with a recorded one."""
        return self.deterministic or self.trace is not None or self.replay is not None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of llama_cpp.Llama."""
        n_threads = self.llama_cpp.get("n_threads") or n_cores()
        options = {"verbose": False, **_MODELS_OWN, **self.llama_cpp, "use_mmap": False, "n_threads": n_threads}
        if "n_batch" not in options and options.get("n_ubatch"):  # llama_cpp's 512 would cap it
            options["n_batch"] = options["n_ubatch"]
        return options | {"n_threads_batch": self.llama_cpp.get("n_threads_batch") or n_threads}

    @property
    def n_ctx(self) -> int:
        """Tokens, as llama_cpp takes it: 0 for what the model was trained with."""
        n_ctx: int = self.llama_cpp.get("n_ctx", 512)
        return n_ctx
