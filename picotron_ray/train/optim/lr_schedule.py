"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

from picotron_ray.config.schema.optimizer import OptimizerConfig, ScheduleConfig


def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the share of the peak learning rate for update number ``step`` (1-based, of ``steps``).

    Warm-up rises linearly and reaches 1 at step ``warmup_steps``. After it: ``cosine`` falls to
    ``final_ratio`` along half a cosine (Loshchilov & Hutter 2017, SGDR); ``wsd`` stays at 1 and falls
    linearly to ``final_ratio`` over the last ``decay_steps`` (Hu et al. 2024, MiniCPM).
    """
    warmup = min(schedule.warmup_steps, steps)
    if step < warmup:
        return step / warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        shape = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
    else:
        decay = min(schedule.decay_steps, steps - warmup)
        left = steps - step
        shape = 1.0 if left >= decay else left / decay
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * shape


def learning_rate(optimizer: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of update number ``step`` (1-based, of ``steps``)."""
    return optimizer.learning_rate * factor(optimizer.schedule, step, steps)
