"""Layouts for the comparison with one process: made of every dimension, not written down by hand.

``CASES`` holds a few hundred of all that fit 8 processes, ``PAIRS`` few enough for every run, yet with every
two values of different dimensions that 4 processes allow together in one of them (pairwise testing),
``LISTED`` some with a pipeline schedule given as a list of actions, and ``REFUSED`` what the config's rules
keep from running, with the reason.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from typing import Any, get_args

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.layout.layout import ContextVariant, Layout
from picotron_ray.layout.schedules import SCHEDULES
from tests.support.gloo.action_lists import NEIGHBOURS, ONE_F_ONE_B, V_SPLIT, Rows, layout_of, made
from tests.support.gloo.parallel_jobs.matrix_jobs import MODEL, make_job

PROCESSES = 8
FEW = 4
COUNT = 286
LARGE = 8  # of them on all PROCESSES, which take longest
LISTS = 16
LISTED_PROCESSES = 6
RECOMPUTE = ("none", "full", "none", "every-2", "none", "none", "selective")
MIXTURE = {"experts": 4, "intermediate_size": 12}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {},
    "loss": {**MIXTURE, "loss_coefficient": 0.5, "z_coefficient": 0.1, "shared_intermediate_size": 8},
    "bias": {
        **MIXTURE,
        "router": "sigmoid",
        "balance": "bias",
        "bias_rate": 0.02,
        "capacity_factor": 0.9,
        "normalize": False,
    },
    "sinks": {**MIXTURE, "loss_coefficient": 0.5},
}
SINKS = {"family": "gpt_oss", "sliding_window": 3, "full_attention_every": 2}


@functools.cache
def model_of(kind: str, layers: int) -> ModelConfig:
    changes = {"layers": layers, "moe": MODELS[kind], "tie_embeddings": kind == "tied"}
    return ModelConfig(**{**MODEL.model_dump(), **changes, **(SINKS if kind == "sinks" else {})})


job_of = functools.cache(make_job)


@dataclass(frozen=True)
class Case:
    """A layout, the model that it cuts, and the rows of a step."""

    layout: Layout
    kind: str
    batch: int
    actions: Rows = ()

    @property
    def model(self) -> ModelConfig:
        """Few layers, because time goes into collectives; one more than stages: an uneven cut."""
        return model_of(self.kind, 2 if self.layout.pp == 1 else self.layout.stages + 1)

    @property
    def problem(self) -> str:
        """The first rule that it breaks, or empty."""
        return self.problem_in(self.model)

    def problem_in(self, model: ModelConfig) -> str:
        """The first rule that it breaks with another model, or empty."""
        found = layout_problems(job_of("sgd", self.batch, model, self.actions), self.layout)
        return f"{found[0].key}: {found[0].text}" if found else ""

    @property
    def values(self) -> tuple[tuple[str, object], ...]:
        """Its value in each dimension; None where the dimension says nothing."""
        layout = self.layout
        return (
            ("model", self.kind),
            *((name, getattr(layout, name)) for name in ("dp", "tp", "pp", "cp", "ep", "zero")),
            ("replicate", layout.replicate if layout.zero else None),
            ("schedule", layout.schedule if layout.pp > 1 else None),
            ("context", layout.context if layout.cp > 1 else None),
        )

    def __str__(self) -> str:
        return f"{self.layout}-{self.kind}-{self.batch}"


def products() -> Iterator[Case]:
    """Every combination on up to ``PROCESSES`` ranks, of those that name each thing once."""
    schedules = [
        (name, virtual)
        for name, entry in SCHEDULES.items()
        if entry.with_actions is None
        for virtual in range(entry.stages_per_rank[0], min(entry.stages_per_rank[1], 2) + 1)
    ]
    recompute = cycle(RECOMPUTE)
    for dp, tp, pp, cp in product((1, 2, 3, 4), (1, 2), (1, 2, 4), (1, 2)):
        if not 1 < dp * tp * pp * cp <= PROCESSES:
            continue
        for (schedule, virtual), context, ep, (zero, copies), kind in product(
            schedules if pp > 1 else [("1f1b", 1)],
            get_args(ContextVariant) if cp > 1 else ("ring",),
            (1, 2, 4),
            [(0, 1), *product((1, 2, 3), (1, 2) if dp * cp > 2 else (1,))] if dp * cp > 1 else [(0, 1)],
            MODELS,
        ):
            layout = Layout(
                dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, replicate=copies, schedule=schedule,
                virtual_stages=virtual, context=context,
                recompute="none" if SCHEDULES[schedule].splits_backward else next(recompute),
            )  # fmt: skip
            yield fewest_micro_batches(layout, kind, 7 if (dp + cp + ep + zero) % 2 else 8)


def fewest_micro_batches(layout: Layout, kind: str, batch: int) -> Case:
    """With the largest micro-batches that fit, at least two of them, four in a pipeline; else of one row."""
    least = 4 if layout.pp > 1 else 2
    for rows in range(-(-batch // (least * layout.dp)), 1, -1):
        case = Case(replace(layout, micro_batch=rows), kind, batch)
        if case.layout.micro_batches(batch) >= least and not case.problem:
            return case
    return Case(layout, kind, batch)


def listed() -> list[Case]:
    """``LISTS`` cases drawn from all lists of actions in every combination of the other dimensions."""
    lists = [ONE_F_ONE_B, V_SPLIT, NEIGHBOURS]
    for placement in (((0, 2), (1, 3)), ((1, 2), (0, 3)), ((2,), (0,), (1,)), ((0, 3, 4), (5, 1, 2))):
        lists += [made(placement, micro_batches, split) for micro_batches, split in ((2, True), (4, False))]
    every = list(product(lists, (1, 2), (1, 2), (1, 2), (1, 2), (0, 1, 2, 3), MODELS, (7, 12)))
    random.Random(1).shuffle(every)
    cases: list[Case] = []
    for rows, dp, tp, cp, ep, zero, kind, batch in every:
        case = Case(layout_of(rows, batch, dp=dp, tp=tp, cp=cp, ep=ep, zero=zero), kind, batch, rows)
        if case.layout.world_size <= LISTED_PROCESSES and not (zero and dp * cp == 1) and not case.problem:
            cases.append(case)
        if len(cases) == LISTS:
            break
    return cases


def judged() -> tuple[list[Case], list[tuple[Case, str]]]:
    """What fits, and what does not with the first reason."""
    fitting, refused = [], []
    for case in products():
        reason = case.problem
        if reason:
            refused.append((case, reason))
        else:
            fitting.append(case)
    return fitting, refused


def pairs(case: Case) -> set[tuple[object, ...]]:
    """The pairs of values of different dimensions that a case has."""
    return set(combinations([value for value in case.values if value[1] is not None], 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """Few cases that have every pair which any has: greedily, those of fewer processes first."""
    found = {case: pairs(case) for case in cases}
    left = set().union(*found.values())
    chosen = []
    while left:
        best = max(found, key=lambda case: len(found[case] & left) / (6 + case.layout.world_size))
        left -= found.pop(best)
        chosen.append(best)
    return chosen


FITTING, REFUSED = judged()
_DRAW = random.Random(0)
# drawn with weights of 1 / processes squared: most small, some of every size
_SHUFFLED = sorted(FITTING, key=lambda case: -(_DRAW.random() ** (case.layout.world_size**2)))
PAIRS = covering([case for case in _SHUFFLED if case.layout.world_size <= FEW and case.layout.dp < FEW])
LISTED = listed()
_REST = [case for case in _SHUFFLED if case not in PAIRS]
_WHOLE = [case for case in _REST if case.layout.world_size == PROCESSES]
CASES = [*PAIRS, *_WHOLE[:LARGE], *[case for case in _REST if case not in _WHOLE]][:COUNT]
