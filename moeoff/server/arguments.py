"""llama-server's command line, made by walking the table of options; what a user may not pass on, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import OptionError
from ..memory import MIB
from ..options import NO_RPC, Config, ServerOptions, table_of
from .kept_prompts import KeptPrompts

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
         "--flash-attn -ngl --gpu-layers --n-gpu-layers -np --parallel -cram --cache-ram -ctxcp --ctx-checkpoints --swa-checkpoints --host --port --api-key --api-key-file -a --alias "
         "--cors-origins -mm --mmproj -md --model-draft --spec-draft-model --spec-type --spec-default --embedding --embeddings -v --verbose --metrics", _OURS),
        ("-fit --fit -fitt --fit-target -fitc --fit-ctx -lm --load-mode -lzm --lazy-mode --mlock --mmap --no-mmap -dio --direct-io --no-host "
         "--mtmd-batch-max-tokens --swa-full -kvu --kv-unified -no-kvu --no-kv-unified --warmup --threads-http", _BUDGET),
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
_SIMILARITY = 0.5  # of a prompt, what a slot must hold to be taken for it: a shared system prompt alone would cost someone their conversation
_HTTP_THREADS = 32  # beside two for each answer: one that waits for its turn holds a thread, and /health and /metrics must not wait


def check_passed_on(args: Sequence[str]) -> None:
    """Before anything reads them: one may end the process. Raises OptionError for arguments that may not be passed on."""
    for argument in args:
        if (name := argument.partition("=")[0]) in REFUSED:
            raise OptionError(f"{name} cannot be passed to llama-server: {REFUSED[name]}")


def arguments(config: Config, n_ctx: int, keywords: Mapping[str, Any], options: ServerOptions, kept: KeptPrompts) -> list[str]:
    """argv.

    Args:
        n_ctx: tokens of the context that all slots share.
        keywords: of llama_cpp.Llama, as `Config.keywords` gives them.
        kept: what is remembered of prompts.

    Raises:
        OptionError: a keyword that llama-server has under another name, or adapters that cannot be passed on.
    """
    config.check_adapters(any(argument.startswith("--lora") for argument in options.args))
    if unknown := {name for name, value in config.llama_cpp.items() if value is not None} - {"use_mmap", "use_mlock"}:
        raise OptionError(f"{min(unknown)}: give llama-server's own option for it in args")
    out = ["llama-server", "-m", config.model_path, "-c", str(n_ctx), "--kv-unified"]
    out += ["--cache-ram", str(kept.cache_ram // MIB), "--ctx-checkpoints", str(kept.n_checkpoints), "--slot-prompt-similarity", str(_SIMILARITY)]
    if options.cache_ram is None:  # what is in a slot stays there until the slot is needed: a cache of this size may be too small for it
        out.append("--no-cache-idle-slots")
    out += ["--threads-http", str(_HTTP_THREADS + 2 * options.parallel), "--metrics", "--no-slots", "-lv", "4" if config.verbose else "1"]
    for name, line in table_of(Config).items():
        value = getattr(config, name) if line.number else keywords.get(name, getattr(config, name))  # its number is llama_cpp's
        out += line.server_arguments(value) if value != line.default else []
    if config.swa_full is not False:  # llama_cpp's default: what a sliding window forgets could not be gone on from
        out.append("--swa-full")
    for name, line in table_of(ServerOptions).items():
        out += line.server_arguments(getattr(options, name))
    out += ["--cors-origins", ",".join(options.cors)]  # llama-server's default is every page of the web
    if options.mmproj:
        out += ["--mtmd-batch-max-tokens", "1"]  # one picture is computed at a time, and planned for
    return [*out, *options.args]
