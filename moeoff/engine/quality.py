"""`Quality`: the precision of a model's experts, by options or contract, and again when
the budget moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..budget.loss_contract import DEFAULT_RESIDENT, LossContract, SelectedPrecision
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
    """The precision of the experts, within the user's limits.

    Args:
        config: User's configuration.
        profile: Profile, with the contract if there is one.
        resident_share: Share of the experts that fit the budget in full precision.

    Attributes:
        precision: Precision in use.
        selected: Choice of `max_loss`.
        source, low_source: Files of the experts and of their low versions.
        followed: Tokens of the text in the simulated cache.
        buffer: Expert buffer, set before the first `use`.
        prefetcher: Prefetcher that follows the precision, or None.

    Raises:
        OptionError: There is no contract for the bound, or the strategy cannot serve
            it.
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
            # reproducible results cannot depend on memory
            self.selected = self._contract.select(
                config.max_loss,
                DEFAULT_RESIDENT if config.deterministic else resident_share(budget),
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
        """Lower tiers of the sidecar that no option or contract reads."""
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
        """True if decisions use a simulated cache that follows a text."""
        return (
            self._config.deterministic
            and self.precision.resident > 0
            and not self.precision.lossless
        )

    def use(self, precision: Precision) -> None:
        """Set the precision from the next batch on, and reset the simulated cache.

        Raises:
            OptionError: There are no low versions.
        """
        self.precision, self.followed = precision, 0
        self.buffer.set_precision(precision, blind=self._config.deterministic)
        if self._config.replay is None:  # a replay forces the recorded decisions
            self.buffer.simulate_cache(precision.resident if self.simulates else None)
        if self.prefetcher is not None:
            self.prefetcher.use(precision)

    def begin(self, spans: Mapping[int, Span]) -> None:
        """Reset the simulated cache if the batch starts a new sequence."""
        if self.simulates:
            if any(span.first == 0 for span in spans.values()):
                self.use(self.precision)
            self.followed = max(span.end for span in spans.values())

    def choose_again(self, budget: int) -> None:
        """Choose the precision for another resident share, within the bound of loss."""
        before = self.selected
        if self._contract is None or before is None or self._config.deterministic:
            return
        selected = self._contract.select(
            before.max_loss, self._share(Budget(budget)), lambda c: c.tier == before.tier
        )
        # all experts stay in the tier, so the bound holds as measured with a smaller
        # share
        self.selected = (
            selected if selected.tier == before.tier else replace(before, precision=Precision())
        )
        self.use(self.selected.precision)


def _fitted(config: Config, profile: Profile | None) -> Precision:
    """Return the precision of the options, with the strategy's calibrated values."""
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
