"""Which sequence each row of a gate event is of: by made-up events, and on the real library against what each sequence selects alone."""

import numpy as np
import pytest

import moeoff
from moeoff.binding import api
from moeoff.calibrate.writer import ParallelLlama
from moeoff.engine.batch import MAYBE, NO, YES, BatchRows, OneSequence, Span, UbatchOrder, is_decode, spans_of
from moeoff.gate_event import GateEvent
from moeoff.server.server import batch_rows

OPTIONS = {"expert_memory": "4M", "strategy": "lfu", "n_threads": 2, "n_ctx": 512}


def told(rows, *events, first=1):
    """Of events (gate, n_tokens), one after the other."""
    out = []
    for seq, (gate, n) in enumerate(events, first):
        found = rows.of(GateEvent(gate, np.zeros((n, 2), np.int32), np.zeros((n, 2), np.float32), seq=seq))
        out.append(None if found is None else found.tolist())
    return out


def rows(sequences, outputs, n_ubatch=4):
    return BatchRows(np.array(sequences, np.int32), np.array(outputs), n_ubatch)


def test_micro_batches_and_the_rows_that_the_last_layer_leaves():
    batch = [0, 1, 1, 1, 1, 2], [YES, NO, NO, NO, YES, YES]
    first, second = [0, 1, 1, 1], [1, 2]
    assert told(rows(*batch), (0, 4), (1, 4), (2, 1), (0, 2), (1, 2), (2, 2)) == [first, first, [0], second, second, second]
    # no output is wanted of the first micro-batch: its last gate computes nothing
    assert told(rows(batch[0], [NO] * 5 + [YES]), (0, 4), (1, 4), (0, 2), (1, 2), (2, 1)) == [first, first, second, second, [2]]


@pytest.mark.parametrize("n, last", [(1, [0]), (3, [0, 1, 2]), (2, None), (6, [0, 1, 1, 1, 2, 2])])
def test_a_prompt_whose_end_is_not_known(n, last):
    batch = rows([0, 1, 1, 1, 2, 2], [YES, NO, NO, MAYBE, NO, MAYBE], 8)
    assert told(batch, (0, 6), (1, n)) == [[0, 1, 1, 1, 2, 2], last]


def test_nothing_is_said_of_what_is_not_certain():
    known = [0, 1, 1]
    outputs = [YES, NO, YES]
    assert told(rows(known, outputs), (0, 2), (1, 2), (0, 3)) == [None] * 3  # another split
    assert told(rows(known, outputs), (0, 3), (0, 3)) == [known, None]  # another context after the batch
    dropped = rows(known, outputs)
    assert told(dropped, (0, 3)) + told(dropped, (2, 2), (0, 3), first=3) == [known, None, None]


def test_one_sequence_is_always_certain():
    assert told(OneSequence(5), (0, 3), (1, 3), (2, 1), (0, 2)) == [[5] * 3, [5] * 3, [5], [5] * 2]


def test_a_context_that_puts_batches_together_anew():
    splitting = UbatchOrder(8, in_order=False)
    assert splitting.rows(np.array([0, 1, 3]), np.ones(3)) is not None
    assert splitting.rows(np.array([0, 1, 1]), np.ones(3)) is None and splitting.rows(np.array([1, 0]), np.ones(2)) is None


