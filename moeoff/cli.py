"""The command line: commands parse, call the library function of the same name, and turn its errors into one sentence."""

from __future__ import annotations

import functools
import os
import sys

import click

from . import __version__
from .errors import MoeoffError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


def _one_sentence(command):
    """Library errors become a message and exit code 1; Ctrl-C becomes 130. `--debug` lets the traceback through."""

    @functools.wraps(command)
    def wrapped(*args, debug: bool = False, **kwargs):
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:  # whoever read us has left; Python must not try once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(0)
        except (MoeoffError, OSError, MemoryError) as error:
            if debug:
                raise
            raise click.ClickException(str(error) or type(error).__name__) from None
        except KeyboardInterrupt:
            if debug:
                raise
            sys.exit(130)

    return click.option("--debug", is_flag=True, help="Show the traceback of an error.")(wrapped)


_OPENING = (
    click.option("--memory", metavar="SIZE", help="Bound of the whole process, as 6G, 700MiB or 80%. Default: 80% of what is available."),
    click.option("--expert-memory", metavar="SIZE", help="Bound of the experts alone, instead of --memory."),
    click.option(
        "--experts", type=click.Path(dir_okay=False), metavar="FILE", help="Companion of moeoff convert. Default: MODEL.experts.gguf, if it is there."
    ),
    click.option("--no-experts", is_flag=True, help="Leave the companion beside the model alone."),
    click.option("--tier", metavar="NAME", help="Precision of the companion to run with, as Q2_K. Default: the model's own."),
    click.option("--verify-reads", is_flag=True, help="Compare experts with their hashes in the companion whenever they are read."),
    click.option(
        "--strategy",
        default="auto",
        show_default=True,
        metavar="NAME",
        help="What stays in memory and what is prefetched: auto, lru, fate, ... See docs/strategies.md.",
    ),
    click.option("--profile", type=click.Path(dir_okay=False), metavar="FILE", help="Of moeoff calibrate. Default: MODEL.profile.npz, if it is there."),
    click.option("--no-profile", is_flag=True, help="Leave the profile beside the model alone."),
    click.option("--max-loss", metavar="PERCENT", help="Give up precision where calibrate --max-loss found it to cost at most this, as 1%. Default: lossless."),
    click.option("--deterministic", is_flag=True, help="Where precision may be given up, decide by the gates alone and not by what is in memory."),
    click.option("--warm/--no-warm", default=True, show_default=True, help="Load in the background what was in memory when the model was last closed."),
    click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use."),
    click.option("-c", "--ctx-size", type=click.IntRange(8, 2**31 - 1), help="Context in tokens. Default: 4096, or less if the model was trained with less."),
    click.option("-fa/-no-fa", "--flash-attn/--no-flash-attn", default=True, show_default=True, help="Flash attention: smaller compute buffers."),
    click.option("-ngl", "--n-gpu-layers", type=click.IntRange(min=-1), default=0, show_default=True, help="Layers whose dense part goes to the GPU; -1: all."),
)


def _opening_options(command):
    """The options that say how a model is opened, the same wherever one is."""
    for option in reversed(_OPENING):
        command = option(command)
    return command


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="moeoff")
def main() -> None:
    """Mixture-of-Experts models (GGUF) in less memory than they need."""


