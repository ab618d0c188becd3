"""The length of drafts in speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..options import LONGEST_DRAFT
from ..routing.batch import Span

_PRIOR, _PRIOR_WEIGHT = 0.6, 2.0  # prior acceptance rate, and its weight in trials
_FORGET = 0.94  # decay per trial, as acceptance changes with the text
_SMOOTH = 0.25  # weight of a new time
# assumed cost of another token before it is measured: low, so that it is tried
_SLOPE = 0.25
_MARGIN = 1.02  # least speed-up of a draft
_WAIT, _LONGEST_WAIT = 8, 256  # batches between trials of other lengths


class DraftLength:
    """The draft length with the most tokens per second, updated at every batch.

    A batch reads the union of its tokens' experts, so the cost of a draft depends on
    model, cache and disk, and its gain on the text. Both are measured: acceptance rates
    by position, and seconds by batch size. Other lengths are tried now and then, more
    rarely if they do not pay.

    Call `begin` before each batch. Its drafts may already be made: `best` applies to
    the next one.

    Args:
        most: Longest draft in tokens; may be changed.
    """

    def __init__(self, most: int = LONGEST_DRAFT) -> None:
        self._tried, self._accepted = np.zeros(LONGEST_DRAFT), np.zeros(LONGEST_DRAFT)
        self._seconds: dict[int, float] = {}  # mean, by tokens of a sequence
        self._spans: dict[int, Span] = {}  # of the previous batch
        self._n_sequences, self._last = 0, 0.0
        self._wait, self._since, self._n_trials = _WAIT, 0, 0
        self._paid = True
        self._trial: int | None = None
        self._best, self.most = 1, most

    @property
    def best(self) -> int:
        """Most draft tokens for each sequence."""
        return min(self._best if self._trial is None else self._trial, self.most)

    @property
    def gain(self) -> float | None:
        """Speed-up of this draft length minus 1; None before both are measured."""
        rates = self._rates() if len(self._seconds) > 1 else None
        return None if rates is None else float(rates[self._best] / rates[0] - 1)

    def begin(self, spans: Mapping[int, Span], now: float) -> int:
        """Learn from the previous batch, by how far each sequence's position has moved.

        Args:
            now: Clock in seconds.

        Returns:
            Number of draft tokens rejected in the previous batch.
        """
        seconds, self._last = now - self._last, now
        before, self._spans = self._spans, dict(spans)
        drafts = [  # tokens drafted and accepted
            (
                span.n_tokens - 1,
                min(max(spans[sequence].first - span.first - 1, 0), span.n_tokens - 1),
            )
            for sequence, span in before.items()
            if span.decode and sequence in spans and spans[sequence].decode
        ]
        n_rejected = sum(drafted - accepted for drafted, accepted in drafts)
        # a prompt came between, or others decode now
        if not drafts or not len(drafts) == len(before) == len(spans):
            self._since = self._wait  # another text
            return n_rejected
        if len(drafts) != self._n_sequences:  # their times are not comparable
            self._n_sequences = len(drafts)
            self._seconds.clear()
        for drafted, accepted in drafts:
            self._count(drafted, accepted)
        n = 1 + round(sum(drafted for drafted, _ in drafts) / len(drafts))
        if n <= LONGEST_DRAFT + 1:
            usual = self._seconds.get(n)
            self._seconds[n] = (
                seconds if usual is None else usual + _SMOOTH * (min(seconds, 3 * usual) - usual)
            )
        self._choose(max(drafted for drafted, _ in drafts), n_rejected == 0)
        return n_rejected

    def _count(self, n_drafted: int, n_accepted: int) -> None:
        # tokens after a rejected one were not tried
        n = min(n_drafted, n_accepted + 1, LONGEST_DRAFT)
        self._tried[:n] = 1 + _FORGET * self._tried[:n]
        self._accepted[:n] *= _FORGET
        self._accepted[: min(n_accepted, n)] += 1

    def _rates(self) -> np.ndarray | None:
        """Return [LONGEST_DRAFT + 1] tokens per second by draft length."""
        if not self._seconds:
            return None
        chance, chances = _PRIOR, np.empty(LONGEST_DRAFT)
        for i, (tried, accepted) in enumerate(zip(self._tried, self._accepted)):
            chance = chances[i] = (accepted + _PRIOR_WEIGHT * chance) / (tried + _PRIOR_WEIGHT)
        gained = 1 + np.concatenate([[0], np.cumsum(np.cumprod(chances))])
        timed = sorted(self._seconds)
        times = [self._seconds[n] for n in timed]
        one = self._seconds.get(1) or times[0] / (1 + _SLOPE * (timed[0] - 1))
        slope = (times[-1] - one) / (timed[-1] - 1) if timed[-1] > 1 else _SLOPE * one
        lengths = np.arange(1, LONGEST_DRAFT + 2)
        seconds = np.where(
            lengths > timed[-1],
            times[-1] + max(slope, 0) * (lengths - timed[-1]),
            np.interp(lengths, [1, *timed], [one, *times]),
        )
        rates: np.ndarray = gained / seconds
        return rates

    def _choose(self, n_drafted: int, were_accepted: bool) -> None:
        """Choose the next length after a batch with `n_drafted` draft tokens."""
        rates = self._rates()
        if rates is None:
            return
        longest = int(np.argmax(rates[: self.most + 1]))
        self._best = longest if rates[longest] > _MARGIN * rates[0] else 0
        # a text without a draft cannot try one
        if self._trial is not None and (n_drafted > 0) == (self._trial > 0):
            self._trial = None
            pays_if_accepted = 1 + n_drafted > rates[0] * self._seconds.get(1 + n_drafted, 0.0)
            # the text may repeat itself from here on
            if n_drafted > 0 and self._best == 0 and were_accepted and pays_if_accepted:
                self._since = self._wait
        self._since += 1
        if self._since < self._wait:
            return
        pays = self._best > 0
        self._wait = (
            _WAIT if pays != self._paid else min((2 if pays else 4) * self._wait, _LONGEST_WAIT)
        )
        self._paid, self._since, self._n_trials = pays, 0, self._n_trials + 1
        # drafts used from the first token on would otherwise never be compared with
        # none
        others = (
            (0, min(2 * self._best, self.most), self._best // 2) if 1 in self._seconds else (0,)
        )
        self._trial = others[self._n_trials % len(others)] if pays else 1
