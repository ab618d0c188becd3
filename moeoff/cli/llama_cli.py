"""Habits of llama.cpp's programs: their options that `moeoff run` has no use for are taken where nothing is lost, and refused with the reason else."""

from __future__ import annotations

from typing import Any

import click

from ..errors import OptionError
from .options import Decorator, own

_SAMPLING = "answers are drawn with --temp, --top-k, --top-p, --min-p and the penalties of --help"
_SERVER = "moeoff serve takes it, in a request"
_OFFERED = "moeoff has no such option; -f FILE and --system are there"
_BUFFER = "experts are in moeoff's buffer, whose memory --memory bounds; --vram gives them a GPU's"

# of what is so here anyway: flags, and the values that mean it; none: it takes no value
TAKEN: dict[tuple[str, ...], tuple[str, ...]] = dict.fromkeys((
    ("-cnv", "--conversation"), ("--no-mmap",), ("-cmoe", "--cpu-moe"), ("--simple-io",), ("--no-display-prompt",), ("--jinja",),
    ("--no-warmup",), ("--no-context-shift",), ("--perf",), ("--no-perf",), ("--log-disable",), ("-mli", "--multiline-input"), ("--no-escape",),
    ("-cb", "--cont-batching"), ("-kvo", "--kv-offload"), ("-nr", "--no-repack"),
), ()) | {("-co", "--color"): ("on", "off", "auto"), ("-fit", "--fit"): ("on", "off")}  # fmt: skip
REFUSED: dict[tuple[str, ...], str] = {
    ("--mmap",): "experts are read from the file, not mapped: that is how they stay within --memory",
    ("--mlock",): "experts come and go, so that they stay within --memory; what is resident is never swapped for them",
    ("-lm", "--load-mode"): "experts are read as they are used, with --memory as their bound",
    ("-ncmoe", "--n-cpu-moe"): _BUFFER,
    ("-nkvo", "--no-kv-offload"): "the KV cache lies where the layer is computed: give a smaller -ngl",
    ("--repack",): "repacked kernels round differently from those that experts are computed with",
    ("--warmup",): "experts are read as they are used; --warm on reads those of the last session ahead",
    ("-fitt", "--fit-target", "-fitc", "--fit-ctx"): "--memory is what everything is fitted to",
    ("-i", "--interactive"): "without -p, in a terminal, moeoff run chats",
    ("-if", "--interactive-first"): "without -p, in a terminal, moeoff run chats",
    ("-e", "--escape"): "the prompt is taken as it is: let the shell make line ends, as $'one\\ntwo'",
    ("-sp", "--special"): "an answer is written without the model's special tokens",
    ("--in-prefix", "--in-suffix"): "the model's chat template stands around what is asked; --raw leaves it out",
    ("-sysf", "--system-prompt-file"): 'give --system "$(cat FILE)"',
    ("--mirostat", "--typical", "--typical-p", "--repeat-last-n", "--dry-multiplier", "--xtc-probability", "--xtc-threshold", "--dynatemp-range", "--samplers",
     "--sampler-seq", "--logit-bias", "-l"): _SAMPLING,
    ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"): _SERVER,
    ("--lora", "--lora-scaled", "--control-vector"): "adapters go with moeoff serve -- --lora FILE, or lora_path= in Python",
    ("-dev", "--device"): "give -ngl and -mg, which choose GPUs",
    ("--list-devices",): "moeoff doctor lists them",
    ("-mu", "--model-url", "-hff", "--hf-file"): "give -hf ORG/REPO:QUANT, or -m FILE",
    ("-hft", "--hf-token"): "log in once: hf auth login, or set HF_TOKEN",
    ("--offline",): "nothing is downloaded but with -hf, and then HF_HUB_OFFLINE=1 keeps to what is there",
    ("--override-kv",): "the file's own header counts",
    ("-lv", "--verbosity", "--log-verbosity", "--log-file"): "-v shows llama.cpp's log, on standard error",
    ("-C", "--cpu-mask", "--poll"): "-t says how many threads compute; they are bound to cores while they do",
    ("-mm", "--mmproj", "--image"): "moeoff serve takes images: --mmproj FILE",
    ("--reasoning-format", "-rea", "--reasoning", "--reasoning-effort", "--reasoning-budget", "--reasoning-budget-message", "--chat-template-kwargs"): _SERVER,
    ("--reasoning-preserve", "--no-reasoning-preserve"): _SERVER,
    ("--no-jinja",): "templates are Jinja; --raw leaves them out",
    ("-bf", "--binary-file"): _OFFERED,
}  # fmt: skip
# of what is refused, what takes no value; a test compares all of it with llama.cpp's own table
FLAGS = {"--mmap", "--mlock", "-nkvo", "--repack", "--warmup", "-i", "-if", "-e", "-sp", "--list-devices", "--offline", "--reasoning-preserve", "--no-jinja"}


def takes_llama_cli(function: Any) -> Any:
    """Gives a command these options, which `--help` does not list."""
    for flags, values in TAKEN.items():
        kind: dict[str, Any] = {"type": click.Choice(values, case_sensitive=False)} if values else {"is_flag": True}
        function = own(*flags, _name(flags), hidden=True, expose_value=False, **kind)(function)
    for flags, why in REFUSED.items():
        function = _refused(flags, why)(function)
    return function


def _name(flags: tuple[str, ...]) -> str:
    return "llama_cli_" + flags[0].strip("-").replace("-", "_")


def _refused(flags: tuple[str, ...], why: str) -> Decorator:
    def callback(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            flag = next((word.partition("=")[0] for word in context.meta.get("moeoff.typed", ()) if word.partition("=")[0] in flags), flags[0])
            raise click.UsageError(str(OptionError(f"{flag}: {why}")))

    return own(*flags, _name(flags), is_flag=flags[0] in FLAGS, hidden=True, expose_value=False, callback=callback)
