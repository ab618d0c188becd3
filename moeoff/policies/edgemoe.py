"""EdgeMoE: prediction from the previous two layers, eviction by frequency over
distance, and the fewest bits for each expert within a loss.

    §3.1    layers that route by the token       ActivationPath.begin
    §3.2    a bit width for each expert          by_importance;
                                                 measure.bit_allocation searches
    §3.3.1  an expert is read once for a prompt  llama.cpp's micro-batches
    §3.3.2  P(E_n | E_{n-1}, E_{n-2})            ActivationPath, PairCounts and fits
            preloads until the router selects    engine.prefetcher; `share` is 1; the
                                                 native store cancels the others
    §3.3.3  eviction score -f / distance         FrequencyOverDistance
            begins with the most frequent        its fit, `fill` of the preset

The presets are `edgemoe`, which is lossless, and `edgemoe-lossy`, with §3.2's widths.
llama.cpp does not support the paper's encoder-decoder models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..system.arrays import WrongArrays, require_arrays
from .base import (
    DEFAULT_FIT,
    FitOptions,
    GroupedPolicy,
    Prediction,
    Predictor,
    Progress,
    Section,
    chosen,
)
from .strategy import Strategy, register

# --- §3.2: expert-wise quantization ---


def by_importance(
    importance: Mapping[tuple[int, int], float], saved: Mapping[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Return (layer, expert) by rising loss per byte saved, the order of lower bit
    widths.

    Args:
        importance: Loss of the model with this expert alone in the lower width.
        saved: Bytes saved; experts that save none are left out.
    """
    return sorted(
        (key for key in importance if saved[key] > 0), key=lambda key: importance[key] / saved[key]
    )


# --- §3.3.2: preloading ---

FLOOR = 1e-4  # least argument of logarithms
PRIOR_ONE = 8.0  # weight of the back-off in observations
PRIOR_TWO = 8.0  # weight of a pair's back-off to one layer
# most bytes of a table that saves a wide lookup per event: up to 64 experts
TABLE = 16 << 20
# most bytes of counts; beyond, the last pairs of a layer back off to one layer
PAIRS = 256 << 20
PRIOR = 2.0  # weight of popularity in a token's occurrences
# most bytes of the first layer's token table, which keeps the most frequent tokens
FIRST_LAYER = 8 << 20


