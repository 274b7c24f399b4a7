"""Tasks as samples: a row holds the examples of one task, made anew from the task's number.

A row is 32-bit words: of each example the inputs, then the targets. Token ids stand for themselves. Other
values are the bits of a float32, so what the row says is exactly what a model is given. Digests, the ledger
and the loader treat words as they treat tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from picotron_ray.config.import_path import one_line
from picotron_ray.data.shuffle import Index
from picotron_ray.data.tasks.families import Family
from picotron_ray.errors import DataError

KEY = "meta.tasks"
EXPECTED = "expected (inputs, targets), numpy arrays with an example a row"
MOST_TASKS = 2**31
"""Tasks that are told apart: more than any run feeds."""


@dataclass(frozen=True, slots=True)
class TaskPart:
    """Inputs or targets of one example.

    Fields:
        shape: of one example; () is a number.
        tokens: whether values are token ids; else they are floats.
    """

    shape: tuple[int, ...]
    tokens: bool

    @property
    def words(self) -> int:
        """Words of one example."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> TaskPart:
        """Describe the rows of an array."""
        return cls(values.shape[1:], bool(np.issubdtype(values.dtype, np.integer)))

    def encoded(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return values as words, ``[examples, words]``."""
        flat = np.ascontiguousarray(values).reshape(len(values), -1)
        if self.tokens:
            return flat.astype(np.int64)
        return flat.astype(np.float32).view(np.uint32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TaskShape:
    """Shape of the tasks of a family.

    Fields:
        inputs, targets: of one example.
        support: examples that a model adapts to; the first of a row.
        query: examples by which the adapted model is judged.
    """

    inputs: TaskPart
    targets: TaskPart
    support: int
    query: int

    @property
    def examples(self) -> int:
        """Examples of a task."""
        return self.support + self.query

    @property
    def words(self) -> int:
        """Words of a row."""
        return self.examples * (self.inputs.words + self.targets.words)

    @property
    def values(self) -> int:
        """Targets of a task's query set: what its loss is the mean of."""
        return self.query * self.targets.words


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of a family, each a pure function of the stream's seed and its number.

    Fields:
        make: the family.
        named: the config's word for it, in messages.
        seed: of the stream: equal ones have the same tasks.
        vocabulary: token ids that a model knows.
    """

    make: Family
    named: str
    seed: tuple[int, ...]
    vocabulary: int

    def arrays(self, number: int, examples: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Make the examples of a task. Raises DataError, one line, where the family gives something else."""
        where = f"{KEY}: {self.named}, task {number}"
        try:
            made = self.make(np.random.default_rng([*self.seed, number]), examples)
            inputs, targets = (np.asarray(values) for values in made)
        except Exception as error:
            raise DataError(f"{where}: it raises {one_line(error)}; {EXPECTED}") from error
        for name, values in (("inputs", inputs), ("targets", targets)):
            if (
                values.ndim < 1
                or len(values) != examples
                or values.dtype.kind not in "iuf"
                or not values.size
            ):
                saw = f"saw {name} {list(values.shape)} of {values.dtype}"
                raise DataError(f"{where}: {saw}, expected {examples} rows of numbers")
            whole = values.dtype.kind != "f"
            if whole and (values.min() < 0 or values.max() >= self.vocabulary):
                saw = f"saw the token id {values.min() if values.min() < 0 else values.max()} in its {name}"
                expected = f"expected ids below model.vocab_size={self.vocabulary}"
                raise DataError(f"{where}: {saw}, {expected}; or give floats")
            if not whole and not np.isfinite(values).all():
                raise DataError(f"{where}: saw {name} that are not finite, expected numbers")
        return inputs, targets

    def shape(self, support: int, query: int) -> TaskShape:
        """Look at one task. Raises DataError as `arrays` does."""
        inputs, targets = self.arrays(0, support + query)
        return TaskShape(TaskPart.of(inputs), TaskPart.of(targets), support, query)


@dataclass(frozen=True, slots=True)
class TaskSamples:
    """Tasks as a `SampleSet`: sample ``i`` is task ``i``."""

    tasks: Tasks
    shape: TaskShape
    samples: int = MOST_TASKS

    @property
    def sequence_length(self) -> int:
        """One less than the words of a row."""
        return self.shape.words - 1

    @property
    def mean_tokens(self) -> float:
        """Targets of a task that are judged."""
        return float(self.shape.values)

    @staticmethod
    def first(count: int) -> Index:
        """Number the first ``count`` tasks."""
        return np.arange(count, dtype=np.int64)

    def rows(self, samples: Index) -> npt.NDArray[np.int64]:
        """Words of the given tasks, int64 ``[len(samples), words]``.

        Raises:
            DataError: a task has another shape than the first.
        """
        out = np.empty((len(samples), self.shape.words), np.int64)
        for row, number in enumerate(samples.tolist()):
            inputs, targets = self.tasks.arrays(number, self.shape.examples)
            found = TaskPart.of(inputs), TaskPart.of(targets)
            if found != (self.shape.inputs, self.shape.targets):
                saw = f"saw inputs {list(inputs.shape)} and targets {list(targets.shape)}"
                raise DataError(
                    f"{KEY}: {self.tasks.named}, task {number}: {saw}, other than those of task 0; make all"
                    " tasks of one shape and type"
                )
            parts = [part.encoded(of) for part, of in zip(found, (inputs, targets), strict=True)]
            out[row] = np.concatenate(parts, axis=1).reshape(-1)
        return out

    def counted(self, samples: Index) -> None:
        """Leave it to the strategy."""

    def documents(self, samples: Index) -> None:
        """Have none."""

    def totals(self, samples: Index) -> tuple[int, int | None]:
        """Count the targets that are judged; all do count."""
        return len(samples) * self.shape.values, None


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Order of tasks: row ``i`` of the run is task ``i``.

    >>> TaskPlan(global_batch=4).samples(2, 5).tolist()
    [2, 3, 4]
    """

    global_batch: int

    def numbers(self, step: int) -> tuple[int, int]:
        """Return the half-open range of global row numbers that ``step`` (1-based) feeds."""
        return (step - 1) * self.global_batch, step * self.global_batch

    def samples(self, first: int, last: int) -> Index:
        """Return the tasks in the rows ``first .. last`` (half-open), int64."""
        return np.arange(first, last, dtype=np.int64)
