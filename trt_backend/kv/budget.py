"""The device pages of a deployment, counted by what they are used for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Use(IntEnum):
    """What a device page is held for. Their counts always add up to the capacity."""

    FREE = 0
    REQUIRED = 1
    """Hot caches, tails, pages being imported, and pages that have no other copy and can't be lent."""
    OPTIONAL = 2
    """Imported history that stays only because there is room."""
    IN_TRANSIT = 3
    """On its way back to free: no longer counted on by its session, not yet safe to hand out."""


@dataclass(slots=True)
class Budget:
    """Counts of device pages by use. `PageTable` moves them; `check` holds invariant 1 of the memory model."""

    capacity: int
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [self.capacity, 0, 0, 0]

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return self.counts[Use.FREE]

    def move(self, pages: int, before: Use, after: Use) -> None:
        """Count `pages` pages under `after` instead of `before`.

        Raises:
            ValueError: fewer pages than that are counted under `before`.
        """
        if pages > self.counts[before]:
            raise ValueError(f"{pages} pages can't leave {before.name}: it counts {self.counts[before]}")
        self.counts[before] -= pages
        self.counts[after] += pages

    def check(self) -> None:
        """Assert that every page is counted exactly once."""
        assert sum(self.counts) == self.capacity, (self.counts, self.capacity)
        assert min(self.counts) >= 0, self.counts
