"""Curriculum: rows by stages, each of which feeds the easiest share of the samples, shuffled.

Ranks are made once (`data.plan.difficulty`). A stage's pool is the beginning of the ranked samples, or of
those that its filter keeps, and its rows walk through permutations of the pool (the discrete competence of
Platanios et al. 2019, "Competence-based Curriculum Learning for Neural Machine Translation"). Where stages
begin is a few numbers, known beforehand or decided by the run (`data.plan.advance`). So any row is found
without the rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from picotron_ray.config.schema.curriculum import CurriculumConfig
from picotron_ray.data.plan.advance_rule import Starts
from picotron_ray.data.shuffle import Index, samples_between

CURRICULUM_VERSION = 3
"""Version of the order: changing anything here changes every run of the same seed."""


def planned_starts(curriculum: CurriculumConfig) -> Starts:
    """Return the starts of stages that last their steps."""
    return (0, *accumulate(stage.steps for stage in curriculum.stages[:-1]))


@dataclass(frozen=True, slots=True, eq=False)
class StagedOrder:
    """Order of one source's samples under a curriculum.

    Fields:
        seed: of the permutations.
        count: samples of the source.
        pools: samples of each stage, int64.
        firsts: the source's row with which each stage begins that has begun, ascending from 0.
    """

    seed: int
    count: int
    pools: tuple[Index, ...]
    firsts: tuple[int, ...]

    def samples(self, first: int, last: int) -> Index:
        """Return the samples in the source's rows ``first .. last`` (half-open), int64."""
        parts = [np.empty(0, np.int64)]
        while first < last:
            stage = int(np.searchsorted(self.firsts, first, side="right")) - 1
            begun, later = self.firsts[stage], self.firsts[stage + 1 : stage + 2]
            stop = min(last, *later) if later else last
            places = samples_between(self._seed(stage), first - begun, stop - begun, len(self.pools[stage]))
            parts.append(np.asarray(self.pools[stage][places], np.int64))
            first = stop
        return np.concatenate(parts)

    def _seed(self, stage: int) -> int:
        return int(np.random.SeedSequence((self.seed, stage)).generate_state(1, np.uint64)[0]) >> 1
