"""llama.cpp options that moeoff ignores, warns about, or refuses."""

from __future__ import annotations

import functools
from typing import NamedTuple

# already so, and ignored; without effect, with a note; refused with an error
ANYWAY, IDLE, REFUSED = range(3)


class Habit(NamedTuple):
    """How moeoff treats an option of llama.cpp's, and the reason."""

    verdict: int
    why: str = ""
    takes_value: bool = False


_BUFFER = "experts are in the expert buffer, whose memory --memory and --vram limit"
_READ = "experts are read when they are needed, within --memory"
_FITTED = "everything is planned to fit --memory before the model is loaded"
_FILE = "models are local files; -hf ORG/REPO:QUANT downloads one"
_MODELS = "--models serves the models that moeoff models lists, one at a time"
_ENDS = "it would end the server's process"
_PROGRAMS = "answers could start programs on this machine"

# programs, verdict, names (of a server's option one is enough), form of the value, reason
_TABLE: tuple[tuple[str, int, str, str, str], ...] = (
    ("run serve", ANYWAY, "-cmoe --cpu-moe --no-mmap --no-warmup -cb --cont-batching -nr --no-repack "
     "--spec-draft-cpu-moe", "", ""),
    ("run serve", ANYWAY, "-fit --fit", "on|off", ""),
    ("run", ANYWAY, "-cnv --conversation --simple-io --no-display-prompt --show-timings --no-show-timings "
     "--perf --no-perf --log-disable -mli --multiline-input --no-escape -kvo --kv-offload", "", ""),
    ("run", ANYWAY, "-co --color", "on|off|auto", ""),
    ("serve", ANYWAY, "--metrics", "", ""),
    ("run serve", IDLE, "--mmap --mlock --warmup", "", _READ),
    ("run serve", IDLE, "-lm --load-mode", "MODE", _READ),
    ("run serve", IDLE, "--prio", "N", "nice -n N before the command sets the priority"),
    ("run serve", IDLE, "--offline", "", "only -hf downloads, and HF_HUB_OFFLINE=1 prevents that"),
    ("run serve", IDLE, "--repack", "", "repacked kernels round differently from the experts' kernels"),
    ("run serve", IDLE, "-ncmoe --n-cpu-moe --n-cpu-ffn --spec-draft-n-cpu-moe", "N", _BUFFER),
    ("run serve", IDLE, "-fitt --fit-target -fitc --fit-ctx", "N", _FITTED),
    ("run serve", IDLE, "-dio --direct-io -ndio --no-direct-io --no-host", "", _READ),
    ("run serve", IDLE, "--lazy-mode", "MODE", "tables read by single rows are always on disk"),
    ("run", IDLE, "-cram --cache-ram -np --parallel", "N", "run has one conversation, which stays in the context"),
    ("run", IDLE, "--prompt-cache", "FILE", "--kv-disk SIZE keeps prompts between runs"),
    ("run", IDLE, "--prompt-cache-all --prompt-cache-ro", "", "--kv-disk SIZE keeps prompts between runs"),
    ("serve", IDLE, "--threads-http", "N", "the slots determine the number of threads"),
    ("run serve", REFUSED, "-dev --device", "NAMES", "moeoff places experts: choose GPUs with -ngl and -mg"),
    ("run serve", REFUSED, "--list-devices", "", "moeoff doctor lists them"),
    ("run serve", REFUSED, "-mu --model-url -hff --hf-file", "NAME", _FILE),
    ("run serve", REFUSED, "-hft --hf-token", "TOKEN", "log in once: hf auth login, or set HF_TOKEN"),
    ("run", REFUSED, "-nkvo --no-kv-offload", "", "a layer's KV cache is where the layer is computed: give a smaller -ngl"),
    ("run", REFUSED, "-i --interactive -if --interactive-first", "", "moeoff run chats in a terminal without -p"),
    ("run", REFUSED, "-e --escape", "", "prompts are not escaped: write line ends in the shell, as $'one\\ntwo'"),
    ("run", REFUSED, "--verbose-prompt --display-prompt", "", "-v shows llama.cpp's log"),
    ("run", REFUSED, "--in-prefix --in-suffix", "TEXT", "the chat template formats prompts; --raw skips it"),
    ("run", REFUSED, "-o --output --output-file", "FILE", "redirect standard output instead: > FILE"),
    ("run", REFUSED, "--server-base", "URL", "run computes in its own process"),
    ("run", REFUSED, "--video", "FILE", "videos are not supported: --image takes images and sounds"),
    ("run", REFUSED, "-bf --binary-file", "FILE", "a prompt is text: give -f FILE"),
    ("run serve", REFUSED, "--spec-draft-override-tensor --override-tensor-draft", "PATTERN=BUFFER",
     "moeoff places a draft model: give --override-tensor or -ngl"),
    ("serve", REFUSED, "-m", "FILE", "give the model as an argument of the server"),
    ("run serve", REFUSED, "--spec-default", "", "give --spec-type"),
    ("run serve", REFUSED, "--mtmd-batch-max-tokens", "N", _FITTED),
    ("run serve", REFUSED, "--spec-draft-hf --mmproj-url --docker-repo", "NAME", _FILE),
    ("serve", REFUSED, "-hf", "NAME", _FILE),
    ("run serve", REFUSED, "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default "
     "--fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default "
     "--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
     "--vision-gemma-12b-default", "", _FILE),
    ("run serve", REFUSED, "--help --version --cache-list --completion-bash", "", _ENDS),
    ("serve", REFUSED, "--models-dir --models-preset --models-max", "VALUE", _MODELS),
    ("serve", REFUSED, "--models-autoload --no-models-autoload", "", _MODELS),
    ("serve", REFUSED, "--sleep-idle-seconds", "N", "unloading an idle model is not supported"),
    ("serve", REFUSED, "--ssl-key-file --ssl-cert-file", "FILE", "this build has no TLS: use a proxy, as Caddy or nginx"),
    ("serve", REFUSED, "--tools --tools-runtime --mcp-servers-config --mcp-servers-json", "VALUE", _PROGRAMS),
    ("serve", REFUSED, "--agent", "", _PROGRAMS),
)  # fmt: skip


@functools.cache
def habits_of(program: str) -> dict[str, Habit]:
    """Return the habits of `run` or `serve` by option name."""
    rows = (row for row in _TABLE if program in row[0].split())
    return {name: Habit(verdict, why, bool(form)) for _, verdict, names, form, why in rows for name in names.split()}
