"""``data score``: difficulties of rows that a curriculum reads from a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.column_scores import document_values, row_values
from picotron_ray.data.plan.build_plan import source_seeds
from picotron_ray.data.plan.score_files import write_scores
from picotron_ray.data.samples import SampleSet
from picotron_ray.data.source_samples import SourceSamples, alone, open_source, training_borders
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.ray_cluster.names import cache_folder

Scored = Literal["loss", "gradient_norm", "column"]
Say = Callable[[str], None]


def score(
    job: JobConfig, by: str, out: Path, *, run: str | None, step: int | None, key: str | None, say: Say
) -> list[dict[str, Any]]:
    """Score all training rows of each source, and write what `data.plan.score_files` reads.

    Args:
        by: a measure of `config.schema.curriculum.SCORED`.
        run, step: the commit whose model scores; loss and gradient_norm.
        key: of the records' number; column.

    Raises:
        ConfigError: a measure that is none, or one without what it needs.
        DataError: the data cannot be read.
    """
    if by not in ("loss", "gradient_norm", "column"):
        raise ConfigError(f"--by: saw {by}, expected loss, gradient_norm or column")
    if (by == "column") != (key is not None):
        raise ConfigError(f"--key: saw {key} with --by {by}; column needs the key of a number in each record")
    if (by == "column") == (run is not None):
        text = (
            "expected the run whose newest commit scores" if run is None else "which asks no model; drop it"
        )
        raise ConfigError(f"--run: saw {run} with --by {by}, {text}")
    measure = _by_model(job, by, str(run), step, say) if by != "column" else None
    found = []
    for at, own in zip(job.data.named_sources, source_seeds(job.data, job.seed), strict=True):
        source = open_source(at, job.data, job.model.vocab_size, own, cache_folder())
        say(f"{at}: {source.train.samples} rows")
        values = measure(source.train) if measure else _by_column(job, at, source, str(key))
        path = write_scores(out, at.rpartition(".")[2], by, source.identity, values)
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        figures = {"lowest": float(low), "median": float(middle), "highest": float(high)}
        found.append({"source": at, "rows": len(values), **figures, "file": str(path)})
    return found


def _by_model(
    job: JobConfig, by: str, run: str, step: int | None, say: Say
) -> Callable[[SampleSet], npt.NDArray[np.float64]]:
    import torch

    from picotron_ray.runtime.inference.row_scores import row_gradient_norms, row_losses
    from picotron_ray.runtime.inference.stored_model import find_model, load_model

    model = find_model(run, step)
    if model.job.model.vocab_size < job.model.vocab_size:
        raise ConfigError(
            f"--run: saw a model of {model.job.model.vocab_size} token ids, expected at least"
            f" model.vocab_size={job.model.vocab_size}"
        )
    if model.positions < job.data.sequence_length and model.job.model.max_positions:
        raise ConfigError(
            f"--run: saw a model of {model.positions} positions, expected at least"
            f" data.sequence_length={job.data.sequence_length}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = load_model(model, device)
    ways = {"loss": row_losses, "gradient_norm": row_gradient_norms}
    return lambda samples: ways[by](module, samples, device, say)


def _by_column(job: JobConfig, at: str, source: SourceSamples, key: str) -> npt.NDArray[np.float64]:
    own = alone(at, job.data)
    borders = training_borders(own, job.model.vocab_size, cache_folder())
    return row_values(source.train, document_values(own, key), borders)
