"""Families of tasks: functions that make the examples of one task from a generator of random numbers.

A family is a function ``(generator, examples) -> (inputs, targets)``: arrays of ``examples`` rows. Inputs and
targets are float, or integers that are token ids. It must use no other source of randomness: a task is known
by the generator's seed alone. `sinusoids` and `sequences` are ours; users bring others by import path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.config.schema.meta import SEQUENCES, SINUSOIDS

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Family = Callable[[np.random.Generator, int], Arrays]
AMPLITUDES, PHASES, POINTS = (0.1, 5.0), (0.0, np.pi), (-5.0, 5.0)
"""Ranges of Finn et al. 2017, section 5.1."""


def sinusoids(generator: np.random.Generator, examples: int) -> Arrays:
    """Make points of one wave, y = a sin(x - p): float64 ``[examples, 1]`` each."""
    amplitude, phase = generator.uniform(*AMPLITUDES), generator.uniform(*PHASES)
    x = generator.uniform(*POINTS, (examples, 1))
    return x, amplitude * np.sin(x - phase)


def sequences(generator: np.random.Generator, examples: int, *, vocabulary: int, length: int) -> Arrays:
    """Make sequences of one rule from random beginnings: int64 ``[examples, length]`` each.

    A task's rule is one of three kinds, with constants of its own, all modulo the vocabulary: ``t + a``;
    ``t + a`` and ``t + b`` in turn; ``a - t`` and ``t + b`` in turn.
    """
    kind, a, b = generator.integers(3), *generator.integers(1, vocabulary, 2)
    rows = np.empty((examples, length + 1), np.int64)
    rows[:, 0] = generator.integers(vocabulary, size=examples)
    for at in range(length):
        last = rows[:, at]
        if at % 2 and kind:
            rows[:, at + 1] = (last + b) % vocabulary
        else:
            rows[:, at + 1] = (a - last if kind == 2 else last + a) % vocabulary
    return rows[:, :-1], rows[:, 1:]


def own_family(tasks: str, vocabulary: int, length: int) -> Family | None:
    """Return one of our families by its name; None: it is not ours.

    Args:
        vocabulary: token ids that the model knows.
        length: predicted tokens of a sequence.
    """
    if tasks == SINUSOIDS:
        return sinusoids
    return partial(sequences, vocabulary=vocabulary, length=length) if tasks == SEQUENCES else None