@main.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("-hf", "--hf-repo", metavar="ORG/REPO[:QUANT]", help="Model from Hugging Face. Default quant: Q4_K_M, or else the first GGUF.")
@click.option("-p", "--prompt", help="What to answer. Without a prompt, in a terminal: chat.")
@click.option("-f", "--file", type=click.Path(dir_okay=False), metavar="FILE", help="File with the prompt. What is piped in follows -p or -f.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("-n", "--n-predict", type=click.IntRange(min=-1), default=-1, show_default=True, help="Tokens to generate at most; -1: as many as fit.")
@click.option("-s", "--stop", multiple=True, metavar="TEXT", help="Text that ends the answer. May be given several times.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: text, finish_reason, usage, stats.")
@_opening_options
@click.option("--temp", type=click.FloatRange(min=0), default=0.8, show_default=True, help="Temperature; 0 takes the likeliest token.")
@click.option("--top-k", type=int, default=40, show_default=True, help="Draw from the likeliest K tokens; 0: from all.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=0.95, show_default=True, help="Draw from the likeliest tokens that make up this probability.")
@click.option(
    "--min-p", type=click.FloatRange(0, 1), default=0.05, show_default=True, help="Leave out tokens below this share of the likeliest one's probability."
)
@click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="Penalty on tokens that occurred lately; 1: none.")
@click.option("--seed", type=int, default=-1, show_default=True, help="Seed of the sampler; -1 draws one.")
@click.option("--ignore-eos", is_flag=True, help="Generate -n tokens even if the model wants to stop.")
@click.option("--stats-json", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write statistics to FILE.")
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE", help="Record which experts every gate chose, for simulate; goes on in FILE.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@_one_sentence
def run(**options) -> None:
    """Answer a prompt, or chat. Text goes to stdout, a line of statistics to stderr."""
    from .run import run as command

    command(**options)


@main.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for every one (give an --api-key then).")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--api-key", envvar="MOEOFF_API_KEY", show_envvar=True, metavar="KEY", help="Refuse requests without this bearer token.")
@click.option("-a", "--alias", metavar="NAME", help="What /v1/models calls the model. Default: its file name.")
@click.option("--cors", multiple=True, metavar="ORIGIN", help="Let web pages from here ask, as https://example.org or *; may be repeated.")
@_opening_options
@click.option("--logprobs", is_flag=True, help="Let requests ask for logprobs: takes context x vocabulary x 4 bytes.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@_one_sentence
def serve(**options) -> None:
    """Serve a model over HTTP as OpenAI's API does, one answer at a time.

    Completions, chat, streaming; /metrics for Prometheus, /health. Every answer says in `moeoff` what it took.
    """
    from .server.app import serve as command

    command(**options)


@main.command(context_settings=CONTEXT)
@click.argument("file", type=click.Path())
@click.option("-c", "--ctx-size", type=click.IntRange(8, 2**31 - 1), help="Context in tokens. Default: 4096, or less if the model was trained with less.")
@click.option("--probe/--no-probe", default=True, show_default=True, help="Read from the file for 2 seconds to tell its speed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_one_sentence
def inspect(**options) -> None:
    """Tell what a GGUF holds, what it takes, and what more memory buys, from its headers alone."""
    from .inspection import inspect as command

    command(**options)


@main.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="A GGUF, or the folder where models are. Default: the current folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_one_sentence
def doctor(**options) -> None:
    """Check this machine and installation; exit code 1 if something is in the way."""
    from .doctor import doctor as command

    if not command(**options):
        sys.exit(1)


@main.command(context_settings=CONTEXT)
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="Default: MODEL.experts.gguf, where it is found on its own.")
@click.option("--tiers", metavar="NAMES", help="Precisions, as keep,Q2_K. keep: the model's own bytes; twin: a lower one for each type. Default: twin.")
@click.option("--imatrix", type=click.Path(dir_okay=False), metavar="FILE", help="Importance matrix of llama-imatrix for what is quantized.")
@click.option("--bits", type=click.Path(dir_okay=False), metavar="PLAN.json", help="One more tier, 'bits', in which each expert has the type of this plan.")
@click.option("-j", "--threads", type=click.IntRange(min=1), metavar="N", help="Default: every core this process may use.")
@click.option("--dry-run", is_flag=True, help="Tell sizes and time, and write nothing.")
@click.option("--force", is_flag=True, help="Replace an existing companion.")
@click.option("--resume", is_flag=True, help="Take up an interrupted conversion; if interrupted again, leave what there is.")
@_one_sentence
def convert(**options) -> None:
    """Repack a model's experts into a companion file, in one or more precisions. The model stays as it is."""
    from .companion.convert import convert as command
    from .console import progress_bar
    from .memory import format_size

    try:
        with progress_bar("bytes") as progress:
            done = command(**options, progress=progress and functools.partial(progress, "converting"))
    except KeyboardInterrupt:
        click.echo("interrupted: " + ("--resume goes on from here" if options["resume"] else "nothing was written"), err=True)
        raise
    for line in done.fallbacks:
        click.echo(line, err=True)
    tiers = ", ".join(f"{name} {format_size(n)}" for name, n in done.tiers.items())
    if options["dry_run"]:
        click.echo(f"{done.path}: {done.n_experts} experts: {tiers}; {format_size(done.n_bytes)} of disk, about {done.seconds:.0f} s")
    else:
        click.echo(f"{done.path}: {done.n_experts} experts: {tiers}; {format_size(done.n_bytes)} in {done.seconds:.1f} s")


@main.command(context_settings=CONTEXT)
@click.argument("file", type=click.Path())
@click.option("-m", "--model", type=click.Path(), help="The model. Default: the one that the companion names, if it is beside it.")
@_one_sentence
def verify(**options) -> None:
    """Compare a companion with its hashes, and with the model that it was made of."""
    from .companion.verify import verify as command
    from .console import progress_bar
    from .memory import format_size

    with progress_bar("bytes") as progress:
        done = command(**options, progress=progress and functools.partial(progress, "verifying"))
    belongs = f"made of {done.model}" if done.model else "its model is not beside it and was not checked (give -m)"
    click.echo(f"{done.path}: {done.n_slices} slices, {format_size(done.n_bytes)}, intact; tiers {', '.join(done.tiers)}; {belongs}")


@main.command(name="eval", context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), help="GGUF with routed experts; of a split one the first part. Default: the demo model.")
@click.option("--text", multiple=True, required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Text to predict; may be repeated.")
@click.option("--ctx", type=click.IntRange(min=4), default=512, show_default=True, help="Tokens in a window; its second half is scored.")
@click.option("--chunks", type=click.IntRange(min=1), metavar="N", help="Only the first N windows of each text.")
@click.option("--mode", type=click.Choice(["prefill", "decode"]), default="prefill", show_default=True, help="decode: feed the scored half token by token.")
@click.option("--memory", metavar="SIZE", help="Bound of the whole process, as 6G, 700MiB or 80%. Default: 80% of what is available.")
@click.option("--expert-memory", metavar="SIZE", help="Bound of the experts alone, instead of --memory.")
@click.option("--experts", type=click.Path(dir_okay=False), metavar="FILE", help="Companion of moeoff convert. Default: MODEL.experts.gguf, if it is there.")
@click.option("--no-experts", is_flag=True, help="Leave the companion beside the model alone.")
@click.option("--tier", metavar="NAME", help="Precision of the companion to evaluate, as Q2_K. Default: the model's own.")
@click.option("--max-loss", metavar="PERCENT", help="Evaluate the precision that calibrate --max-loss found to lose at most this, as 1%.")
@click.option("--deterministic", is_flag=True, help="With --max-loss: as if no expert were in memory, the most that is ever given up.")
@click.option("--strategy", default="lru", show_default=True, metavar="NAME", help="What stays in memory: lru, score, on-demand, ... See docs/strategies.md.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@click.option("-fa/-no-fa", "--flash-attn/--no-flash-attn", default=True, show_default=True, help="Flash attention: smaller compute buffers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log.")
@_one_sentence
def eval_(**options) -> None:
    """Measure perplexity as llama-perplexity does, and how far a lower precision is from the lossless model.

    What is lossy is compared with the lossless model on the same windows: loss of perplexity, KL divergence, and how often
    both find the same token the likeliest.
    """
    from .evaluation import evaluation as command

    command(**options)


@main.command(context_settings=CONTEXT)
@click.option("-m", "--model", type=click.Path(), required=True, help="GGUF with routed experts; of a split one the first part.")
@click.option(
    "--text", multiple=True, required=True, type=click.Path(dir_okay=False), metavar="FILE", help="Text like what the model will see; may be repeated."
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="PROFILE", help="Default: MODEL.profile.npz, where it is found on its own.")
@click.option("--tokens", type=click.IntRange(512), default=16384, show_default=True, help="Tokens to evaluate, as many from each text.")
@click.option("--memory", metavar="SIZE", help="Bound of the process while the model runs. Default: 80% of what is available.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is trained.")
@click.option("--max-loss", metavar="PERCENT", help="Instead: measure what low precision costs, for run --max-loss, as 1%. Needs a companion.")
@click.option("--tier", metavar="NAME", help="With --max-loss: the companion's low precision. Default: its first.")
@click.option("--thresholds", is_flag=True, help="With --max-loss: search thresholds on misses even if a tier for all experts keeps the bound. Slow.")
@click.option("--experts", type=click.Path(dir_okay=False), metavar="FILE", help="With --max-loss: the companion. Default: MODEL.experts.gguf.")
@click.option("--bits-plan", is_flag=True, help="Instead: choose a type for each expert and write a plan for convert --bits, by default MODEL.bits.json.")
@click.option("--tolerance", metavar="PERCENT", default="5%", show_default=True, help="With --bits-plan: perplexity that may be lost.")
@click.option("--types", metavar="NAMES", help="With --bits-plan: types to choose from, as Q4_K,Q2_K. Default: a ladder below the model's own.")
@click.option("--measure", is_flag=True, help="With --bits-plan: quantize experts one at a time instead of estimating their importance.")
@_one_sentence
def calibrate(max_loss, tier, thresholds, experts, bits_plan, tolerance, types, measure, seed, **options) -> None:
    """Measure a model on text, once, and keep in a profile beside it what predictors and caches learn from that."""
    from .console import progress_bar
    from .errors import OptionError

    if max_loss and bits_plan:
        raise OptionError("give --max-loss or --bits-plan, not both")
    if bits_plan:
        from .precision_report import write_plan

        with progress_bar() as progress:
            path, _ = write_plan(**options, tolerance=tolerance, types=types, measure=measure, progress=progress)
        click.echo(f"{path}: for moeoff convert {options['model']} --bits {path}")
        return
    if max_loss:
        from .budget.loss_contract import parse_loss
        from .precision_report import calibrate_loss

        with progress_bar() as progress:
            found = calibrate_loss(**options, max_loss=max_loss, tier=tier, thresholds=thresholds, experts=experts, progress=progress)
        found = "" if found.contract.choose(parse_loss(max_loss)) else "; nothing but lossless keeps the bound"
        click.echo(f"{found.path}: for moeoff run -m {options['model']} --max-loss {max_loss}{found}")
        return
    from .calibrate.profile_fit import calibrate as command

    with progress_bar() as progress:
        done = command(**options, seed=seed, progress=progress)
    click.echo(f"{done.path}: {', '.join(done.sections)}; {done.n_tokens:,} tokens in {done.seconds:.0f} s")
    if done.recall is not None:
        click.echo(f"the next layer's experts are predicted to {100 * done.recall:.0f} %; the first {done.shallow} layers are hard to predict", err=True)


@main.command(context_settings=CONTEXT)
@click.argument("traces", type=click.Path(exists=True, dir_okay=False), nargs=-1, required=True, metavar="TRACE...")
@click.option("--strategy", multiple=True, metavar="NAME[,NAME]", help="What to compare with lru and belady; may be repeated.")
@click.option("--memory", multiple=True, metavar="SIZE", help="Memory for experts, as 6G or 25% of them; may be repeated. Default: 10, 25, 50, 75, 90%.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), metavar="FILE.png", help="Draw hit rates by size and layer, and the experts' use.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of strategies that draw.")
@_one_sentence
def simulate(**options) -> None:
    """Replay traces of `run --trace` through strategies: what each would have had in memory, and read."""
    from .report import report as command

    command(**options)
