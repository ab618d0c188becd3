"""What a tuning will do and how long it takes, from a first look at model, disk and machine. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

TOKENS = 16384  # that are calibrated on, if there is time
LEAST_TOKENS = 2048
_ROUND = 256
_TEXT_SHARE = 0.35  # of the time that may be taken, for writing and reading text
ROUNDS = 2
_MUCH = 0.15  # of a token's time, that it waits
_LONG, _LONG_SECONDS = 2048, 30.0  # tokens of a long prompt, and what it may take


@dataclass(frozen=True)
class Rates:
    """What the first look has measured.

    Attributes:
        open_seconds: of a process, until the model can be asked.
        prompt_tps, gen_tps: with the defaults.
        mb_per_token: read for single tokens.
        stall_share: of their time.
        disk: bytes per second, by number of I/O workers.
        write_tps: of the text that the model writes by itself, several sequences at once; 0: not needed.
        resident_share: of the experts that fit the budget.
    """

    open_seconds: float
    prompt_tps: float
    gen_tps: float
    mb_per_token: float
    stall_share: float
    disk: dict[str, float]
    write_tps: float
    resident_share: float


@dataclass(frozen=True)
class Step:
    """Something that will be done: its name, what it is good for, and how many seconds it takes."""

    name: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Work:
    """Sizes of the steps.

    Attributes:
        n_tokens: of text that is calibrated on, or that loss is measured on.
        writes: the model writes them.
        calibrates: a profile is fitted.
        convert_seconds: of the companion; 0: none is made.
        n_low_tiers: of the companion, whose loss is measured; 0: nothing is.
        n_prompt, n_gen: tokens of a trial.
        rounds: of trials.
        strategies, lanes: candidates beside the defaults.
        long_prompt: tokens of the prompts that micro-batches are compared on; 0: they are not.
        micro_batches: candidates beside the default.
    """

    n_tokens: int
    writes: bool
    calibrates: bool
    convert_seconds: float
    n_low_tiers: int
    n_prompt: int
    n_gen: int
    rounds: int
    strategies: tuple[str, ...]
    lanes: tuple[int, ...]
    long_prompt: int
    micro_batches: tuple[int, ...]


def work(
    rates: Rates, minutes: float, *, strategies: tuple[str, ...], calibrates: bool, writes: bool, convert_seconds: float, n_low_tiers: int, n_gates: int,
    n_experts: int, n_ctx: int,
) -> Work:  # fmt: skip
    """As much as the time allows.

    Args:
        strategies: that can be tried beside the default.
        calibrates: there is no profile yet.
        convert_seconds: of a companion, if one is wanted and there is room; 0 if not.
        n_low_tiers: precisions whose loss will be measured.
    """
    limit = 60 * minutes
    everything = rates.resident_share >= 1
    if everything:  # nothing is read, and nothing to be learned
        calibrates, convert_seconds, n_low_tiers = False, 0.0, 0
    n_prompt = min(_between(10 * rates.prompt_tps, 64, 512), n_ctx // 2)
    n_gen = min(_between(15 * rates.gen_tps, 64, 256), n_ctx // 2)
    per_token = 0.0
    if calibrates or n_low_tiers:
        per_token += 1 / rates.write_tps if writes else 0.0
        per_token += (1 / rates.prompt_tps + fit_seconds(1, n_gates, n_experts)) if calibrates else 0.0
        per_token += (1 + n_low_tiers) / rates.prompt_tps if n_low_tiers else 0.0
    n_tokens = _between(_TEXT_SHARE * limit / per_token, LEAST_TOKENS, TOKENS) // _ROUND * _ROUND if per_token else 0
    strategies = () if everything else strategies
    lanes: tuple[int, ...] = () if everything else (8, 2)
    long_prompt = _LONG if not everything and n_ctx >= _LONG and _LONG / rates.prompt_tps < _LONG_SECONDS else 0
    full = Work(n_tokens, writes, calibrates, convert_seconds, n_low_tiers, n_prompt, n_gen, ROUNDS, strategies, lanes, long_prompt,
                (1024, 2048) if long_prompt else ())  # fmt: skip
    smaller = full
    for change in (
        {"long_prompt": 0, "micro_batches": ()},
        {"lanes": lanes[:1]},
        {"strategies": strategies[:2]},
        {"convert_seconds": 0.0, "n_low_tiers": 0},
        {"rounds": 1},
    ):
        if sum(step.seconds for step in steps(smaller, rates, n_gates, n_experts)) <= limit:
            break
        smaller = replace(smaller, **change)
    return smaller


def steps(work: Work, rates: Rates, n_gates: int, n_experts: int) -> list[Step]:
    """What will be done, in order."""
    out = []
    trial = rates.open_seconds + work.n_prompt / rates.prompt_tps + work.n_gen / rates.gen_tps
    if work.n_tokens and work.writes:
        out.append(Step("text", f"the model writes {work.n_tokens:,} tokens to calibrate on", rates.open_seconds + work.n_tokens / rates.write_tps))
    if work.calibrates:
        seconds = rates.open_seconds + work.n_tokens / rates.prompt_tps + fit_seconds(work.n_tokens, n_gates, n_experts)
        out.append(Step("profile", f"reads {work.n_tokens:,} tokens and fits cache and predictors to the model", seconds))
    if work.convert_seconds:
        out.append(Step("companion", "writes the experts in a lower precision beside the model", work.convert_seconds))
    if work.n_low_tiers:
        seconds = work.n_low_tiers * rates.open_seconds + (1 + work.n_low_tiers) * work.n_tokens / rates.prompt_tps
        out.append(Step("loss", "measures what the lower precision costs", seconds))
    if work.strategies:
        n = 2 + len(work.strategies)  # auto with the profile and without
        out.append(Step("strategy", f"tries {n} in turn, {work.rounds} x", work.rounds * n * trial))
    if work.lanes:
        n = 1 + len(work.lanes)
        out.append(Step("I/O workers", f"tries {n} numbers of them in turn, {work.rounds} x", work.rounds * n * trial))
    if work.long_prompt:
        each = rates.open_seconds + work.long_prompt / rates.prompt_tps
        out.append(Step("micro-batch", f"tries them on prompts of {work.long_prompt} tokens", work.rounds * (1 + len(work.micro_batches)) * each))
    if work.strategies:
        out.append(Step("check", "compares the choice with the defaults", 2 * (work.rounds + 1) * trial))
    return out


def _between(value: float, least: int, most: int) -> int:
    return max(least, min(int(value), most))


def fit_seconds(n_tokens: int, n_gates: int, n_experts: int) -> float:
    """Of what is fitted for the strategies that are tried, on one core of a machine of today."""
    return n_tokens * n_gates * (5e-6 + 1.1e-6 * n_experts)


def worth_a_companion(rates: Rates) -> bool:
    """Whether the disk is what limits: a token waits for bytes a good part of its time."""
    return rates.stall_share > _MUCH
