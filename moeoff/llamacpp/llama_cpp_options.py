"""llama.cpp options that moeoff ignores, warns about, or refuses."""

from __future__ import annotations

import functools
from typing import NamedTuple

# already so, and ignored; without effect, with a note; refused with an error
ANYWAY, IDLE, REFUSED = range(3)


class LlamaOption(NamedTuple):
    """The treatment of a llama.cpp option, and the reason."""

    verdict: int
    why: str = ""
    takes_value: bool = False


_BUFFER = "experts are in the expert buffer, whose memory --memory and --vram limit"
_READ = "experts are read when they are needed, within --memory"
_FITTED = "everything is planned to fit --memory before the model is loaded"
_FILE = "models are local files; -hf ORG/REPO:QUANT downloads one"

# programs and verdict: names (= before a value; one of a server's is enough), reason
_TABLE: dict[tuple[str, int], dict[str, str]] = {
    ("run serve", ANYWAY): {
        "-cmoe --cpu-moe --no-mmap --no-warmup -cb --cont-batching -nr --no-repack "
        "--spec-draft-cpu-moe -fit= --fit=": "",
    },
    ("run", ANYWAY): {
        "-cnv --conversation --simple-io --no-display-prompt --show-timings --no-show-timings "
        "--perf --no-perf --log-disable -mli --multiline-input --no-escape -kvo --kv-offload "
        "-co= --color=": "",
    },
    ("serve", ANYWAY): {
        "--metrics": "",
    },
    ("run serve", IDLE): {
        "--prio=": "nice -n N before the command sets the priority",
        "--offline": "only -hf downloads, and HF_HUB_OFFLINE=1 prevents that",
        "--repack": "repacked kernels round differently from the experts' kernels",
        "-ncmoe= --n-cpu-moe= --n-cpu-ffn= --spec-draft-n-cpu-moe=": _BUFFER,
        "-fitt= --fit-target= -fitc= --fit-ctx=": _FITTED,
        "--mmap --mlock --warmup -lm= --load-mode= -dio --direct-io -ndio --no-direct-io "
        "--no-host": _READ,
        "--lazy-mode=": "tables read by single rows are always on disk",
    },
    ("run", IDLE): {
        "-cram= --cache-ram= -np= --parallel=": "run has one conversation, kept in the context",
        "--prompt-cache= --prompt-cache-all --prompt-cache-ro": (
            "--kv-disk SIZE keeps prompts between runs"
        ),
    },
    ("serve", IDLE): {
        "--threads-http=": "the slots determine the number of threads",
    },
    ("run serve", REFUSED): {
        "-dev= --device=": "moeoff places experts: choose GPUs with -ngl and -mg",
        "--list-devices": "moeoff doctor lists them",
        "-hft= --hf-token=": "log in once: hf auth login, or set HF_TOKEN",
        "--spec-draft-override-tensor= --override-tensor-draft=": (
            "moeoff places a draft model: give --override-tensor or -ngl"
        ),
        "--spec-default": "give --spec-type",
        "--mtmd-batch-max-tokens=": _FITTED,
        "-mu= --model-url= -hff= --hf-file= --spec-draft-hf= --mmproj-url= --docker-repo= "
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
        "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
        "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default": _FILE,
        "--help --version --cache-list --completion-bash": "it would end the server's process",
    },
    ("run", REFUSED): {
        "-nkvo --no-kv-offload": "the KV cache is where its layer is computed: give a smaller -ngl",
        "-i --interactive -if --interactive-first": "moeoff run chats in a terminal without -p",
        "-e --escape": "prompts are not escaped: write line ends in the shell, as $'one\\ntwo'",
        "--verbose-prompt --display-prompt": "-v shows llama.cpp's log",
        "--in-prefix= --in-suffix=": "the chat template formats prompts; --raw skips it",
        "-o= --output= --output-file=": "redirect standard output instead: > FILE",
        "--server-base=": "run computes in its own process",
        "--video=": "videos are not supported: --image takes images and sounds",
        "-bf= --binary-file=": "a prompt is text: give -f FILE",
    },
    ("serve", REFUSED): {
        "-m=": "give the model as an argument of the server",
        "-hf=": _FILE,
        "--models-dir= --models-preset= --models-max= --models-autoload --no-models-autoload": (
            "--models serves the models that moeoff models lists, one at a time"
        ),
        "--sleep-idle-seconds=": "unloading an idle model is not supported",
        "--ssl-key-file= --ssl-cert-file=": "this build has no TLS: use a proxy, as Caddy or nginx",
        "--tools= --tools-runtime= --mcp-servers-config= --mcp-servers-json= --agent": (
            "answers could start programs on this machine"
        ),
    },
}


@functools.cache
def options_of(program: str) -> dict[str, LlamaOption]:
    """Return the llama.cpp options of `run` or `serve` by option name."""
    return {
        name.rstrip("="): LlamaOption(verdict, why, name.endswith("="))
        for (programs, verdict), options in _TABLE.items()
        for names, why in options.items()
        for name in names.split()
        if program in programs.split()
    }
