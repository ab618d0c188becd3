"""llama-server's command line, made of a `Config` and the server's own options; what a user may not pass on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..gguf.quantize import type_name
from ..memory import MIB

_NO_PLACE = "experts are served from the expert buffer, and moeoff places the rest: give --override-tensor or -ngl to moeoff"
_MODEL = "the model is the one that the server was started with"
_BUDGET = "memory is bounded by --memory, which plans it"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("-ot", "--override-tensor", "-otd", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"), _NO_PLACE),
    **dict.fromkeys(("-fit", "--fit", "--mlock", "--mmap", "--no-mmap", "--load-mode", "-lm", "--direct-io", "-dio", "--no-host"), _BUDGET),
    **dict.fromkeys(("-cram", "--cache-ram", "-ctxcp", "--ctx-checkpoints"), "it is counted in the budget: give --cache-ram to moeoff"),
    **dict.fromkeys(("-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr"), _MODEL),
    **dict.fromkeys(("--models-dir", "--models-preset", "--models-max", "--models-autoload"), "there is no router: one model for each server"),
    **dict.fromkeys(("--sleep-idle-seconds",), "a model that sleeps would have to be put together again"),
    **dict.fromkeys(("--rpc",), "experts are read here, and their addresses mean nothing to another machine"),
    **dict.fromkeys(("--host", "--port", "-np", "--parallel", "--api-key", "-a", "--alias", "-c", "--ctx-size", "-t", "--threads"), "give it to moeoff serve"),
    **dict.fromkeys(("--tools", "--mcp-servers-config", "--mcp-servers-json"), "they start programs on this machine"),
    **dict.fromkeys(("-h", "--help", "--usage", "--version", "--cache-list", "--completion-bash", "--list-devices"), "it ends the program that serves"),
}


@dataclass(frozen=True)
class ServerOptions:
    """Attributes:
    parallel: answers at a time; each may use the context that the others leave.
    cache_ram: bytes of prompts that are kept outside the context.
    cors: origins whose pages may ask.
    args: of llama-server, passed on.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    parallel: int = 4
    cache_ram: int = 0
    alias: str | None = None
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    mmproj: str | None = None
    draft: str | None = None
    spec_type: str | None = None
    embedding: bool = False
    verbose: bool = False
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise OptionError(f"parallel: at least 1 answer at a time, not {self.parallel}")
        for argument in self.args:
            name = argument.partition("=")[0]
            if name in REFUSED:
                raise OptionError(f"{name} cannot be passed to llama-server: {REFUSED[name]}")


def arguments(model: str, n_ctx: int, keywords: Mapping[str, Any], options: ServerOptions) -> list[str]:
    """argv.

    Args:
        n_ctx: tokens of the context that all slots share.
        keywords: of llama_cpp.Llama, as `Config.keywords` gives them.
    """
    out = ["llama-server", "-m", model, "--host", options.host, "--port", str(options.port), "-np", str(options.parallel), "-c", str(n_ctx), "--kv-unified"]
    out += ["-t", str(keywords["n_threads"]), "-tb", str(keywords["n_threads_batch"]), "-fa", "on" if keywords.get("flash_attn") else "off"]
    for flag, name in (("-b", "n_batch"), ("-ub", "n_ubatch"), ("-ngl", "n_gpu_layers"), ("--rope-freq-base", "rope_freq_base"),
                       ("--rope-freq-scale", "rope_freq_scale"), ("--yarn-orig-ctx", "yarn_orig_ctx")):  # fmt: skip
        if keywords.get(name):
            out += [flag, str(keywords[name])]
    for flag, name in (("-ctk", "type_k"), ("-ctv", "type_v")):
        if keywords.get(name) is not None:
            out += [flag, type_name(keywords[name]).lower()]
    out += ["--cache-ram", str(options.cache_ram // MIB), "--ctx-checkpoints", "0", "--metrics", "--no-slots", "--no-warmup"]
    out += ["-lv", "4"] if options.verbose else ["-lv", "1"]
    for flag, value in (("--alias", options.alias), ("--api-key", options.api_key), ("--mmproj", options.mmproj), ("-md", options.draft),
                        ("--spec-type", options.spec_type), ("--cors-origins", ",".join(options.cors))):  # fmt: skip
        if value:
            out += [flag, value]
    if options.embedding:
        out.append("--embedding")
    return [*out, *options.args]
