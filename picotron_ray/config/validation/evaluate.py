"""Rules of evaluation: names of sets, and the figure that the best commit is chosen by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.evaluation import MOST_SETS, figures, judged_interval, set_names


def _sets(job: JobConfig) -> Iterator[Problem]:
    names = set_names(job)
    touches = ("data.sources", "evaluate.source_samples")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        text = f"saw the name {twice[0]} twice, also counting data.sources; give each set a name of its own"
        yield Problem("evaluate.sets", text, touches)
    if len(names) > MOST_SETS:
        text = f"saw {len(names)} sets, with the sources of data, expected at most {MOST_SETS}"
        yield Problem("evaluate.sets", f"{text}; leave some out, or say evaluate.source_samples=0", touches)
    if job.evaluate.source_samples and not job.data.sources:
        text = f"saw {job.evaluate.source_samples} without data.sources, whose parts it is of; drop it"
        yield Problem("evaluate.source_samples", text, ("data.sources",))
    for at, source in job.evaluate.named_sources.items():
        if source.loss_mask and not job.data.leaves_out:
            text = "saw true, but no source of data has a mask, and the loss counts all tokens; drop it"
            yield Problem(f"{at}.loss_mask", text, ("data.loss_mask", "data.sources"))


def _keep_best(job: JobConfig) -> Iterator[Problem]:
    metric, key = job.checkpoint.keep_best, "checkpoint.keep_best"
    if metric is None:
        return
    if metric not in figures(job):
        text = f"saw {metric}, expected one of {', '.join(figures(job))}"
        yield Problem(key, text, ("evaluate.sets", "evaluate.source_samples", "data.sources"))
    if judged_interval(job) > job.steps:
        every, between = job.checkpoint.interval_steps, job.evaluate.interval_steps
        text = (
            f"saw {metric}, but no commit before the last is evaluated: checkpoint.interval_steps={every} and"
            f" evaluate.interval_steps={between} first meet at step {judged_interval(job)} of {job.steps};"
            " make one a multiple of the other"
        )
        yield Problem(key, text, ("checkpoint.interval_steps", "evaluate.interval_steps", "steps"))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (_sets, _keep_best)
