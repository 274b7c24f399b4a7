"""Held-out sets beside the part of the data: all documents of a source, and the parts of a mixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout


def built(folder: Path, **apart: Any) -> DataSplits:
    """Two sources and a set, whose letters tell them apart."""
    source = {}
    for name, letters in (("lower", "abcdefg"), ("upper", "ABCDEFG"), ("apart", "0123456")):
        texts = [json.dumps({"text": letters[: 1 + at % 7] * (1 + at % 3)}) for at in range(150)]
        (folder / f"{name}.jsonl").write_text("\n".join(texts))
        source[name] = {"name": name, "source": "jsonl", "path": str(folder / f"{name}.jsonl")}
    job = parse_job(
        {
            "data": {
                "sources": [source["lower"], source["upper"]],
                "sequence_length": 16,
                "global_batch": 4,
                "held_out_fraction": 0.3,
            },
            "evaluate": {"source_samples": 3, "sets": [{**source["apart"], "samples": 6, **apart}]},
        }
    )
    return build_dataset(job.data, 300, 0, folder / "cache", evaluate=job.evaluate)


def test_each_set_has_its_own_letters(tmp_path: Path) -> None:
    data = built(tmp_path)
    assert [(one.name, one.wanted) for one in data.sets] == [("apart", 6), ("lower", 3), ("upper", 3)]
    layout = Layout(dp=2, micro_batch=2)
    for one, letters in zip(data.sets, ("0123456", "abcdefg", "ABCDEFG"), strict=True):
        place = data.sets.index(one)
        parts = [data.set_batches(layout, dp)[place] for dp in (0, 1)]
        rows = np.concatenate([batch.tokens[batch.weights > 0] for part in parts for batch in part])
        assert len(rows) == one.wanted
        assert {*np.unique(rows).tolist()} - {256} <= {*letters.encode()}
    everything = data.sets[0].samples
    tokens = sum(
        len(json.loads(line)["text"]) + 1 for line in (tmp_path / "apart.jsonl").read_text().splitlines()
    )
    assert everything.samples >= tokens // 16 - 2, "no document of a set is left for training"


def test_nothing_of_what_is_trained_changes(tmp_path: Path) -> None:
    data = built(tmp_path)
    plain = build_dataset(
        parse_job(
            {
                "data": {
                    "sources": [
                        {"name": name, "source": "jsonl", "path": str(tmp_path / f"{name}.jsonl")}
                        for name in ("lower", "upper")
                    ],
                    "sequence_length": 16,
                    "global_batch": 4,
                    "held_out_fraction": 0.3,
                }
            }
        ).data,
        300,
        0,
        tmp_path / "cache",
    )
    assert (plain.fingerprint, plain.sets) == (data.fingerprint, ())


def test_a_mistake_names_the_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^evaluate\.sets\.apart\.path: "):
        built(tmp_path, path=str(tmp_path / "nowhere.jsonl"))
