"""Where the time of single tokens goes: the parts add up to what other counters say,
and reads are told apart by who asked for them.
"""

import pytest

from helpers.files import PROSE, ROOT
from moeoff.measure.job import Job, Sample
from moeoff.measure.run import measure
from speed import prompt_then_tokens
from time_parts import READS, other_parts, read_parts, token_parts

pytestmark = pytest.mark.slow  # tests of research scripts run in nightly

N = 40


def run(model: str, **options) -> tuple[Sample, Sample]:
    """A prompt's sample, and one of single tokens, in an arena of a fifth of the demo
    model's experts.
    """
    options = {
        "expert_memory": "2M",
        "n_ctx": 256,
        "n_threads": 2,
        "n_threads_batch": 2,
        "io_threads": 3,
    } | options
    meter = {
        "registers": (str(ROOT / "scripts/research/time_parts.py"),),
        "meter": "time_parts:TimeMeter",
    }
    result = measure(
        Job(
            model,
            options=options,
            tests=prompt_then_tokens(16, N),
            repetitions=1,
            warm_up=False,
            text=str(PROSE),
            probe_seconds=0,
            **meter,
        )
    )
    assert not result.error
    return result.samples[0], result.samples[1]


def test_parts_add_up(demo):
    prompt, sample = run(demo, strategy="auto")
    parts = sample.parts
    assert not prompt.parts and parts["threads"] == 2 and parts["io_threads"] == 3
    told = token_parts([sample])
    assert sum(told.values()) * N / 1e3 == pytest.approx(
        sample.seconds + parts["python"] + parts["sampling"]
    )
    waiting = (
        sum(ms for name, ms in told.items() if name.startswith("waiting for experts")) * N / 1e3
    )
    assert waiting == pytest.approx(sample.counters["stall_seconds"], rel=0.01) and waiting > 0
    assert 0 < parts["running"] <= sample.seconds and parts["python"] > 0 and parts["sampling"] > 0
    reads = read_parts([sample])
    # one that was given up counts in part
    assert sum(kind.mb for kind in reads.values()) * N == pytest.approx(
        sample.counters["bytes_read"] / 1e6, rel=0.05
    )
    assert (
        0
        < other_parts([sample])["the disk is busy"]
        <= 1e3 * (sample.seconds + parts["python"] + parts["sampling"]) / N
    )


@pytest.mark.parametrize("strategy, early", [("lru", False), ("edgemoe", True)])
def test_reads_are_told_apart(demo, strategy, early):
    """Without a predictor a router has asked for every read, and all waiting was for
    such ones.
    """
    _, sample = run(demo, strategy=strategy)
    asked_early = {READS["waited_prefetch"], READS["prefetched"]} & set(read_parts([sample]))
    assert bool(asked_early) == early
    stalls = {
        name
        for name, seconds in sample.parts.items()
        if name.startswith("stall_") and seconds > 0.01 * sample.counters["stall_seconds"]
    }
    assert early or stalls == {"stall_gate"}
