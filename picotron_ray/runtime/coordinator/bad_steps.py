"""Lines on steps whose updates were left out: the first of a generation, then ever fewer, with counts."""

from __future__ import annotations

from typing import Any

from picotron_ray.data.batch import samples_of


class BadSteps:
    """Count of a generation's bad steps, as far as it was told."""

    def __init__(self) -> None:
        self._told = 0

    def line(self, page: dict[str, Any], global_batch: int) -> str:
        """Return the line on a page's newest bad step; "" until there are twice as many as were told."""
        step, count = page["skipped_step"], page["bad_steps"]
        told = self._told if count > self._told else 0  # else a later generation counts anew
        if told and count < 2 * told:
            return ""
        self._told = count
        others = f", as those of {count - 1} others in this generation" if count > 1 else ""
        return f"step {step} ({samples_of(step, global_batch)}) was bad: its update was left out{others}"
