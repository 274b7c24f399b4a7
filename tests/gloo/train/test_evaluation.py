"""Several held-out sets: every layout as one process, in fp64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.evaluation import Evaluated
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.evaluation_jobs import evaluate_layout, held_out_losses

LAYOUTS = [
    Layout(dp=2, tp=2, zero=3, micro_batch=2),
    Layout(dp=2, pp=2, micro_batch=2),
    Layout(cp=2, dp=2, micro_batch=2),
]


def job_of(folder: Path) -> JobConfig:
    """A mixture of two sources, and a set that is smaller than a batch."""
    for name, letters in (("lower", "abcdefg"), ("upper", "ABCDEFG"), ("apart", "0123456")):
        texts = [json.dumps({"text": letters[: 1 + at % 7] * (1 + at % 5)}) for at in range(150)]
        (folder / f"{name}.jsonl").write_text("\n".join(texts))
    source = {
        name: {"name": name, "source": "jsonl", "path": str(folder / f"{name}.jsonl")}
        for name in ("lower", "upper", "apart")
    }
    return parse_job(
        {
            "precision": "fp64",
            "model": {
                "hidden_size": 16,
                "intermediate_size": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "vocab_size": 264,
            },
            "data": {"sources": [source["lower"], source["upper"]], "sequence_length": 16, "global_batch": 7},
            "evaluate": {"samples": 9, "source_samples": 3, "sets": [{**source["apart"], "samples": 11}]},
        }
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_process(pool: Pool, layout: Layout, tmp_path: Path) -> None:
    job = job_of(tmp_path)
    expected = held_out_losses(job, Layout(micro_batch=7), 0, None, tmp_path / "cache")
    assert len(set(expected)) == 4, "apart, lower and upper differ, and from both sources together"
    for found in pool.run(layout.world_size, evaluate_layout, job, layout, str(tmp_path / "cache")):
        assert np.abs(np.array(found) / expected - 1).max() < 1e-12


def test_figures_are_those_of_the_state_at_hand() -> None:
    held = Evaluated()
    assert held.extra() == {}
    held.note({"eval_loss": 2.0, "eval_loss/web": float("nan")})
    assert held.extra() == {"evaluation": {"eval_loss": 2.0}}
    held.forget()
    assert held.extra() == {}