def test_a_sample_has_the_sequences_of_its_tokens():
    event = GateEvent(0, np.zeros((10, 2), np.int32), np.zeros((10, 2), np.float32), np.zeros((5, 4)), row_step=2, sequences=np.arange(10))
    assert event.sample(3).sequences.tolist() == [0, 4, 8] and len(event.sample(3).probs) == 3
    assert event.one_each and not GateEvent(0, event.ids, event.weights, sequences=np.arange(10) // 2).one_each


def test_what_a_server_tells_of_a_batch():
    """Slot 2 is decoded, with a draft; slot 0 is read to its end or not, which the hook does not say; then slot 2 alone."""
    slots, is_prompt = [2, 2, 0, 0, 0], [0, 0, 1, 1, 1]
    spans = spans_of(slots, [7, 8, 0, 1, 2], is_prompt)
    assert spans == {2: Span(7, 9, 2, True), 0: Span(0, 3, 3, False)} and not is_decode(spans)
    assert told(batch_rows(UbatchOrder(8, True), slots, is_prompt), (0, 5), (1, 3), (2, 2)) == [slots, [2, 2, 0], [2, 2]]
    assert spans_of([2, 2], [9, 10], [0, 0]) == {2: Span(9, 11, 2, True)} and is_decode({2: Span(9, 11, 2, True)})


class UnifiedLlama(ParallelLlama):
    """As llama-server's: all sequences in one cache."""

    _unified = True


def selections(llm):
    """What the gates select from now on: events, and [gate, ids] of each token of each sequence in the order of its positions."""
    events, of = [], {}

    def listen(event):
        events.append(event)
        sequences = [0] * len(event.ids) if event.sequences is None else event.sequences.tolist()
        for sequence, ids in zip(sequences, event.ids.tolist()):
            of.setdefault((sequence, event.gate), []).append(sorted(ids))

    llm.set_gate_callback(listen)
    return events, of


def test_every_row_of_mixed_batches_is_known(demo):
    """Two sequences are decoded while a third is read, in micro-batches; what each is said to select is what it selects alone."""
    texts = {s: np.random.default_rng(s).integers(300, 4000, 40).tolist() for s in (0, 1, 2)}
    with UnifiedLlama(demo, 3, n_ubatch=8, n_batch=32, logits_all=True, **OPTIONS) as llm:
        assert llm.engine.ubatch_order == UbatchOrder(8, True)
        events, found = selections(llm)
        llm.decode_sequences(texts[0][:9] + texts[2][:5], [*range(9), *range(5)], [0] * 9 + [2] * 5, [False] * 8 + [True] + [False] * 4 + [True])
        for i in range(3):  # 0 and 2 are decoded, 1 is read
            part = slice(9 * i, 9 * i + 9)
            sequences, positions = [0, *[1] * 9, 2], [9 + i, *range(40)[part], 5 + i]
            outputs = [True, *[False] * 8, i == 2, True]
            llm.decode_sequences([texts[0][9 + i], *texts[1][part], texts[2][5 + i]], positions, sequences, outputs)
        llm.engine.buffer.drain()
    assert all(event.sequences is not None for event in events) and len({len(event.ids) for event in events}) > 3
    last = max(event.gate for event in events)
    outputs = {0: [8, 9, 10, 11], 1: [26], 2: [4, 5, 6, 7]}
    for sequence, n in ((0, 12), (1, 27), (2, 8)):
        with moeoff.Llama(demo, logits_all=True, **OPTIONS) as llm:
            _, alone = selections(llm)
            llm.decode_batch(texts[sequence][:n], 0)
            llm.engine.buffer.drain()
        for gate in range(last + 1):
            expected = alone[0, gate] if gate < last else [alone[0, gate][t] for t in outputs[sequence]]
            assert len(found[sequence, gate]) == len(expected)
            assert sum(a == b for a, b in zip(found[sequence, gate], expected)) >= 0.8 * len(expected)  # batches round differently


def test_sequences_with_a_cache_of_their_own(demo):
    """llama.cpp orders such a batch by its own rules: one token each of ascending sequences stay, of others nothing is said."""
    with ParallelLlama(demo, 3, logits_all=True, **OPTIONS) as llm:
        assert not llm.engine.ubatch_order.in_order and api.llama_n_ctx_seq(llm.context_handle) < llm.n_ctx()
        events, _ = selections(llm)
        llm.decode_sequences([300, 400, 500], [0, 0, 0], [0, 1, 2], [True] * 3)
        llm.decode_sequences([301, 501, 401], [1, 1, 1], [0, 2, 1], [True] * 3)
        llm.decode_sequences([302, 303, 402], [2, 3, 2], [0, 0, 1], [True] * 3)
        llm.decode_sequences([403], [3], [1], [True])
        llm.engine.buffer.drain()
    kinds = {None if event.sequences is None else tuple(event.sequences.tolist()) for event in events}
    assert kinds == {(0, 1, 2), None, (1,)} and events[0].sequences is not None and events[-1].sequences.tolist() == [1]


def test_a_text_of_one_sequence_needs_no_sequences(demo):
    with moeoff.Llama(demo, **OPTIONS) as llm:
        events, _ = selections(llm)
        llm.eval(list(range(300, 330)))
        llm.eval([5])
        llm.engine.buffer.drain()
    assert events and all(event.sequences is None for event in events)
