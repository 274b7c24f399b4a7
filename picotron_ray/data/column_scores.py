"""Scores of rows by a number in each record of jsonl: the mean over a row's tokens."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.cache import TextSource
from picotron_ray.data.jsonl_record import record_of
from picotron_ray.data.listing import find_files
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.rows import rows_of
from picotron_ray.data.samples import PADDING, SampleSet
from picotron_ray.data.split_writer import held_out
from picotron_ray.errors import DataError

Values = npt.NDArray[np.float64]


def document_values(data: DataConfig, key: str) -> Values:
    """Read the number of each training document, in their order.

    Args:
        data: of one source of jsonl.

    Raises DataError for another source, and by file and line for a record without a finite number there.
    """
    if data.source != "jsonl":
        raise DataError(
            f"--by column: saw data.source={data.source}, expected jsonl, whose records have keys"
        )
    chat, found = TextSource.of(data).chat, []
    for file in find_files(data):
        for row, place in rows_of(file, data):
            value = row.get(key)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise DataError(f"{place}: saw {value!r} for {key}, expected a number")
            if not held_out(record_of(row, place, data, chat).text, data.held_out_fraction):
                found.append(float(value))
    return np.array(found)


def row_values(samples: SampleSet, values: Values, borders: npt.NDArray[np.int64]) -> Values:
    """Return the mean value of the documents of each sample's inputs, padding left out.

    Args:
        values: of the training documents.
        borders: first token of each document in the stream, and the stream's end.
    """
    if len(borders) != len(values) + 1:
        raise DataError(f"--by column: saw {len(values)} records for {len(borders) - 1} documents of tokens")
    found = np.empty(samples.samples)
    for sample in range(samples.samples):
        if isinstance(samples, PackedSamples):
            places = samples.places(sample)[:-1]
            places = places[places != PADDING]
        else:
            places = np.arange(samples.sequence_length) + sample * samples.sequence_length
        found[sample] = values[np.searchsorted(borders, places, side="right") - 1].mean()
    return found
