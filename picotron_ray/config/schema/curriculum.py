"""Config of a curriculum: which share of the rows is fed when, the easiest ones first."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section

Measure = Literal["length", "rarity", "loss", "gradient_norm", "column"]
"""Measure of a row's difficulty."""
SCORED: tuple[Measure, ...] = ("loss", "gradient_norm", "column")
"""Measures that ``picotron-ray data score`` writes beforehand."""


class StageConfig(Section):
    """Stage of a curriculum.

    Example::

        data:
          curriculum:
            stages:
              - {name: basic, difficulty: 0.1, steps: 1000}
              - {name: advanced, difficulty: 1.0, steps: 3000}
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="of the stage, in logs and messages")
    difficulty: float = Field(
        default=1.0, gt=0, le=1, description="share of the rows that are fed, the easiest ones; 1: all"
    )
    steps: int = Field(ge=1, description="steps of it; under advance=auto its most")
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="rows are read as pieces of so many tokens that do not see each other, each from position"
        " 0: a step has as many tokens as ever; null: data.sequence_length",
    )
    filter: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        description="only rows that a function of yours keeps: import path package.module:function of"
        " (tokens, documents) -> bool, given a row's tokens and the number of each input's document (or"
        " null); it must say the same of a row each time",
    )


class CurriculumConfig(Section):
    """Curriculum. Rows are ranked once by their difficulty; a stage feeds its share of them, shuffled.

    The last stage goes on to the end of the run.

    Example::

        data:
          curriculum:
            difficulty: combined
            combined: [[rarity, 2.0], [length, 1.0]]
            advance: auto
            stages:
              - {name: basic, difficulty: 0.1, steps: 1000}
              - {name: intermediate, difficulty: 0.5, steps: 2000}
              - {name: advanced, difficulty: 1.0, steps: 3000}
    """

    stages: tuple[StageConfig, ...] = Field(default=(), description="in their order; none: no curriculum")
    difficulty: Literal[Measure, "combined"] = Field(
        default="rarity",
        description="length: mean length of a row's documents; rarity: mean -log of its tokens' frequency in"
        " the source; loss, gradient_norm, column: what picotron-ray data score wrote; combined: the weighted"
        " mean of ranks by several",
    )
    combined: tuple[tuple[Measure, float], ...] = Field(
        default=(), description="combined: measures, and the weight of each"
    )
    scores: str | None = Field(
        default=None, description="folder that picotron-ray data score wrote, for measures that need one"
    )
    advance: Literal["steps", "auto"] = Field(
        default="steps",
        description="steps: a stage lasts its steps; auto: it ends before, once performance and adaptation"
        " lie above their thresholds",
    )
    performance: float = Field(
        default=0.8,
        gt=0,
        lt=1,
        description="auto: 1 - loss / ln(model.vocab_size), of the newest window, that a stage must reach",
    )
    adaptation: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="auto: share of the stage's fall of the loss that came before the newest window, that it"
        " must reach",
    )
    window_steps: int = Field(
        default=50, ge=1, description="auto: steps whose mean loss is looked at, and how often"
    )

    @property
    def measures(self) -> dict[Measure, float]:
        """Weight by measure, of those that rank the rows."""
        return dict(self.combined) if self.difficulty == "combined" else {self.difficulty: 1.0}

    @property
    def ranks(self) -> bool:
        """Whether rows need ranks: some stage feeds only a share of them."""
        return any(stage.difficulty < 1 for stage in self.stages)

    def widths(self, sequence_length: int) -> tuple[int, ...]:
        """Return the tokens of a piece in each stage; nothing where rows are whole in all of them."""
        if not self.stages:
            return ()
        found = tuple(stage.sequence_length or sequence_length for stage in self.stages)
        return found if any(width != sequence_length for width in found) else ()