class PairCounts:
    """A table of P(x | a in the last layer, b in the one before), from counts.

    It stores only pairs that occurred, as the profile's section "pairs".

    Args:
        arrays: pair_seen [n_gates, E, E]: occurrences of a pair; pair_start [n_gates, E
            * E + 1]: start of its successors in pair_expert; pair_count [n]: their
            counts.
        n, e: n_gates and E.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], n: int, e: int):
        require_arrays(
            arrays,
            {
                "pair_seen": ("i", (n, e, e)),
                "pair_start": ("i", (n, e * e + 1)),
                "pair_expert": ("i", ("triples",), 0, e - 1),
                "pair_count": ("i", ("triples",)),
            },
        )
        self._seen, self._start, self._expert, self._count = (
            arrays[f"pair_{name}"] for name in ("seen", "start", "expert", "count")
        )
        if (self._start[:, 1:] < self._start[:, :-1]).any() or self._start.max(initial=0) > len(
            self._expert
        ):
            raise WrongArrays("'pair_start' points behind the end")

    def joint(
        self, gate: int, last: np.ndarray, before: np.ndarray, ratio: np.ndarray
    ) -> np.ndarray:
        """Return probabilities for each pair of the two layers' experts, [n_tokens, k,
        k, E] float32.

        Args:
            last, before: [n_tokens, k].
            ratio: [n_tokens, k, E] P(x | last), the back-off of rare pairs.
        """
        e = ratio.shape[2]
        pair = (last.astype(np.int64)[:, :, None] * e + before[:, None, :]).ravel()
        out = np.repeat(PRIOR_TWO * ratio, before.shape[1], axis=1).reshape(len(pair), e)
        first, end = (self._start[gate][pair + i].astype(np.int64) for i in (0, 1))
        n = end - first
        place = np.arange(n.sum()) + np.repeat(first - np.cumsum(n) + n, n)
        # each expert of a pair occurs once
        out[np.repeat(np.arange(len(pair)), n), self._expert[place]] += self._count[place]
        out /= (self._seen[gate].ravel()[pair] + PRIOR_TWO)[:, None]
        return out.reshape(*last.shape, before.shape[1], e)


def fit_pairs(
    recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Return the section "pairs", arrays of `PairCounts`."""
    used, starts = recording.used(), recording.starts
    _, n, e = used.shape
    small = np.uint8 if e <= 256 else np.uint16
    # in parts, then as a whole
    most = PAIRS if options.room is None else min(PAIRS, options.room // 3)
    room = most // (n * (small().itemsize + 2))  # triples per gate
    seen, start = np.zeros((n, e, e), np.uint32), np.zeros((n, e * e + 1), np.uint32)
    experts: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    n_triples = 0
    for gate in range(n):
        last, before, y = (
            experts_before(used, starts, gate, 1),
            experts_before(used, starts, gate, 2),
            used[:, gate].astype(np.float32),
        )
        limit = n_triples + room
        start[gate, 0] = n_triples
        for a in range(e):
            rows = np.flatnonzero(last[:, a])
            b = before[rows].astype(np.float32)
            count = (b.T @ y[rows]).astype(np.int64)
            if n_triples + np.count_nonzero(count) > limit:
                count[:] = 0
            else:
                seen[gate, a] = b.sum(axis=0)
            followed = np.nonzero(count)
            experts.append(followed[1].astype(small))
            counts.append(np.minimum(count[followed], 65535).astype(np.uint16))
            start[gate, a * e + 1 : (a + 1) * e + 1] = n_triples + np.cumsum(
                np.count_nonzero(count, axis=1)
            )
            n_triples += len(followed[0])
        if progress:
            progress(gate + 1, n)
    return {
        "pair_seen": seen,
        "pair_start": start,
        "pair_expert": np.concatenate(experts),
        "pair_count": np.concatenate(counts),
    }


def experts_before(used: np.ndarray, starts: np.ndarray, gate: int, steps: int) -> np.ndarray:
    """Return the experts `steps` gates before, [n_tokens, E] bool.

    They may belong to the previous token; the start of a text has none.
    """
    earlier = gate - steps
    if earlier >= 0:
        return used[:, earlier]
    out = np.zeros_like(used[:, 0])
    out[1:] = used[:-1, earlier % used.shape[1]]
    out[starts] = False
    return out


def fit_first(
    recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Return the section "first": the first layer's experts by token.

    Returns:
        first_tokens [n] int32 ascending; first_shares [n, E] float16, for the most
        frequent tokens within `FIRST_LAYER` bytes.
    """
    tokens, shares, _ = token_shares(
        recording.tokens, recording.used()[:, :1], FIRST_LAYER, progress
    )
    return {"first_tokens": tokens, "first_shares": shares[:, 0]}


def token_shares(
    tokens: np.ndarray, used: np.ndarray, limit: int, progress: Progress | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return routing by token for the most frequent tokens within a number of bytes.

    Args:
        tokens: [n_tokens] of the text.
        used: [n_tokens, n_gates, E] bool.

    Returns:
        tokens [n] int32 ascending, shares [n, n_gates, E] float16, and popularity
        [n_gates, E].
    """
    popularity = used.mean(axis=0, dtype=np.float32)
    order = np.argsort(tokens, kind="stable")
    distinct, first, seen = np.unique(tokens[order], return_index=True, return_counts=True)
    frequent = np.sort(np.argsort(-seen, kind="stable")[: max(limit // (2 * popularity.size), 1)])
    shares = np.empty((len(frequent), *popularity.shape), np.float16)
    for row, i in enumerate(frequent):
        count = used[order[first[i] : first[i] + seen[i]]].sum(axis=0)
        shares[row] = (count + PRIOR * popularity) / (seen[i] + PRIOR)
        if progress:
            progress(row + 1, len(frequent))
    return distinct[frequent].astype(np.int32), shares, popularity


@register
class ActivationPath(Predictor):
    """A predictor by P(E_n | E_{n-1}, E_{n-2}), from statistics of other text.

    EdgeMoE's models use one expert; with k of them the probability is the geometric
    mean over the k x k pairs. Rare pairs back off to the last layer's expert, rare
    experts to popularity. Layers that route by the token alone are known before the
    batch (§3.1), and so is the first layer for known tokens. Otherwise, and in the
    second layer, the path includes the previous token if the batch has the same size.
    Without a profile one layer is learned online.
    """

    name, summary = (
        "activation-path",
        "what followed the experts of the last two layers in other text",
    )
    compared = True

    def start(self) -> None:
        n, e, arrays = self.router.n_gates, self.router.n_experts, self.arrays
        self._pairs = (
            PairCounts(arrays, n, e) if arrays is not None and "pair_seen" in arrays else None
        )
        self._first = arrays if arrays is not None and "first_tokens" in arrays else None
        if self._first is not None:
            require_arrays(
                self._first,
                {"first_tokens": ("i", ("tokens",)), "first_shares": ("f", ("tokens", e))},
            )
            if not len(known := self._first["first_tokens"]) or (known[1:] <= known[:-1]).any():
                raise WrongArrays("'first_tokens' is not in order")
        self._tables = {
            gate: table for gate, table in enumerate(self.router.tables) if table is not None
        }
        self.wants_tokens = bool(self._tables) or self._first is not None
        self._counts: np.ndarray | None = None
        if arrays is None:
            # [gate, expert before, expert]
            self._counts = np.full((n, e, e), PRIOR_ONE / e, np.float32)
            self._sums = np.full((n, e, 1), PRIOR_ONE, np.float32)
        else:
            require_arrays(arrays, {"one": ("f", (n, e, e)), "popularity": ("f", (n, e), 0, 1)})
            self._one: np.ndarray = arrays["one"].astype(np.float32)
            self._log_popularity = np.log(arrays["popularity"] + FLOOR)
        self._table: np.ndarray | None = None  # [gate, last, before, expert], the same numbers
        if self._pairs is not None and 2 * n * e**3 <= TABLE:
            every = np.arange(e)[None]
            self._table = np.stack(
                [
                    self._log_joint(self._pairs, gate, every, every)[0].astype(np.float16)
                    for gate in range(n)
                ]
            )
        self._gate = -1
        self._last: np.ndarray | None = None

    def reset_sequence(self) -> None:
        self._last = None

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        """Predict static layers and the first layer from the tokens alone."""
        tokens, out = np.asarray(tokens), []
        if 0 not in self._tables and self._first is not None:
            known = self._first["first_tokens"]
            rows = np.searchsorted(known, tokens).clip(max=len(known) - 1)
            # a different token's previous path predicts better than popularity
            if (known[rows] == tokens).all():
                out.append(Prediction(0, self._first["first_shares"][rows].astype(np.float32)))
        for gate, table in self._tables.items():
            scores = np.zeros((len(tokens), self.router.n_experts), np.float32)
            np.put_along_axis(scores, table[tokens], 1, axis=1)
            out.append(Prediction(gate, scores))
        return out

    def _follows(self, event: GateEvent) -> bool:
        """Return True if the previous rows have the same tokens or, at the first gate,
        the preceding ones.
        """
        if (
            self._last is None
            or len(self._last) != len(event.ids)
            or event.gate != (self._gate + 1) % self.router.n_gates
        ):
            return False
        return event.gate > 0 or bool(event.decode)

    def observe(self, event: GateEvent) -> list[Prediction]:
        ids, n_gates = event.ids, self.router.n_gates
        before = self._last if self._follows(event) else None
        if self._counts is not None and before is not None:
            rows, columns = before[:, :, None], ids[:, None, :]
            np.add.at(self._counts[event.gate], (rows, columns), 1)
            np.add.at(self._sums[event.gate], before.ravel(), ids.shape[1])
        self._gate, self._last = event.gate, ids
        target = (event.gate + 1) % n_gates
        if target in self._tables or (target == 0 and not event.decode):
            return []
        return [Prediction(target, self._scores(target, ids, before))]

    def _scores(self, gate: int, last: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        out: np.ndarray
        if self._counts is not None:
            out = (self._counts[gate][last] / self._sums[gate][last]).mean(axis=1)
            return out
        if self._pairs is not None and before is not None:
            joint = (
                self._log_joint(self._pairs, gate, last, before)
                if self._table is None
                else self._table[gate][last[:, :, None], before[:, None, :]]
            )
            out = np.exp(joint.mean(axis=(1, 2), dtype=np.float32))
            return out
        log = self._log_popularity[gate] + self._one[gate][last].sum(axis=1)
        log -= log.max(axis=1, keepdims=True)
        out = np.exp(log, out=log)
        return out

    def _log_joint(
        self, pairs: PairCounts, gate: int, last: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Return logs [n_tokens, k, k, E] float32 for each pair of `last` and `before`
        [n_tokens, k].
        """
        # P(x | last), with FLOOR
        ratio = np.exp(self._one[gate][last] + self._log_popularity[gate])
        joint: np.ndarray = pairs.joint(gate, last, before, ratio - FLOOR)
        return np.log(joint + FLOOR, out=joint)

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray]:
        """Fit a `Recording`.

        Returns:
            popularity [n_gates, E] share of tokens; one [n_gates, E before, E] log of
            P(e | the last layer's) / P(e).
        """
        used = recording.used()
        _, n, e = used.shape
        popularity = used.mean(axis=0, dtype=np.float32)
        one = np.zeros((n, e, e), np.float16)
        for gate in range(n):
            last, y = (
                experts_before(used, recording.starts, gate, 1).astype(np.float32),
                used[:, gate].astype(np.float32),
            )
            after = (last.T @ y + PRIOR_ONE * popularity[gate]) / (
                last.sum(axis=0)[:, None] + PRIOR_ONE
            )
            one[gate] = np.log(after + FLOOR) - np.log(popularity[gate] + FLOOR)
            if progress:
                progress(gate + 1, n)
        return {"popularity": popularity, "one": one}

    sections = (Section("path", fit), Section("pairs", fit_pairs), Section("first", fit_first))


# --- §3.3.3: cache eviction policy ---


@register
class FrequencyOverDistance(GroupedPolicy):
    """Eviction score -f / distance (§3.3.3): evict rarely used experts of distant
    layers first.

    The paper prints the distance as (S - i + I) mod S, which against its text evicts
    the next layer first. Here it is (i - I + S) mod S. For the evicting layer itself it
    is S, a whole token. `counts` [n_gates, n_experts], accesses in other text, order
    experts not used in this run.
    """

    name, summary = "edgemoe", "keeps what is used often and in layers that come soon"
    defaults = {"counts": None}
    distance_sign = 1  # of i - I; -1 is the printed form

    @staticmethod
    def fit(
        recording: Recording, options: FitOptions = DEFAULT_FIT, progress: Progress | None = None
    ) -> dict[str, np.ndarray]:
        """Fit a `Recording`.

        Returns:
            counts [n_gates, n_experts] int64, tokens that used each expert; n_tokens.
        """
        return {"counts": recording.popularity(), "n_tokens": np.array([recording.n_tokens])}

    sections = (Section("popularity", fit, {"counts": ("i", ("gates", "experts"), 0, 1 << 53)}),)

    def start(self) -> None:
        super().start()
        n = self.shape.n_gates
        if (counts := self.options["counts"]) is not None and np.shape(
            counts
        ) != self.priorities.shape:
            raise WrongArrays(
                f"'counts' has the shape {np.shape(counts)}, expected {self.priorities.shape}"
            )
        i = np.arange(n)
        distance = (self.distance_sign * (i[None] - i[:, None])) % n  # [I, i]
        distance[distance == 0] = n
        self._nearness = (1 / distance).astype(np.float32)[:, :, None]
        self._counts = np.zeros_like(self.priorities)
        # less than one access: the order of experts not yet used in this run
        if counts is not None:
            self._counts += np.asarray(counts, np.float32) / (np.max(counts) + 1)
            np.multiply(self._counts, self._nearness[0], out=self.priorities)

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        for event in events:
            experts, count = chosen(event)
            self._counts[event.gate][experts] += count
        np.multiply(
            self._counts,
            self._nearness[(first + len(events)) % self.shape.n_gates],
            out=self.priorities,
        )


EDGEMOE = register(
    Strategy(
        "edgemoe",
        "EdgeMoE: frequency over distance, activation path",
        policy=FrequencyOverDistance,
        predictor=ActivationPath,
        fill=True,
        share=1.0,
        bounded=False,
    )
)
register(
    replace(
        EDGEMOE,
        name="edgemoe-lossy",
        summary=(
            "EdgeMoE, lossy: each expert in the bits that calibrate --bits-plan found for it (a"
            " sidecar of convert --bits)"
        ),
        tier="bits",
    )
)
