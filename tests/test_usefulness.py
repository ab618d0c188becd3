"""How useful a prefetch is, by its place: on made-up predictions, whose usefulness is known."""

import numpy as np
import pytest

from moeoff.engine.usefulness import Usefulness


def run(share_of_place, n_tokens=200, n_gates=6, n_experts=16, resident=0.5, bad_gate=None, seed=0):
    """Predictions right with these shares, the candidates absent or not by chance. Returns how many places pay for each gate."""
    rng, usefulness = np.random.default_rng(seed), Usefulness(n_gates, n_experts, len(share_of_place))
    for _ in range(n_tokens):
        table = rng.random((n_gates, n_experts)) < resident
        waiting = {}
        for gate in range(n_gates):
            usefulness.selected(gate, waiting.get(gate, np.array([0])))
            if gate == 0:
                usefulness.next_token(table)
            target = (gate + 1) % n_gates
            best = rng.permutation(n_experts)[: len(share_of_place)]
            usefulness.predicted(target, best)
            right = rng.random(len(best)) < (0.1 if target == bad_gate else np.array(share_of_place))
            if target:
                waiting[target] = best[right]
    return [usefulness.n_paying(gate) for gate in range(1, n_gates)]


@pytest.mark.parametrize("shares, n", [((0.9, 0.8, 0.7, 0.6), 4), ((0.9, 0.8, 0.3, 0.2), 2), ((0.2, 0.2, 0.1, 0.1), 0)])
def test_reads_the_places_that_are_more_useful_than_not(shares, n):
    assert run(shares) == [n] * 5


def test_begins_with_all_places():
    assert Usefulness(3, 8, 4).n_paying(2) == 4


def test_a_gate_that_is_hard_to_foresee_reads_less():
    found = run((0.9, 0.85, 0.8, 0.75), bad_gate=3)
    assert found[2] == 0 and found[0] == found[1] == found[3] == found[4] == 4


def test_what_is_resident_says_nothing():
    """Of a good cache the residents are predicted well. Only what would have been read counts."""
    usefulness, resident = Usefulness(2, 8, 2), np.ones((2, 8), bool)
    resident[1, 4:] = False
    for _ in range(50):
        usefulness.selected(0, np.array([0]))
        usefulness.next_token(resident)
        usefulness.predicted(1, np.array([0, 5]))
        usefulness.selected(1, np.array([0]))  # the resident one is right, the absent one never
    assert usefulness.n_paying(1) < 2


def test_several_sequences_have_one_place_for_each_expert():
    """Experts that several want count once; a place is as good as what any of the sequences selects of it."""
    usefulness, resident = Usefulness(2, 8, 2), np.zeros((2, 8), bool)
    for _ in range(50):
        usefulness.selected(0, np.array([0]))
        usefulness.next_token(resident)
        usefulness.predicted(1, np.array([0, 1, 2, 5, 6]), np.array([0, 0, 0, 1, 1]))  # of three sequences
        usefulness.selected(1, np.array([[0, 3], [1, 3], [2, 4]]).ravel())
    assert usefulness.n_paying(1) == 1
