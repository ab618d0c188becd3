"""Habits of llama.cpp's programs: options of theirs that moeoff has no use for, and what becomes of each."""

from __future__ import annotations

import functools
from typing import NamedTuple

ANYWAY, IDLE, REFUSED = range(3)  # it is so anyway; it has no effect, which is said; it cannot be, which ends the program


class Habit(NamedTuple):
    """What becomes of an option, why, and whether it takes a value."""

    verdict: int
    why: str = ""
    takes_value: bool = False


_BUFFER = "experts are in the expert buffer, whose memory --memory bounds; --vram gives them a GPU's"
_READ = "experts are read as they are used, with --memory as their bound"
_FITTED = "--memory is what everything is fitted to, and planned before anything is loaded"
_MODELS = "--models serves the models that moeoff models lists, one at a time"
_FILE = "models are files that are there: nothing is downloaded but with -hf ORG/REPO:QUANT"
_CHATS = "without -p, in a terminal, moeoff run chats"
_ENDS = "it ends the process that serves"

# programs, verdict, names (of a server's one is enough: the library knows the others), the form of the value, why
_TABLE: tuple[tuple[str, int, str, str, str], ...] = (
    ("run serve", ANYWAY, "-cmoe --cpu-moe --no-mmap --no-warmup -cb --cont-batching -nr --no-repack --spec-draft-cpu-moe", "", ""),
    ("run serve", ANYWAY, "-fit --fit", "on|off", ""),
    ("run", ANYWAY, "-cnv --conversation --simple-io --no-display-prompt --show-timings --no-show-timings --perf --no-perf --log-disable -mli "
     "--multiline-input --no-escape -kvo --kv-offload", "", ""),
    ("run", ANYWAY, "-co --color", "on|off|auto", ""),
    ("serve", ANYWAY, "--metrics", "", ""),
    ("run serve", IDLE, "--mmap --mlock --warmup", "", "experts are read as they are used, and come and go, so that they stay within --memory"),
    ("run serve", IDLE, "-lm --load-mode", "MODE", _READ),
    ("run serve", IDLE, "--prio", "N", "nice -n N in front of the command sets the priority of any program"),
    ("run serve", IDLE, "--offline", "", "nothing is downloaded but with -hf, and then HF_HUB_OFFLINE=1 keeps to what is there"),
    ("run serve", IDLE, "--repack", "", "repacked kernels round differently from those that experts are computed with"),
    ("run serve", IDLE, "-ncmoe --n-cpu-moe --n-cpu-ffn --spec-draft-n-cpu-moe", "N", _BUFFER),
    ("run serve", IDLE, "-fitt --fit-target -fitc --fit-ctx", "N", _FITTED),
    ("run serve", IDLE, "-dio --direct-io -ndio --no-direct-io --no-host", "", _READ),
    ("run serve", IDLE, "--lazy-mode", "MODE", "tables of which tokens read single rows stay on disk anyway"),
    ("run", IDLE, "-cram --cache-ram -np --parallel", "N", "run has one conversation, which stays in the context"),
    ("run", IDLE, "--prompt-cache", "FILE", "--kv-disk SIZE keeps prompts from one run to the next"),
    ("run", IDLE, "--prompt-cache-all --prompt-cache-ro", "", "--kv-disk SIZE keeps prompts from one run to the next"),
    ("serve", IDLE, "--threads-http", "N", "there are as many as the answers at a time need"),
    ("run serve", REFUSED, "-dev --device", "NAMES", "experts are placed by moeoff: give -ngl and -mg, which choose GPUs"),
    ("run serve", REFUSED, "--list-devices", "", "moeoff doctor lists them"),
    ("run serve", REFUSED, "-mu --model-url -hff --hf-file", "NAME", _FILE),
    ("run serve", REFUSED, "-hft --hf-token", "TOKEN", "log in once: hf auth login, or set HF_TOKEN"),
    ("run", REFUSED, "-nkvo --no-kv-offload", "", "the KV cache lies where the layer is computed: give a smaller -ngl"),
    ("run", REFUSED, "-i --interactive -if --interactive-first", "", _CHATS),
    ("run", REFUSED, "-e --escape", "", "the prompt is taken as it is: let the shell make line ends, as $'one\\ntwo'"),
    ("run", REFUSED, "--verbose-prompt --display-prompt", "", "the prompt is known: -v shows llama.cpp's log"),
    ("run", REFUSED, "--in-prefix --in-suffix", "TEXT", "the model's chat template stands around what is asked; --raw leaves it out"),
    ("run", REFUSED, "-o --output --output-file", "FILE", "the answer goes to standard output, and the shell writes that to a file: > FILE"),
    ("run", REFUSED, "--server-base", "URL", "a server has clients of its own: run computes here"),
    ("run", REFUSED, "--video", "FILE", "there is no decoder for videos: --image takes pictures and sounds"),
    ("run", REFUSED, "-bf --binary-file", "FILE", "a prompt is text: -f FILE"),
    ("run serve", REFUSED, "--spec-draft-override-tensor --override-tensor-draft", "PATTERN=BUFFER", "experts are in the expert buffer, and moeoff places the rest: give --override-tensor or -ngl"),
    ("serve", REFUSED, "-m", "FILE", "the model is given to the server itself"),
    ("run serve", REFUSED, "--spec-default", "", "name the kind of drafts: --spec-type"),
    ("run serve", REFUSED, "--mtmd-batch-max-tokens", "N", _FITTED),
    ("run serve", REFUSED, "--spec-draft-hf --mmproj-url --docker-repo", "NAME", _FILE),
    ("serve", REFUSED, "-hf", "NAME", _FILE),
    ("run serve", REFUSED, "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
     "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default", "", _FILE),
    ("run serve", REFUSED, "--help --version --cache-list --completion-bash", "", _ENDS),
    ("serve", REFUSED, "--models-dir --models-preset --models-max", "VALUE", _MODELS),
    ("serve", REFUSED, "--models-autoload --no-models-autoload", "", _MODELS),
    ("serve", REFUSED, "--sleep-idle-seconds", "N", "a model that sleeps would have to be put together again"),
    ("serve", REFUSED, "--ssl-key-file --ssl-cert-file", "FILE", "this build has no TLS: let a proxy on this machine, as Caddy or nginx, speak https for it"),
    ("serve", REFUSED, "--tools --tools-runtime --mcp-servers-config --mcp-servers-json", "VALUE", "it lets answers start programs on this machine"),
    ("serve", REFUSED, "--agent", "", "it lets answers start programs on this machine"),
)  # fmt: skip


@functools.cache
def habits_of(program: str) -> dict[str, Habit]:
    """By name, for `run` or `serve`."""
    rows = (row for row in _TABLE if program in row[0].split())
    return {name: Habit(verdict, why, bool(form)) for _, verdict, names, form, why in rows for name in names.split()}
