"""The cost model against published runs: every row, one efficiency per source, and what the errors are.

A source's efficiency is one factor of all rates. Of Megatron (Korthikanti et al. 2022) each row is predicted
with the efficiency of the others; of any other source all rows with that of its first row without a doubt,
or of the median one where every row carries a doubt. Errors are of seconds per step. Rows that carry a
doubt, and sources that state no whole layouts, are predicted and printed, and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from picotron_ray.planner.published.runs import PublishedRun, published_runs
from picotron_ray.planner.published.sources import SOURCES

MEGATRON = "Korthikanti et al. 2022"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One published figure beside the model's, in the unit of the source.

    Fields:
        predicted: None where the source states too little.
        error: of the predicted seconds per step, as a share of the published ones; None likewise.
        plain_error: the same without the source's efficiency, as a plan for other clusters is made.
        role: ``judged``, ``fitted`` (it set the efficiency), ``doubt`` or ``incomplete``.
    """

    run: PublishedRun
    predicted: float | None
    error: float | None
    plain_error: float | None
    role: str

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, with the names that scripts rely on."""
        run = self.run
        return {
            "source": run.source,
            "where": run.where,
            "model": run.name,
            "hardware": run.hardware,
            "gpus": run.gpus or None,
            "layout": str(run.layout) if run.layout else None,
            "unit": run.unit,
            "published": run.figure,
            "predicted": self.predicted,
            "error": self.error,
            "plain_error": self.plain_error,
            "role": self.role,
            "doubt": run.doubt,
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """All predictions, and the figures by which the model is judged."""

    predictions: tuple[Prediction, ...]
    megatron_held_out_mape: float
    others_mape: float
    """mean over the sources of each one's mean absolute error, so that no source outweighs the rest"""
    others_worst: float
    least_rank_correlation: float
    """of the sources with judged rows, three rows at least; how a source's own rows are ordered"""
    by_source: dict[str, dict[str, float | int | None]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [prediction.to_dict() for prediction in self.predictions],
            "megatron_held_out_mape": self.megatron_held_out_mape,
            "others_mape": self.others_mape,
            "others_worst": self.others_worst,
            "least_rank_correlation": self.least_rank_correlation,
            "sources": self.by_source,
        }


def validate() -> Validation:
    """Predict every published run that the package carries."""
    runs = published_runs()
    found = [one for source in SOURCES for one in _of_source([run for run in runs if run.source == source])]
    by_source = {source: _summary([one for one in found if one.run.source == source]) for source in SOURCES}
    judged = [one for one in found if one.role == "judged" and one.error is not None]
    others = [one for one in judged if one.run.source != MEGATRON]
    means = [_mape([one for one in others if one.run.source == name]) for name in _names(others)]
    return Validation(
        predictions=tuple(found),
        megatron_held_out_mape=_mape([one for one in judged if one.run.source == MEGATRON]),
        others_mape=sum(means) / len(means),
        others_worst=max(abs(one.error or 0.0) for one in others),
        least_rank_correlation=min(
            correlation
            for name in _names(judged)
            if (correlation := by_source[name]["rank_correlation"]) is not None
        ),
        by_source=by_source,
    )


def _names(predictions: Sequence[Prediction]) -> list[str]:
    return list(dict.fromkeys(one.run.source for one in predictions))


def _of_source(runs: Sequence[PublishedRun]) -> list[Prediction]:
    known = [run for run in runs if run.job is not None and run.layout is not None and run.gpus]
    ratios = {id(run): run.predict().total_s / run.published_s() for run in known}
    sure = [run for run in known if not run.doubt]
    sure = sure or sorted(known, key=lambda run: ratios[id(run)])[(len(known) - 1) // 2 :]
    complete = [run for run in sure if run.complete]
    found = []
    for run in runs:
        if id(run) not in ratios:
            found.append(Prediction(run, None, None, None, "incomplete"))
            continue
        if run.source == MEGATRON:
            rest = [ratios[id(other)] for other in sure if other is not run]
            efficiency = math.exp(sum(map(math.log, rest)) / len(rest))
        else:
            efficiency = ratios[id(sure[0])]
        error = ratios[id(run)] / efficiency - 1
        predicted, role = run.as_published((1 + error) * run.published_s()), _role(run, complete, sure[0])
        found.append(Prediction(run, predicted, error, ratios[id(run)] - 1, role))
    return found


def _role(run: PublishedRun, complete: Sequence[PublishedRun], first: PublishedRun) -> str:
    if run.doubt:
        return "doubt"
    if run not in complete:
        return "incomplete"
    return "fitted" if run is first and run.source != MEGATRON else "judged"


def _summary(predictions: Sequence[Prediction]) -> dict[str, float | int | None]:
    """Figures of one source: over its judged rows, or over all that can be predicted where there is none."""
    rows = [one for one in predictions if one.error is not None]
    judged = [one for one in rows if one.role in ("judged", "fitted")] or rows
    apart = [one for one in rows if one.role == "doubt"]
    return {
        "rows": len(predictions),
        "judged": sum(one.role == "judged" for one in rows),
        "mape": _mape([one for one in judged if one.role != "fitted"]) if judged else None,
        "efficiency": _efficiency(judged),
        "plain_mape": _plain_mape(judged) if judged else None,
        "worst": max((abs(one.error or 0.0) for one in judged), default=None),
        "doubted_mape": _mape(apart) if apart else None,
        "rank_correlation": rank_correlation(
            [one.run.figure for one in judged], [one.predicted or 0.0 for one in judged]
        ),
    }


def _efficiency(predictions: Sequence[Prediction]) -> float | None:
    """Factor of all rates by which a source was predicted; the median where rows have their own."""
    found = [(1 + one.plain_error) / (1 + one.error) for one in predictions
             if one.error is not None and one.plain_error is not None]  # fmt: skip
    return median(found) if found else None


def _plain_mape(predictions: Sequence[Prediction]) -> float:
    errors = [abs(one.plain_error or 0.0) for one in predictions]
    return sum(errors) / len(errors) if errors else 0.0


def _mape(predictions: Sequence[Prediction]) -> float:
    errors = [abs(one.error or 0.0) for one in predictions]
    return sum(errors) / len(errors) if errors else 0.0


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None for fewer than three values or no spread.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    if len(one) < 3 or min(one) == max(one) or min(other) == max(other):
        return None
    a, b = _ranks(one), _ranks(other)
    mean = (len(one) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]
