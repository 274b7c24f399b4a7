"""Looks at one step of a run that goes on: ranks that differ, and races. Heavy imports are inside."""

from __future__ import annotations

import sys
from functools import partial

from picotron_ray.commands.output import emit
from picotron_ray.commands.run import Run
from picotron_ray.launch import AsJson, reported


def inconsistency(run: Run, as_json: AsJson = False) -> None:
    """Find the first place where ranks differ that must be alike: weights, gradients, activations by layer.

    All ranks stop for a moment at the end of a step. What was found does not change the run.

    Example: picotron-ray debug inconsistency quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import comparisons

        found = comparisons.inconsistency(run, partial(print, file=sys.stderr, flush=True))
        emit(found) if as_json else print("\n".join(comparisons.inconsistency_lines(found)))


def race(run: Run, as_json: AsJson = False) -> None:
    """Find races in one step: passes that do not repeat themselves, gradients written while they are summed.

    Each rank runs the same passes twice at the end of a step, which it does not change. That takes memory for
    one more copy of the gradients.

    Example: picotron-ray debug race quickstart
    """
    with reported(as_json):
        from picotron_ray.runtime.driver import comparisons

        found = comparisons.race(run, partial(print, file=sys.stderr, flush=True))
        emit(found) if as_json else print("\n".join(comparisons.race_lines(found)))
