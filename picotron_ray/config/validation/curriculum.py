"""Rules of curricula: stages that grow, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.curriculum import SCORED, CurriculumConfig, StageConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.curriculum import LEAD

KEY = "data.curriculum"
STAGES, COMBINED, SCORES = f"{KEY}.stages", f"{KEY}.combined", f"{KEY}.scores"


def _stages(job: JobConfig) -> Iterator[Problem]:
    curriculum, own = job.data.curriculum, CurriculumConfig()
    if not curriculum.stages:
        for name in CurriculumConfig.model_fields:
            if getattr(curriculum, name) != getattr(own, name):
                text = (
                    f"saw {getattr(curriculum, name)!r} without {STAGES}, where all rows are alike; drop it"
                )
                yield Problem(f"{KEY}.{name}", text, (STAGES,))
        return
    names = [stage.name for stage in curriculum.stages]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Problem(STAGES, f"saw the name {twice[0]} twice, expected each once", ())
    for one, following in pairwise(curriculum.stages):
        if following.difficulty < one.difficulty:
            seen = f"{following.difficulty:g} of {following.name} after {one.difficulty:g} of {one.name}"
            yield Problem(STAGES, f"saw difficulty {seen}, expected stages that do not become easier", ())
        elif _fed(one) == _fed(following) and one.name != following.name:
            text = f"saw {following.name} feed the same rows as {one.name}, expected another difficulty,"
            yield Problem(STAGES, f"{text} sequence_length or filter; or make them one stage", ())
    for source in job.data.sources:
        if not source.repeat:
            text = "saw false with data.curriculum, whose stages feed rows again; drop it"
            yield Problem(f"data.sources.{source.name}.repeat", text, (STAGES,))


def _fed(stage: StageConfig) -> tuple[float, int | None, str | None]:
    """Return what decides the rows of a stage."""
    return stage.difficulty, stage.sequence_length, stage.filter


def _pieces(job: JobConfig) -> Iterator[Problem]:
    data = job.data
    for stage in data.curriculum.stages:
        width = stage.sequence_length
        if width is not None and width > data.sequence_length:
            text = f"saw {width}, expected at most data.sequence_length={data.sequence_length}"
            yield Problem(f"{STAGES}.{stage.name}.sequence_length", text, ("data.sequence_length",))
    if data.document_masks and data.curriculum.widths(data.sequence_length):
        text = "saw true with stages that read rows as pieces; say data.batching=packed, or drop one of them"
        yield Problem("data.document_masks", text, (STAGES,))


def _measures(job: JobConfig) -> Iterator[Problem]:
    curriculum = job.data.curriculum
    measures = [name for name, _ in curriculum.combined]
    if curriculum.difficulty == "combined" and not curriculum.combined:
        text = "saw nothing, expected [[measure, weight], ...] for difficulty=combined"
        yield Problem(COMBINED, text, (f"{KEY}.difficulty",))
    if curriculum.combined and curriculum.difficulty != "combined":
        text = f"saw measures with difficulty={curriculum.difficulty}; say difficulty=combined, or drop them"
        yield Problem(COMBINED, text, (f"{KEY}.difficulty",))
    if twice := sorted({name for name in measures if measures.count(name) > 1}):
        yield Problem(COMBINED, f"saw {twice[0]} twice, expected each once", ())
    for name, weight in curriculum.combined:
        if weight <= 0:
            yield Problem(COMBINED, f"saw weight {weight:g} of {name}, expected more than 0", ())
    asked = sorted(set(curriculum.measures) & set(SCORED)) if curriculum.ranks else []
    if asked and curriculum.scores is None:
        command = f"picotron-ray data score CONFIG --by {asked[0]} --out FOLDER"
        text = f"saw nothing with difficulty by {asked[0]}, expected the folder that this wrote: {command}"
        yield Problem(SCORES, text, (f"{KEY}.difficulty", COMBINED))
    if curriculum.stages and curriculum.scores is not None and not asked:
        text = f"saw {curriculum.scores} with measures that need none; drop it"
        yield Problem(SCORES, text, (f"{KEY}.difficulty", COMBINED))


def _advance(job: JobConfig) -> Iterator[Problem]:
    if job.data.curriculum.advance == "auto" and job.data.prefetch_steps >= LEAD:
        text = f"saw {job.data.prefetch_steps} with {KEY}.advance=auto, expected at most {LEAD - 1}: a stage"
        text += f" begins {LEAD} steps after the one that decides it"
        yield Problem("data.prefetch_steps", text, (f"{KEY}.advance",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_stages, _pieces, _measures, _advance)
