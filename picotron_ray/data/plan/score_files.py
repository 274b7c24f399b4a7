"""Scores of samples, written beforehand: ``<folder>/<source>/<measure>.npy``, a float64 per sample.

Beside each lies ``<measure>.json`` with the identity of the samples, so that scores of other data are
refused. The source is ``data``, or its name in ``data.sources``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from picotron_ray.errors import DataError

Values = npt.NDArray[np.float64]


def write_scores(folder: Path, source: str, measure: str, identity: str, values: Values) -> Path:
    """Write the scores of a source's samples; returns their path. The JSON goes last."""
    place = folder / source
    place.mkdir(parents=True, exist_ok=True)
    path, fresh = place / f"{measure}.npy", place / f".{measure}.new.npy"
    (place / f"{measure}.json").unlink(missing_ok=True)
    np.save(fresh, np.asarray(values, np.float64))
    os.replace(fresh, path)
    (place / f"{measure}.json").write_text(json.dumps({"identity": identity}) + "\n", "utf-8")
    return path


def read_scores(folder: Path, source: str, measure: str, identity: str, count: int) -> Values:
    """Read the scores of a source's samples. Raises DataError where they are missing or of other samples."""
    path = folder / source / f"{measure}.npy"
    command = f"picotron-ray data score CONFIG --by {measure} --out {folder}"
    try:
        values = np.load(path)
        seen = json.loads(path.with_suffix(".json").read_text("utf-8"))["identity"]
    except FileNotFoundError:
        raise DataError(f"data.curriculum.scores: no {path}; write it by: {command}") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DataError(
            f"data.curriculum.scores: cannot read {path}: {error}; write it by: {command}"
        ) from None
    if seen != identity or values.shape != (count,) or values.dtype != np.float64:
        raise DataError(
            f"data.curriculum.scores: {path} is of other rows than this config's ({len(values)} scores,"
            f" {count} rows); write it anew by: {command}"
        )
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"data.curriculum.scores: {path} has {values[at]} for row {at}, expected numbers")
    return values
