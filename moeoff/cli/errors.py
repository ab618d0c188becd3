"""Errors of the library as the command line says them: with its flags for the way out."""

from __future__ import annotations

from ..errors import MoeoffError, Remedy
from ..memory import MIB

REMEDIES = {
    Remedy.MORE_MEMORY: "give --memory {needed} or more",
    Remedy.MORE_MEMORY_OR_SMALLER_CONTEXT: "give --memory {needed} or more, or a context of {n_ctx} tokens (-c {n_ctx})",
    Remedy.MORE_VRAM: "give --vram {needed} or more",
    Remedy.LESS_VRAM: "give --vram {needed} or less",
    Remedy.MAKE_COMPANION: "make one with moeoff convert, or name it with --experts",
    Remedy.CONVERT_AGAIN: "convert the model again, or go without the companion (--no-experts)",
    Remedy.CHOOSE_TIER: "choose it with --tier {tier}",
    Remedy.CALIBRATE: "moeoff calibrate -m {model} --text FILE",
    Remedy.MEASURE_LOSS: "moeoff calibrate -m {model} --text FILE --max-loss {max_loss}",
    Remedy.GIVE_TEXT: "give at least one --text FILE",
    Remedy.MORE_TEXT: "give more text or --tokens",
    Remedy.SHORTER_WINDOWS: "give a longer text or a smaller --ctx",
    Remedy.FEWER_CHUNKS: "evaluate fewer --chunks, or set TMPDIR",
    Remedy.GIVE_TIERS: "give --tiers or --bits",
    Remedy.GIVE_IMATRIX: "give --imatrix, or another type",
    Remedy.MERGE: "moeoff merge {model}",
    Remedy.OVERWRITE: "give --force to replace it, or another name with -o",
    Remedy.OTHER_OUTPUT: "give another name with -o",
    Remedy.SHORTEN_PROMPT: "shorten it, or give a larger -c",
    Remedy.CONTINUE_TEXT: "give a text to continue with --raw -p",
    Remedy.OTHER_ADDRESS: "choose another --host or --port",
}


def sentence(error: BaseException) -> str:
    """One line for people."""
    if not isinstance(error, MoeoffError) or error.remedy is None:
        return str(error) or type(error).__name__
    facts = dict(error.facts)
    if isinstance(needed := facts.get("needed"), int):
        facts["needed"] = f"{-(-needed // MIB)}M"
    if isinstance(max_loss := facts.get("max_loss"), float):
        facts["max_loss"] = f"{100 * max_loss:g}%"
    return f"{error.message}: {REMEDIES[error.remedy].format(**facts)}"
