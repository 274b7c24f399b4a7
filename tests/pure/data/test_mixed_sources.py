"""Several sources: what a config says of them, which rows they feed, and what is refused before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import DataSplits, build_dataset, check_supply
from picotron_ray.data.ledger import check
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.errors import ConfigError, DataError
from picotron_ray.layout.layout import Layout

BATCH, STEPS = 12, 30


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """Two sources, whose letters tell them apart."""
    for name, letters in (("lower", "abcdefg"), ("upper", "ABCDEFG")):
        texts = [json.dumps({"text": letters[: 1 + at % 7] * (1 + at % 3)}) for at in range(150)]
        (folder / f"{name}.jsonl").write_text("\n".join(texts))
    return {
        "lower": {"source": "jsonl", "path": str(folder / "lower.jsonl"), "weight": 3.0},
        "upper": {"source": "jsonl", "path": str(folder / "upper.jsonl")},
    }


def job_of(sources: dict[str, Any], **data: Any) -> Any:
    words = {
        "sources": [{"name": name, **source} for name, source in sources.items()],
        "sequence_length": 16,
        "global_batch": BATCH,
        **data,
    }
    return parse_job({"steps": STEPS, "model": {"vocab_size": 260}, "data": words})


def opened(folder: Path, sources: dict[str, Any], **data: Any) -> DataSplits:
    job = job_of(sources, **data)
    return build_dataset(job.data, job.model.vocab_size, job.seed, folder / "cache")


def is_upper(rows: np.ndarray) -> np.ndarray:
    """Whether rows are of the second source."""
    lower, upper = (((rows >= first) & (rows < first + 7)).any(axis=1) for first in (97, 65))
    assert not (lower & upper).any(), "a row is of one source"
    return np.asarray(upper)


@pytest.mark.parametrize("batching", ["fixed", "packed"])
def test_rows_come_by_weight_whatever_the_layout(tmp_path: Path, batching: str) -> None:
    sources = written(tmp_path)
    found = opened(
        tmp_path, sources, batching=batching, long_documents="split" if batching == "packed" else None
    )
    rows = np.concatenate([found.feed.rows(*found.plan.numbers(step)) for step in range(1, 201)])
    assert is_upper(rows).mean() == pytest.approx(0.25, abs=0.02)
    for step in (1, 7):
        whole = make_batch(found.feed, Layout(micro_batch=4), 0, step)
        parts = [make_batch(found.feed, Layout(dp=3, micro_batch=2), at, step) for at in range(3)]
        assert np.array_equal(
            np.concatenate([part.tokens[part.weights > 0] for part in parts]), whole.tokens[whole.weights > 0]
        )
    other = opened(
        tmp_path,
        {**sources, "lower": {**sources["lower"], "weight": 2.0}},
        batching=batching,
        long_documents="split" if batching == "packed" else None,
    )
    assert other.fingerprint != found.fingerprint


def test_weights_change_at_their_steps(tmp_path: Path) -> None:
    sources = written(tmp_path)
    sources["upper"]["weight"] = [[0, 3.0], [100, 27.0]]
    found = opened(tmp_path, sources)
    for first, last, share in ((1, 100, 0.5), (101, 200, 0.9)):
        rows = np.concatenate([found.feed.rows(*found.plan.numbers(step)) for step in range(first, last + 1)])
        assert is_upper(rows).mean() == pytest.approx(share, abs=0.03)


def test_a_ledger_is_replayed(tmp_path: Path) -> None:
    found = opened(tmp_path, written(tmp_path), batching="packed", long_documents="split")

    def line(step: int, dp: int) -> dict[str, Any]:
        parts = [make_batch(found.feed, Layout(dp=dp, micro_batch=2), at, step) for at in range(dp)]
        rows = line_rows([(*part.rows, part.digest.hex()) for part in parts])
        samples, tokens = list(found.plan.numbers(step)), parts[0].global_tokens
        return {
            "step": step,
            "term": 1,
            "n": 1,
            "samples": samples,
            "rows": rows,
            "tokens": tokens,
        }

    lines = [line(step, 1 + step % 3) for step in range(1, 9)]
    assert check(lines, found.plan, found.train).ok
    lines[4] = {**lines[4], "rows": lines[3]["rows"]}
    report = check(lines, found.plan, found.train)
    assert (report.lost, report.ok) == (BATCH, False)


def test_a_source_that_runs_dry_is_refused_before_the_start(tmp_path: Path) -> None:
    sources = written(tmp_path)
    sources["upper"]["repeat"] = False
    found, data = opened(tmp_path, sources), job_of(sources).data
    (count,) = [part.samples for part in found.train.parts[1:]]  # type: ignore[attr-defined]
    enough = next(step for step in range(1, 10_000) if found.plan.mixture.used(step * BATCH)[1] > count) - 1  # type: ignore[attr-defined]
    check_supply(data, found, enough)
    with pytest.raises(DataError, match=rf"data.sources.upper: its {count} rows last until step {enough} of"):
        check_supply(data, found, enough + 1)
    check_supply(job_of(written(tmp_path)).data, found, 10**6)


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        ({"upper": {"weight": 0.0}}, "data.sources.upper.weight", "saw 0, expected more than 0"),
        ({"upper": {"weight": [[5, 1.0]]}}, "data.sources.upper.weight", r"saw weights from steps \[5\] on"),
        ({"upper": {"weight": [[0, 1.0], [-3, 1.0]]}}, "data.sources.upper.weight", "saw step -3"),
        ({"upper": {"weight": [[0, 1], [0, 2]]}}, "data.sources.upper.weight", "expected each once"),
        ({"upper": {"weight": 1e-6}}, "data.sources", "saw weight 1e-06 of 3 in all, expected"),
        (
            {"upper": {"path": None}},
            "data.sources.upper.path",
            "saw nothing, expected a file, folder or glob",
        ),
        ({"upper": {"end_token": 3}}, "data.sources.upper.end_token", "which ends documents by itself"),
        (
            {"upper": {"loss_mask": True}},
            "data.sources.upper.loss_mask",
            "neither data.sources.upper.prompt_key",
        ),
    ],
)
def test_what_is_wrong_with_sources(tmp_path: Path, change: dict[str, Any], key: str, why: str) -> None:
    sources = {name: {**source, **change.get(name, {})} for name, source in written(tmp_path).items()}
    with pytest.raises(ConfigError, match=rf"{key}: .*{why}"):
        job_of(sources)


def test_a_source_beside_a_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path: saw '/x' with data.sources, of which each"):
        job_of(written(tmp_path), path="/x")


def test_an_error_of_a_source_names_it(tmp_path: Path) -> None:
    sources = written(tmp_path)
    sources["upper"]["path"] = str(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"^data.sources.upper.path: cannot read .*gone.jsonl"):
        opened(tmp_path, sources)
