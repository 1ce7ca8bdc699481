"""Which steps a loop inspects, for frameworks without a `Lens`: all but PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from preamp.cli.lab import LOOK_EVERY
from preamp.record.snapshots import Snapshot


@dataclass
class Lens:
    """Inspects the steps that `preamp.torch.Lens` inspects: one of `every`, and the one after a skip.

    Attributes:
        every: steps from one snapshot to the next, beginning with the first.
        on_snapshot: called with every `Snapshot`; None to take none.
    """

    every: int = LOOK_EVERY
    on_snapshot: Callable[[Snapshot], object] | None = None
    _streak: bool = field(default=False, init=False, repr=False)

    def is_due(self, index: int, *, after_skip: bool) -> bool:
        """Return whether to inspect a step. Of several skips in a row, the first one counts.

        Args:
            index: the number of the step. To be asked about each, in their order.
            after_skip: whether the step before was skipped.
        """
        before, self._streak = self._streak, after_skip
        return self.on_snapshot is not None and (index % self.every == 0 or (after_skip and not before))

    def show(self, snapshots: Iterable[Snapshot]) -> None:
        """Pass on the snapshots of a step."""
        for snapshot in snapshots:
            if self.on_snapshot is not None:
                self.on_snapshot(snapshot)
