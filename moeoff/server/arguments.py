"""llama-server's command line, made of a `Config` and the server's own options; what a user may not pass on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.config import Config
from ..engine.llama_options import NO_RPC, NUMA_STRATEGIES, ROPE_SCALINGS, SPLIT_MODES
from ..errors import OptionError
from ..gguf.quantize import type_name
from ..memory import MIB

_PLACE = "experts are served from the expert buffer, and moeoff places the rest: give --override-tensor or -ngl to moeoff serve"
_OURS = "moeoff serve has an option for it, and plans the budget with it"
_BUDGET = "memory is bounded by --memory, and planned before anything is loaded"
_FILE = "models are files that are there: nothing is downloaded"
_ENDS = "it ends the process that serves"
REFUSED: dict[str, str] = {
    name: reason
    for names, reason in (
        ("-ot --override-tensor -otd --override-tensor-draft --spec-draft-override-tensor -cmoe --cpu-moe -cmoed --cpu-moe-draft --spec-draft-cpu-moe "
         "-ncmoe --n-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncffn --n-cpu-ffn -dev --device --repack", _PLACE),
        ("-m --model -c --ctx-size -t --threads -tb --threads-batch -b --batch-size -ub --ubatch-size -ctk --cache-type-k -ctv --cache-type-v -fa "
         "--flash-attn -ngl --gpu-layers --n-gpu-layers -np --parallel -cram --cache-ram --host --port --api-key --api-key-file -a --alias "
         "--cors-origins -mm --mmproj -md --model-draft --spec-draft-model --spec-type --spec-default --embedding --embeddings -v --verbose --metrics", _OURS),
        ("-fit --fit -fitt --fit-target -fitc --fit-ctx -lm --load-mode -lzm --lazy-mode --mlock --mmap --no-mmap -dio --direct-io --no-host "
         "-ctxcp --ctx-checkpoints --mtmd-batch-max-tokens --swa-checkpoints --swa-full -kvu --kv-unified -no-kvu --no-kv-unified --warmup --threads-http", _BUDGET),
        ("-mu --model-url -hf -hfr --hf-repo -hff --hf-file -hft --hf-token -hfd -hfrd --hf-repo-draft --spec-draft-hf -mmu --mmproj-url -dr "
         "--docker-repo --mtp --dflash --eagle3 --embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
         "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
         "--vision-gemma-12b-default", _FILE),
        ("-h --help --usage --version -cl --cache-list --completion-bash --list-devices --license", _ENDS),
        ("--models-dir --models-preset --models-max --models-autoload --no-models-autoload", "there is no router: one model for each server"),
        ("--sleep-idle-seconds", "a model that sleeps would have to be put together again"),
        ("--rpc", NO_RPC),
        ("--tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent", "it lets answers start programs on this machine"),
    )
    for name in names.split()
}  # fmt: skip
_HTTP_THREADS = 32  # beside two for each answer: one that waits for its turn holds a thread, and /health and /metrics must not wait


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

    @property
    def drafts(self) -> bool:
        """Whether there is something to make drafts with."""
        return bool(self.draft or self.spec_type)

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise OptionError(f"parallel: at least 1 answer at a time, not {self.parallel}")
        for argument in self.args:
            name = argument.partition("=")[0]
            if name in REFUSED:
                raise OptionError(f"{name} cannot be passed to llama-server: {REFUSED[name]}")


_FLAGS = {
    "n_threads": "-t", "n_threads_batch": "-tb", "n_batch": "-b", "n_ubatch": "-ub", "n_gpu_layers": "-ngl", "main_gpu": "-mg", "rope_freq_base":
    "--rope-freq-base", "rope_freq_scale": "--rope-freq-scale", "yarn_orig_ctx": "--yarn-orig-ctx", "yarn_ext_factor": "--yarn-ext-factor",
    "yarn_attn_factor": "--yarn-attn-factor", "yarn_beta_fast": "--yarn-beta-fast", "yarn_beta_slow": "--yarn-beta-slow",
}  # fmt: skip
_NAMES = {"rope_scaling_type": ("--rope-scaling", ROPE_SCALINGS), "split_mode": ("-sm", SPLIT_MODES), "numa": ("--numa", NUMA_STRATEGIES)}
_ELSEWHERE = {"n_ctx", "verbose", "use_mmap", "use_mlock", "flash_attn", "type_k", "type_v", "swa_full", "tensor_split"}


def arguments(config: Config, n_ctx: int, keywords: Mapping[str, Any], options: ServerOptions) -> list[str]:
    """argv.

    Args:
        n_ctx: tokens of the context that all slots share.
        keywords: of llama_cpp.Llama, as `Config.keywords` gives them.

    Raises:
        OptionError: a keyword that llama-server has under another name, or adapters that cannot be.
    """
    config.check_adapters(any(argument.startswith("--lora") for argument in options.args))
    out = ["llama-server", "-m", config.model_path, "--host", options.host, "--port", str(options.port), "-np", str(options.parallel), "-c", str(n_ctx)]
    out += ["--kv-unified", "--cache-ram", str(options.cache_ram // MIB), "--ctx-checkpoints", "0", "--threads-http", str(_HTTP_THREADS + 2 * options.parallel)]
    out += ["--metrics", "--no-slots", "-lv", "4" if options.verbose else "1", "-fa", "on" if keywords.get("flash_attn") else "off"]
    if keywords.get("swa_full", True):  # llama_cpp's default: what a sliding window forgets could not be gone on from
        out.append("--swa-full")
    for name, value in keywords.items():
        if value is None or name in _ELSEWHERE or (name == "n_gpu_layers" and not value):
            continue
        if name in _FLAGS:
            out += [_FLAGS[name], str(value)]
        elif name in _NAMES:
            flag, values = _NAMES[name]
            out += [item for text, number in values.items() if number == value for item in (flag, text)]
        else:
            raise OptionError(f"{name}: give llama-server's own option for it in args")
    for flag, name in (("-ctk", "type_k"), ("-ctv", "type_v")):
        if keywords.get(name) is not None:
            out += [flag, type_name(keywords[name]).lower()]
    if keywords.get("tensor_split"):
        out += ["-ts", ",".join(str(share) for share in keywords["tensor_split"])]
    if config.context_shift:
        out += ["--context-shift", "--keep", str(config.n_keep)]
    for flag, given in (("--alias", options.alias), ("--api-key", options.api_key), ("--mmproj", options.mmproj), ("-md", options.draft),
                        ("--spec-type", options.spec_type)):  # fmt: skip
        if given:
            out += [flag, given]
    out += ["--cors-origins", ",".join(options.cors)]  # llama-server's default is every page of the web
    if options.mmproj:
        out += ["--mtmd-batch-max-tokens", "1"]  # one picture is computed at a time, and planned for
    if options.embedding:
        out.append("--embedding")
    return [*out, *options.args]
