"""Scores of rows: by a commit's model, as transformers computes, by a column, and read by a curriculum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.plan.curriculum import StagedOrder
from picotron_ray.errors import ConfigError, DataError
from picotron_ray.runtime.driver.score_command import score
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.run_storage.hf_import import import_hf
from tests.support.gloo.hf_kit import job_for, make

pytestmark = pytest.mark.filterwarnings("default")
LENGTH = 24


def records(folder: Path, hard: Any = lambda at: at % 17) -> Path:
    path = folder / "records.jsonl"
    lines = [{"text": chr(97 + at % 26) * (3 + at % 9), "hard": hard(at)} for at in range(90)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def job_of(folder: Path, path: Path, **data: Any) -> JobConfig:
    words = {"source": "jsonl", "path": str(path), "sequence_length": LENGTH, "global_batch": 2}
    more = {"batching": "packed", "held_out_fraction": 0.2, **words, **data}
    job = job_for(folder / "hf", folder / "runs", "llama")
    return JobConfig.model_validate({**job.model_dump(), "data": more})


def opened(job: JobConfig) -> DataSplits:
    return build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder())


def test_losses_and_gradient_norms_are_those_of_the_model(tmp_path: Path) -> None:
    theirs = make("llama", tmp_path / "hf", {"vocab_size": 300})
    job = job_of(tmp_path, records(tmp_path), batching="fixed")
    import_hf(job, tmp_path / "hf")
    run = str(tmp_path / "runs" / "llama")
    train = opened(job).train
    rows = torch.from_numpy(train.rows(np.arange(train.samples)))
    for by in ("loss", "gradient_norm"):
        (found,) = score(job, by, tmp_path / "scores", run=run, step=None, key=None, say=lambda line: None)
        values = np.load(found["file"])
        assert len(values) == train.samples == found["rows"]
        for at in range(0, train.samples, 9):
            theirs.zero_grad()
            logits = theirs(rows[at : at + 1, :-1]).logits[0]
            loss = F.cross_entropy(logits, rows[at, 1:])
            loss.backward()
            norms = [p.grad.double().square().sum() for p in theirs.parameters() if p.grad is not None]
            expected = loss.item() if by == "loss" else float(torch.stack(norms).sum().sqrt())
            assert values[at] == pytest.approx(expected, rel=1e-4)


def scored(job: JobConfig, folder: Path, **words: Any) -> list[dict[str, Any]]:
    asked = {"run": None, "step": None, "key": "hard", "say": lambda line: None, **words}
    return score(job, asked.pop("by", "column"), folder / "scores", **asked)


@pytest.mark.parametrize("batching", ["packed", "fixed"])
def test_a_column_ranks_rows_by_the_documents_in_them(tmp_path: Path, batching: str) -> None:
    make("llama", tmp_path / "hf", {"vocab_size": 300})
    letters: Any = lambda at: at % 26  # noqa: E731 - the number is told by the letter
    job = job_of(tmp_path, records(tmp_path, letters), batching=batching)
    (found,) = scored(job, tmp_path)
    values = np.load(found["file"])
    train = opened(job).train
    for at in range(train.samples):
        documents = train.documents(np.array([at]))
        inputs = train.rows(np.array([at]))[0, :-1]
        real = np.ones(LENGTH, bool) if documents is None else documents[0] >= 0
        text = inputs[real & (inputs != 256)]
        if (inputs[real] != 256).all():
            assert values[at] == pytest.approx((text - 97).mean())
        assert text.min() - 97 <= values[at] <= text.max() - 97
    stages = [{"name": "easy", "difficulty": 0.25, "steps": 5}, {"name": "all", "steps": 1}]
    asked = {"difficulty": "column", "scores": str(tmp_path / "scores"), "stages": stages}
    curriculum = job_of(tmp_path, records(tmp_path, letters), batching=batching, curriculum=asked)
    staged = opened(curriculum)
    (order,) = staged.plan.made(staged.plan.starts).orders  # type: ignore[attr-defined]
    assert isinstance(order, StagedOrder)
    assert values[order.pools[0]].max() <= np.sort(values)[len(order.pools[0]) - 1]
    np.save(tmp_path / "scores" / "data" / "column.npy", values[::-1])
    assert opened(curriculum).fingerprint != staged.fingerprint, "scores decide the rows"


def test_what_a_measure_needs_is_asked_for(tmp_path: Path) -> None:
    make("llama", tmp_path / "hf", {"vocab_size": 300})
    job = job_of(tmp_path, records(tmp_path))
    for words, said in (
        ({"by": "luck"}, "--by: saw luck"),
        ({"key": None}, "--key: saw None with --by column"),
        ({"run": "x"}, "--run: saw x with --by column, which asks no model"),
        ({"by": "loss", "key": None}, "--run: saw None with --by loss, expected the run"),
    ):
        with pytest.raises(ConfigError, match=said):
            scored(job, tmp_path, **words)
    with pytest.raises(DataError, match=r"records.jsonl:1: saw None for gone, expected a number"):
        scored(job, tmp_path, key="gone")
    with pytest.raises(DataError, match=r"--by column: saw data\.source=stdlib"):
        scored(
            JobConfig.model_validate({"data": {"batching": "packed", "long_documents": "split"}}), tmp_path
        )
