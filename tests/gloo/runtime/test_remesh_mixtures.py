"""Packed rows of several sources through kills and other layouts: the same losses in fp64, exact ledger."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_remesh import BATCH, check_a_kill, draw
from tests.gloo.runtime.test_remesh import job_of as plain_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses

LETTERS = {"lower": 97, "upper": 65}
WEIGHTS: dict[str, Any] = {"lower": [[0, 3.0], [4, 1.0]], "upper": 2.0}


def sources_in(folder: Path) -> list[dict[str, Any]]:
    """Two sources of short texts, some longer than a row."""
    pick, found = random.Random(3), []
    for name, first in LETTERS.items():
        texts = [
            "".join(chr(first + pick.randrange(26)) for _ in range(pick.randint(1, 14))) for _ in range(80)
        ]
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        found.append({"name": name, "source": "jsonl", "path": str(path), "weight": WEIGHTS[name]})
    return found


def job_of(kind: str, folder: Path) -> JobConfig:
    words = plain_job(kind, folder).model_dump()
    words["model"]["vocab_size"] = 260
    words["data"] = {
        "sources": sources_in(folder),
        "batching": "packed",
        "long_documents": "split",
        "sequence_length": 8,
        "global_batch": BATCH,
    }
    return JobConfig.model_validate(words)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """Losses of one process that nothing disturbs, by kind of model."""
    return {}


CASES = [(number, *pair) for number, pair in enumerate(draw())]
FIRST = next(number for number, kind, *_ in CASES if kind == "loss")


@pytest.mark.parametrize(
    ("number", "kind", "first", "second"),
    [
        pytest.param(*case, marks=() if case[0] == FIRST else pytest.mark.slow, id=f"{case[0]}-{case[1]}")
        for case in CASES
    ],
)
def test_a_kill_between_two_layouts(
    pool: Pool,
    tmp_path: Path,
    expected: dict[str, list[float]],
    number: int,
    kind: str,
    first: Layout,
    second: Layout,
) -> None:
    print(f"{first} -> {second}")
    if kind not in expected:
        (tmp_path / "alone").mkdir()
        alone = Run(pool, job_of(kind, tmp_path / "alone"), tmp_path / "alone")
        alone.finish(Layout(micro_batch=BATCH))
        expected[kind] = losses(alone.ledger())
    check_a_kill(pool, job_of(kind, tmp_path), tmp_path, expected[kind], number, first, second)
