"""Route traces of other programs: what is read from them, what is refused, and what replays of the published ones give."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest

from helpers.files import ROUTE_TRACES, SMALL_TRACE
from moeoff import OptionError
from moeoff.gate_event import GateEvent
from moeoff.memory import rss
from moeoff.simulate import read_trace, simulate
from moeoff.simulate.comparison import left_out
from moeoff.trace import TensorInfo, Trace, TraceHeader
from routing import PUBLISHED, answer_of, heaviest, measure_answer

HEAD = """# route_trace v1
# model=/some folder/Model-Q4_K_M.gguf arch=qwen3moe n_layer=3 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=7
# layer=1 expert_bytes=5000 dense_bytes=7
# layer=2 expert_bytes=4000 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""


def rows(*events):
    """Of (turn, phase, layer, {step: experts}): expert 0 was in memory."""
    out = []
    for turn, phase, layer, tokens in events:
        for step, experts in tokens.items():
            out += [f"{turn},{phase},{step},{layer},{slot},{e},{0.6 - 0.2 * slot:g},{int(e == 0)},{0 if e == 0 else 5000}" for slot, e in enumerate(experts)]
    return "\n".join(out) + "\n"


TEXT = HEAD + rows(
    (0, 0, 1, {0: (1, 2), 1: (0, 3)}), (0, 0, 2, {1: (4, 5)}),
    (0, 1, 1, {2: (0, 7)}), (0, 1, 2, {2: (6, 0)}),
    (0, 1, 1, {3: (7, 1)}), (0, 1, 2, {3: (3, 2)}),
    (1, 0, 1, {4: (1, 2)}), (1, 0, 2, {4: (1, 2)}),
)  # fmt: skip


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a"])
def test_every_row_is_in_an_event(tmp_path, name):
    """By its content, whatever it is called; prompts in batches, and layers without experts have no gate."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(TEXT.encode()) if name.endswith("gz") else TEXT.encode())
    trace = read_trace(path)
    assert trace.model == TraceHeader("Model-Q4_K_M.gguf", 2, (TensorInfo(0, 1, 0, 8, 5000), TensorInfo(1, 2, 0, 8, 4000)))
    assert [(e.gate, e.layer, e.ids.tolist(), e.decode) for e in trace.events] == [
        (0, 1, [[1, 2], [0, 3]], False), (1, 2, [[4, 5]], False),
        (0, 1, [[0, 7]], True), (1, 2, [[6, 0]], True),
        (0, 1, [[7, 1]], True), (1, 2, [[3, 2]], True),
        (0, 1, [[1, 2]], False), (1, 2, [[1, 2]], False),
    ]  # fmt: skip
    assert [(e.n_hit, e.n_miss) for e in trace.events][:3] == [(1, 3), (0, 2), (1, 1)]
    assert all(np.allclose(e.weights, [[0.6, 0.4]] * len(e.ids)) and e.probs is None for e in trace.events)
    assert trace.starts.tolist() == [True] + [False] * 7


def test_a_last_event_that_was_cut_is_left_out(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(TEXT[: TEXT.rindex("1,0,4,2,1")])
    assert len(read_trace(path).events) == 7


LINE = "0,1,2,1,0,0,0.6,1,0\n"
DAMAGE = {
    "another version": (lambda t: t.replace("trace v1", "trace v2"), "is a route trace of version 'v2', this moeoff reads v1"),
    "no facts": (lambda t: t.replace("n_expert=", "n_experts="), "no line of facts has n_expert"),
    "a fact that is none": (lambda t: t.replace("n_expert=8", "n_expert=-8"), "the facts say n_expert='-8'"),
    "a huge fact": (lambda t: t.replace("n_expert=8", "n_expert=" + "9" * 5000), "the facts say n_expert="),
    "no experts": (lambda t: t.replace("=5000", "=0").replace("=4000", "=0"), "no layer has experts"),
    "other columns": (lambda t: t.replace("slot,expert", "expert,slot"), "line 6: expected the columns"),
    "no rows": (lambda t: t[: len(HEAD)], "has no rows"),
    "no columns": (lambda t: t[: t.index("turn")], "has no rows"),
    "words": (lambda t: t.replace(LINE, "0,1,2,1,zero,0,0.6,1,0\n"), "line 13: expected nine numbers"),
    "too few": (lambda t: t.replace(LINE, "0,1,2\n"), "line 13: expected nine numbers"),
    "no such expert": (lambda t: t.replace(LINE, "0,1,2,1,0,8,0.6,1,0\n"), "line 13: there is no such layer"),
    "a layer without experts": (lambda t: t.replace(LINE, "0,1,2,0,0,0,0.6,1,0\n"), "line 13: there is no such layer"),
    "a weight that is none": (lambda t: t.replace(LINE, "0,1,2,1,0,0,nan,1,0\n"), "line 13: there is no such layer"),
    "an expert twice": (lambda t: t.replace("0,1,2,1,1,7", "0,1,2,1,1,0"), "before line 15: expected 2 different experts"),
    "a row that is missing": (lambda t: t.replace("0,1,2,1,1,7,0.4,0,5000\n", ""), "before line 14: expected 2 different experts"),
    "a layer that is missing": (lambda t: t.replace("0,1,2,2,0,6,0.6,0,5000\n0,1,2,2,1,0,0.4,1,0\n", ""), "line 15: layer 1 does not follow"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_one_sentence(tmp_path, how):
    change, words = DAMAGE[how]
    path = tmp_path / "a.csv"
    assert change(TEXT) != TEXT
    path.write_text(change(TEXT))
    with pytest.raises(OptionError) as error:
        read_trace(path)
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


def test_other_files_are_refused(tmp_path):
    whole = gzip.compress(TEXT.encode())
    for name, data, words in (
        ("cut.gz", whole[:-20], "cannot be read: its compressed data is cut or damaged$"),
        ("damaged.gz", whole[:40] + b"\0\0\0\0" + whole[44:], "cannot be read: its compressed data is cut or damaged$"),
        ("sum.gz", whole[:-8] + b"\0\0\0\0" + whole[-4:], "cannot be read: its compressed data is cut or damaged$"),
        ("other.gz", gzip.compress(b"# something else"), "is no route trace"),
        ("bytes", HEAD.encode() + b"\xff\xfe", "is no text"),
        ("empty", b"", "is not a trace of moeoff"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(OptionError, match=words):
            read_trace(tmp_path / name)
    with pytest.raises(OptionError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_our_own_are_read_as_ever():
    ours, same = read_trace(SMALL_TRACE), Trace.read(SMALL_TRACE)
    assert ours.model == same.model and ours.n_tokens == same.n_tokens


def test_simulate_replays_them_and_says_what_it_cannot(moeoff_command):
    path = str(ROUTE_TRACES / "gpt-oss-120b.csv.gz")
    told = moeoff_command("simulate", path, "--strategy", "score,lfu", "--memory", "12%")
    said = " ".join(told.stdout.split())
    assert "lfu" in said and "score: not replayed, it reads the routers' probabilities of all experts, and the trace has none" in said
    found = json.loads(moeoff_command("simulate", path, "--strategy", "score,lfu", "--memory", "12%", "--json").stdout)
    assert [row["strategy"] for row in found["results"]] == ["lru", "lfu", "belady"] and list(found["left_out"]) == ["score"]
    assert left_out(Trace.read(SMALL_TRACE), ["score"]) == {}
    failed = moeoff_command("simulate", path, "--strategy", "none-such")
    assert failed.returncode != 0 and "unknown policy" in failed.stderr


# counted when the traces came in, by a program of its own: as the token before, LRU at 12, 24 and 36 %, touched, and the mean weights
COUNTED = {
    "qwen3-30b-a3b": (0.380, (0.567, 0.796, 0.899), 0.498, (0.265, 0.201, 0.166, 0.141, 0.121, 0.106)),
    "gemma-4-26b-a4b": (0.357, (0.567, 0.769, 0.874), 0.523, (0.311, 0.200, 0.153, 0.127, 0.110, 0.098)),
    "gpt-oss-120b": (0.179, (0.609, 0.716, 0.720), 0.280, (0.577, 0.423)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_published_traces_say_what_their_source_says(name):
    trace = read_trace(PUBLISHED[name])
    repeats, lru, touched, weights = COUNTED[name]
    found = measure_answer(trace)
    assert found.repeats == pytest.approx(repeats, abs=6e-4) and found.touched == pytest.approx(touched, abs=6e-4)
    assert found.weights == pytest.approx(weights, abs=6e-4)
    assert found.lru == pytest.approx(lru, abs=3e-3)  # which slices of one event go first is each program's own
    answer = answer_of(trace)
    assert simulate(answer, "lru", answer.model.full_bytes // 4).hit_rate < simulate(answer, "belady", answer.model.full_bytes // 4).hit_rate


def test_the_heaviest_alone():
    event = GateEvent(0, np.array([[3, 1, 2]], np.int32), np.array([[0.2, 0.5, 0.3]], np.float32))
    trace = Trace(TraceHeader("m", 3, (TensorInfo(0, 0, 0, 4, 100),)), [event], np.array([True]))
    kept = heaviest(trace, 2)
    assert kept.model.n_used == 2 and kept.events[0].ids.tolist() == [[1, 2]] and kept.events[0].weights == pytest.approx(np.array([[0.625, 0.375]]))


# --- what is larger unpacked than it looks ---


def test_a_line_is_bounded(tmp_path):
    """64 MB of a line are 64 kB packed."""
    path = tmp_path / "a.csv.gz"
    for text in (TEXT + "1" * (64 << 20), TEXT[:40] + " " * (64 << 20) + TEXT[40:]):
        path.write_bytes(gzip.compress(text.encode(), 1))
        tracemalloc.start()
        try:
            with pytest.raises(OptionError, match="has a line of more than 8192 bytes"):
                read_trace(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


def test_facts_are_bounded(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("# route_trace v1\n" + "# a=b c=d\n" * 200_000)
    with pytest.raises(OptionError, match=r"has more than 1.00 MiB of facts"):
        read_trace(path)
    path.write_text("# route_trace v1\n" + ("#" + " " * 8000 + "\n") * 100 + TEXT.partition("\n")[2])
    assert read_trace(path).model.name == "Model-Q4_K_M.gguf"


@pytest.mark.parametrize("phase", [0, 1], ids=["a prompt", "an answer"])
def test_rows_that_take_more_than_is_free(tmp_path, monkeypatch, phase):
    """A prompt's wait for its end; those of an answer are events at once."""
    path = tmp_path / "a.csv.gz"
    head = HEAD.replace("n_expert_used=2", "n_expert_used=1").replace("# layer=2 expert_bytes=4000 dense_bytes=7\n", "")
    text = head + "".join(f"0,{phase},{step},1,0,{step % 8},0.5,0,5000\n" for step in range(30_000))
    path.write_bytes(gzip.compress(text.encode(), 1))
    assert len(read_trace(path).events) == (30_000 if phase else 1)
    monkeypatch.setattr("moeoff.simulate.route_trace.available", lambda: rss() + (4 << 20))
    with pytest.raises(OptionError, match=r"of its rows take more than the [\d.]+ MiB of memory that are free"):
        read_trace(path)
