"""The schedules of one stage per pipeline rank, as lists of actions. Torch-free."""

from __future__ import annotations

from picotron_ray.config.actions import Action, Rows


def one_stage_rows(schedule: str, pp: int, micro_batches: int) -> Rows:
    """What every rank computes, in order.

    Args:
        schedule: ``afab``, all forward and then all backward passes (Huang et al. 2019, GPipe); or ``1f1b``
            (Narayanan et al. 2021, PipeDream-Flush): as many forward passes ahead as there are stages behind,
            then one of each in turn.
    """
    return tuple(
        _row(stage, micro_batches if schedule == "afab" else pp - 1 - stage, micro_batches)
        for stage in range(pp)
    )


def _row(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ahead, micro_batches)
    row = [Action(stage, "F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            row.append(Action(stage, "F", ahead + number))
        row.append(Action(stage, "B", number))
    return tuple(row)
