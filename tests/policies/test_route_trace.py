"""Route traces of other programs: what is read from them, and what replays of the
published ones give.
"""

import gzip

import numpy as np
import pytest

from moeoff import OptionError
from moeoff.policies.replay import simulate
from moeoff.routing.event import GateEvent
from moeoff.routing.route_trace import read_trace
from moeoff.routing.trace import TensorInfo, Trace, TraceHeader
from routing import PUBLISHED, heaviest, measure_answer

HEAD = """# route_trace v1
# model=/some folder/Model-Q4_K_M.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=5000 dense_bytes=7
# layer=2 expert_bytes=4000 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""


def rows(*events):
    """Return rows of (turn, phase, layer, {step: experts}); expert 0 was in memory."""
    out = []
    for turn, phase, layer, tokens in events:
        for step, experts in tokens.items():
            out += [
                f"{turn},{phase},{step},{layer},{slot},{e},{0.6 - 0.2 * slot:g},{int(e == 0)},{0 if e == 0 else 5000}"
                for slot, e in enumerate(experts)
            ]
    return "\n".join(out) + "\n"


TEXT = HEAD + rows(
    (0, 0, 1, {0: (1, 2), 1: (0, 3)}), (0, 0, 2, {1: (4, 5)}),
    (0, 1, 1, {2: (0, 7)}), (0, 1, 2, {2: (6, 0)}),
    (0, 1, 1, {3: (7, 1)}), (0, 1, 2, {3: (3, 2)}),
    (1, 0, 1, {4: (1, 2)}), (1, 0, 2, {4: (1, 2)}),
)  # fmt: skip


def test_every_row_is_in_an_event(tmp_path):
    """Prompts in batches, and layers without experts have no gate."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(TEXT.encode()))
    trace = read_trace(path)
    assert trace.model == TraceHeader(
        "Model-Q4_K_M.gguf", 2, (TensorInfo(0, 1, 0, 8, 5000), TensorInfo(1, 2, 0, 8, 4000))
    )
    assert [(e.gate, e.layer, e.ids.tolist(), e.decode) for e in trace.events] == [
        (0, 1, [[1, 2], [0, 3]], False), (1, 2, [[4, 5]], False),
        (0, 1, [[0, 7]], True), (1, 2, [[6, 0]], True),
        (0, 1, [[7, 1]], True), (1, 2, [[3, 2]], True),
        (0, 1, [[1, 2]], False), (1, 2, [[1, 2]], False),
    ]  # fmt: skip
    assert all(
        np.allclose(e.weights, [[0.6, 0.4]] * len(e.ids)) and e.probs is None for e in trace.events
    )
    assert trace.starts.tolist() == [True] + [False] * 7
    answer = trace.decoded()
    assert [e.ids.tolist() for e in answer.events] == [[[0, 7]], [[6, 0]], [[7, 1]], [[3, 2]]]
    assert answer.starts.tolist() == [True, False, False, False]
    path.write_text(TEXT)  # not compressed
    assert [e.ids.tolist() for e in read_trace(path).events] == [
        e.ids.tolist() for e in trace.events
    ]


def test_refuses_damaged_route_traces(tmp_path):
    path = tmp_path / "a.csv"
    whole = gzip.compress(TEXT.encode())
    damaged = {
        "cut": whole[: len(whole) // 2],
        "wrong checksum": whole[:-8] + bytes(8),
        "no columns": b"# route_trace v1\n",
        "no rows": HEAD.encode(),
        "unknown expert": TEXT.replace("0,1,2,1,0,0,", "0,1,2,1,0,8,").encode(),
        "unknown layer": TEXT.replace("0,1,2,1,", "0,1,2,9,").encode(),
        "no number": TEXT.replace("0,1,2,1,", "0,1,nan,1,").encode(),
        "an expert too few": TEXT.rsplit("\n", 2)[0].encode(),
        "too many experts": TEXT.replace("n_expert=8", "n_expert=99999999999").encode(),
    }
    for what, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(OptionError, match="a.csv: expected a route trace"):
            print(what, read_trace(path))


# counted when the traces came in, by a program of its own: as the token before, LRU at
# 12, 24 and 36 %, touched, and the mean weights
COUNTED = {
    "qwen3-30b-a3b": (
        0.380,
        (0.567, 0.796, 0.899),
        0.498,
        (0.265, 0.201, 0.166, 0.141, 0.121, 0.106),
    ),
    "gemma-4-26b-a4b": (
        0.357,
        (0.567, 0.769, 0.874),
        0.523,
        (0.311, 0.200, 0.153, 0.127, 0.110, 0.098),
    ),
    "gpt-oss-120b": (0.179, (0.609, 0.716, 0.720), 0.280, (0.577, 0.423)),
}


@pytest.mark.slow  # tests of research scripts run in nightly
@pytest.mark.parametrize("name", COUNTED)
def test_published_traces_say_what_their_source_says(name):
    trace = read_trace(PUBLISHED[name])
    repeats, lru, touched, weights = COUNTED[name]
    measured = measure_answer(trace)
    assert measured.repeats == pytest.approx(
        repeats, abs=6e-4
    ) and measured.touched == pytest.approx(touched, abs=6e-4)
    assert measured.weights == pytest.approx(weights, abs=6e-4)
    # which slices of one event go first is each program's own
    assert measured.lru == pytest.approx(lru, abs=3e-3)
    answer = trace.decoded()
    assert (
        simulate(answer, "lru", answer.model.full_bytes // 4).hit_rate
        < simulate(answer, "belady", answer.model.full_bytes // 4).hit_rate
    )


@pytest.mark.slow
def test_the_heaviest_alone():
    event = GateEvent(0, np.array([[3, 1, 2]], np.int32), np.array([[0.2, 0.5, 0.3]], np.float32))
    trace = Trace(TraceHeader("m", 3, (TensorInfo(0, 0, 0, 4, 100),)), [event], np.array([True]))
    lighter = heaviest(trace, 2)
    assert lighter.model.n_used == 2 and lighter.events[0].ids.tolist() == [[1, 2]]
    assert lighter.events[0].weights == pytest.approx(np.array([[0.625, 0.375]]))
