"""`Quality`: what a running model may give up, chosen from the options or the model's
contract, and again where the budget moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..budget.loss_contract import DEFAULT_SHARE, LossContract, SelectedPrecision
from ..experts.profile import Profile
from ..experts.sidecar import ORIGINAL, ExpertSource
from ..gguf.model_index import ModelIndex
from ..options import Config
from ..precision import Precision
from ..routing.batch import Span
from ..system.arrays import require_arrays
from ..system.memory import Budget
from .buffer import ExpertBuffer
from .prefetcher import Prefetcher


class Quality:
    """The precision that experts are served in, within what the user allows.

    Args:
        config: as the user gave it.
        profile: with the contract, if there is one.
        resident_share: of the experts, in their own precision, by the budget.

    Attributes:
        precision: in use.
        selected: what `max_loss` has chosen.
        source, low_source: where experts are read from, and their low versions.
        followed: tokens of the text that the simulated cache has seen.
        buffer: serves the experts; set before the first `use`.
        prefetcher: if there is one, it reads ahead what the precision in use would
            serve.

    Raises:
        OptionError: no contract for the bound, or a strategy that cannot serve what it
            chooses.
    """

    buffer: ExpertBuffer
    prefetcher: Prefetcher | None = None

    def __init__(
        self,
        config: Config,
        model_index: ModelIndex,
        profile: Profile | None,
        resident_share: Callable[[Budget], float],
        budget: Budget,
    ):
        self._config, self._share, self._contract = config, resident_share, None
        self.precision, self.followed = _fitted(config, profile), 0
        self.selected: SelectedPrecision | None = None
        low_tier = self.precision.low_tier
        tier = ORIGINAL if config.tier is None and (low_tier or config.max_loss) else config.tier
        self.source, self.low_source = (
            ExpertSource.make(model_index, config.experts, tier, config.verify_reads, low_tier),
            None,
        )
        if config.max_loss:
            self._contract = LossContract.find(model_index, profile, self.source, config.max_loss)
            # what must repeat in any memory cannot be chosen by it
            self.selected = self._contract.select(
                config.max_loss, DEFAULT_SHARE if config.deterministic else resident_share(budget)
            )
            self.precision, self.source = (
                self.selected.precision,
                replace(self.source, tier=self.selected.tier),
            )
            config.check_precision(self.precision)
        if low_tier:
            self.low_source = self.source.low(low_tier, model_index)
            self.precision = replace(self.precision, low_tier=self.low_source.tier)

    @property
    def unread_tiers(self) -> list[str]:
        """Lower precisions of the sidecar, where nobody has said anything that would
        read them, or the bound of loss was measured without it.
        """
        asked = (
            self._config.tier is not None
            or self.low_source is not None
            or (self._contract is not None and self._contract.sidecar != 0)
        )
        return (
            []
            if asked or self.source.sidecar is None
            else [tier for tier in self.source.sidecar.tiers if tier != ORIGINAL]
        )

    @property
    def simulates(self) -> bool:
        """Decisions look at a simulated cache, which follows a text from its first
        token on.
        """
        return (
            self._config.deterministic
            and self.precision.resident > 0
            and not self.precision.lossless
        )

    def use(self, precision: Precision) -> None:
        """Gives up this much from the next batch on; what decisions are simulated by is
        empty then.

        Raises:
            OptionError: the low versions are not there.
        """
        self.precision, self.followed = precision, 0
        self.buffer.set_precision(precision, blind=self._config.deterministic)
        if self._config.replay is None:  # which has what became of it
            self.buffer.simulate_cache(precision.resident if self.simulates else None)
        if self.prefetcher is not None:
            self.prefetcher.use(precision)

    def begin(self, spans: Mapping[int, Span]) -> None:
        """Before a batch of these sequences: a new text begins with an empty simulated
        cache.
        """
        if self.simulates:
            if any(span.first == 0 for span in spans.values()):
                self.use(self.precision)
            self.followed = max(span.end for span in spans.values())

    def choose_again(self, budget: int) -> None:
        """Within the bound of loss: what was measured with other shares of the experts
        in memory may lose more with this one.
        """
        before = self.selected
        if self._contract is None or before is None or self._config.deterministic:
            return
        selected = self._contract.select(
            before.max_loss, self._share(Budget(budget)), lambda c: c.tier == before.tier
        )
        # all experts are and stay in the tier, for which what was promised with more
        # given up holds
        self.selected = (
            selected if selected.tier == before.tier else replace(before, precision=Precision())
        )
        self.use(self.selected.precision)


def _fitted(config: Config, profile: Profile | None) -> Precision:
    """The precision of the options; where the strategy brings it, with what a
    calibration fitted of it to the model.
    """
    precision, policy = config.precision, config.strategy.policy
    if (
        precision is not config.strategy.precision
        or precision.lossless
        or profile is None
        or policy is None
    ):
        return precision
    for section in policy.sections[1:]:
        with profile.taking(section.name) as arrays:
            if arrays is not None:
                require_arrays(arrays, section.layout)
                fitted: dict[str, Any] = {name: float(arrays[name]) for name in section.layout}
                precision = replace(precision, **fitted)
    return precision
