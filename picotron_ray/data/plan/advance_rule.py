"""Rule by which a curriculum advances by what the run has learned.

After each ``window_steps`` losses of a stage, from the second window on, with the mean losses ``first`` of
its first window, ``before`` of the window before the newest one and ``now`` of the newest one:

- performance = 1 - now / ln(vocabulary): 0 as good as guessing, 1 certain of each token;
- adaptation = 1 - max(0, before - now) / (first - now): the share of the stage's fall of the loss that had
  come before the newest window; 1 where the loss did not fall.

The stage ends where both lie above their thresholds, or where it has had its steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from picotron_ray.config.schema.curriculum import CurriculumConfig

Starts = tuple[int, ...]
"""Steps before each stage of a curriculum that has begun, ascending from 0."""


@dataclass(frozen=True, slots=True)
class AdvanceRule:
    """Rule by which stages end.

    Fields:
        names: of the stages.
        steps: most steps of each stage.
        vocabulary: token ids there are.
        performance, adaptation: thresholds.
        window: steps of a window.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    vocabulary: int
    performance: float
    adaptation: float
    window: int

    @classmethod
    def of(cls, curriculum: CurriculumConfig, vocabulary: int) -> AdvanceRule:
        """Take the rule of a config."""
        stages = curriculum.stages
        names, steps = (stage.name for stage in stages), (stage.steps for stage in stages)
        bounds = curriculum.performance, curriculum.adaptation
        return cls(tuple(names), tuple(steps), vocabulary, *bounds, curriculum.window_steps)

    def figures(self, means: Sequence[float]) -> tuple[float, float]:
        """Return performance and adaptation by a stage's mean losses: first, next to newest and newest."""
        first, before, now = means
        fall = first - now
        settled = 1 - max(0.0, before - now) / fall if fall > 0 else 1.0
        return 1 - now / math.log(self.vocabulary), settled

    def ends(self, means: Sequence[float]) -> bool:
        """Whether a stage of these mean losses has been learned."""
        performance, adaptation = self.figures(means)
        return performance > self.performance and adaptation > self.adaptation
