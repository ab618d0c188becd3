"""Habits of llama.cpp's programs: options of theirs that moeoff has no use for, and what becomes of each. Light: `moeoff run` asks it before all else."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import OptionError

ANYWAY, IDLE, REFUSED = range(3)  # it is so anyway; it has no effect, which is said; it cannot be, which ends the program


class Habit(NamedTuple):
    """What becomes of an option, why, and whether it takes a value."""

    verdict: int
    why: str = ""
    takes_value: bool = False


_BUFFER = "experts are in the expert buffer, whose memory --memory bounds; --vram gives them a GPU's"
_READ = "experts are read as they are used, with --memory as their bound"
_FITTED = "--memory is what everything is fitted to, and planned before anything is loaded"
_FILE = "models are files that are there: nothing is downloaded but with -hf ORG/REPO:QUANT"
_SAMPLING = "answers are drawn with --temp, --top-k, --top-p, --min-p and the penalties of --help"
_SERVER = "moeoff serve takes it, in a request"
_CHATS = "without -p, in a terminal, moeoff run chats"
_ENDS = "it ends the process that serves"

# programs, verdict, names (of a server's one is enough: the library knows the others), the form of the value, why
_TABLE: tuple[tuple[str, int, str, str, str], ...] = (
    ("run serve", ANYWAY, "-cmoe --cpu-moe --no-mmap --no-warmup -cb --cont-batching -nr --no-repack", "", ""),
    ("run serve", ANYWAY, "-fit --fit", "on|off", ""),
    ("run", ANYWAY, "-cnv --conversation --simple-io --no-display-prompt --jinja --no-context-shift --perf --no-perf --log-disable -mli --multiline-input "
     "--no-escape -kvo --kv-offload", "", ""),
    ("run", ANYWAY, "-co --color", "on|off|auto", ""),
    ("serve", ANYWAY, "--metrics --spec-draft-cpu-moe", "", ""),
    ("run serve", IDLE, "--mmap --mlock --warmup", "", "experts are read as they are used, and come and go, so that they stay within --memory"),
    ("run serve", IDLE, "-lm --load-mode", "MODE", _READ),
    ("run serve", IDLE, "--prio", "N", "nice -n N in front of the command sets the priority of any program"),
    ("run serve", IDLE, "--offline", "", "nothing is downloaded but with -hf, and then HF_HUB_OFFLINE=1 keeps to what is there"),
    ("run serve", IDLE, "--repack", "", "repacked kernels round differently from those that experts are computed with"),
    ("run serve", IDLE, "-ncmoe --n-cpu-moe", "N", _BUFFER),
    ("run serve", IDLE, "-fitt --fit-target -fitc --fit-ctx", "N", _FITTED),
    ("run", IDLE, "-cram --cache-ram", "N", "run has one conversation, which stays in the context"),
    ("serve", IDLE, "-dio --direct-io -ndio --no-direct-io --no-host", "", _READ),
    ("serve", IDLE, "--lazy-mode", "MODE", "tables of which tokens read single rows stay on disk anyway"),
    ("serve", IDLE, "--n-cpu-ffn --spec-draft-n-cpu-moe", "N", _BUFFER),
    ("serve", IDLE, "--threads-http", "N", "there are as many as the answers at a time need"),
    ("run serve", REFUSED, "-dev --device", "NAMES", "experts are placed by moeoff: give -ngl and -mg, which choose GPUs"),
    ("run serve", REFUSED, "--list-devices", "", "moeoff doctor lists them"),
    ("run serve", REFUSED, "-mu --model-url -hff --hf-file", "NAME", _FILE),
    ("run serve", REFUSED, "-hft --hf-token", "TOKEN", "log in once: hf auth login, or set HF_TOKEN"),
    ("run", REFUSED, "-nkvo --no-kv-offload", "", "the KV cache lies where the layer is computed: give a smaller -ngl"),
    ("run", REFUSED, "-i --interactive -if --interactive-first", "", _CHATS),
    ("run", REFUSED, "-e --escape", "", "the prompt is taken as it is: let the shell make line ends, as $'one\\ntwo'"),
    ("run", REFUSED, "-sp --special", "", "an answer is written without the model's special tokens"),
    ("run", REFUSED, "--in-prefix --in-suffix", "TEXT", "the model's chat template stands around what is asked; --raw leaves it out"),
    ("run", REFUSED, "-sysf --system-prompt-file", "FILE", 'give --system "$(cat FILE)"'),
    ("run", REFUSED, "--mirostat --typical --typical-p --repeat-last-n --dry-multiplier --xtc-probability --xtc-threshold --dynatemp-range --samplers "
     "--sampler-seq --logit-bias -l", "VALUE", _SAMPLING),
    ("run", REFUSED, "--grammar --grammar-file -j --json-schema -jf --json-schema-file --reasoning-format --reasoning-effort "
     "--reasoning-budget --reasoning-budget-message --chat-template-kwargs", "VALUE", _SERVER),
    ("run", REFUSED, "--reasoning-preserve --no-reasoning-preserve", "", _SERVER),
    ("run", REFUSED, "--lora --lora-scaled --control-vector", "FILE", "adapters go with moeoff serve -- --lora FILE, or lora_path= in Python"),
    ("run", REFUSED, "--override-kv", "KEY=TYPE:VALUE", "the file's own header counts"),
    ("run", REFUSED, "-lv --verbosity --log-verbosity --log-file", "VALUE", "-v shows llama.cpp's log, on standard error"),
    ("run", REFUSED, "-C --cpu-mask --poll", "VALUE", "-t says how many threads compute; they are bound to cores while they do"),
    ("run", REFUSED, "-mm --mmproj --image", "FILE", "moeoff serve takes images: --mmproj FILE"),
    ("run", REFUSED, "--no-jinja", "", "templates are Jinja; --raw leaves them out"),
    ("run", REFUSED, "-bf --binary-file", "FILE", "moeoff has no such option; -f FILE and --system are there"),
    ("serve", REFUSED, "--spec-draft-override-tensor --override-tensor-draft", "PATTERN=BUFFER", "experts are in the expert buffer, and moeoff places the rest: give --override-tensor or -ngl"),
    ("serve", REFUSED, "-m", "FILE", "the model is given to the server itself"),
    ("serve", REFUSED, "--spec-default", "", "name the kind of drafts: --spec-type"),
    ("serve", REFUSED, "--mtmd-batch-max-tokens", "N", _FITTED),
    ("serve", REFUSED, "-hf --spec-draft-hf --mmproj-url --docker-repo", "NAME", _FILE),
    ("serve", REFUSED, "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
     "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default", "", _FILE),
    ("serve", REFUSED, "--help --version --cache-list --completion-bash", "", _ENDS),
    ("serve", REFUSED, "--models-dir --models-preset --models-max", "VALUE", "there is no router: one model for each server"),
    ("serve", REFUSED, "--models-autoload --no-models-autoload", "", "there is no router: one model for each server"),
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


def without_habits(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """What is left of a command line of `moeoff run`, and which options had no effect, a sentence each.

    Args:
        takes_value: whether each of the command's own options does.

    Raises:
        OptionError: one that cannot be.
    """
    habits, words, left, remarks = habits_of("run"), list(args), list[str](), list[str]()
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        habit = habits.get(name)
        if word == "--":
            return [*left, word, *words], remarks
        if habit is None:
            left.append(word)
            with_value = takes_value.get(name, False)
        elif habit.verdict == REFUSED:
            raise OptionError(f"{name}: {habit.why}")
        else:
            with_value = habit.takes_value
            remarks += [f"{name} has no effect: {habit.why}"] if habit.verdict == IDLE else []
        if with_value and not equals and words:
            value = words.pop(0)
            left += [value] if habit is None else []
    return left, remarks
