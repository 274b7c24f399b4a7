"""A batch's tokens, cut into micro-batches and over context parallelism."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.document_mask import document_numbers
from picotron_ray.train.micro_batches import MicroBatcher
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, END, documents_job, make_job

TOKENS = np.arange(2 * 3 * 9).reshape(2, 3, 9) % 20
TOKENS[0, 0, 2] = END
BATCH = StepBatch(1, TOKENS, np.arange(6.0).reshape(2, 3), 48, (0, 6), bytes(16))


def test_all_of_a_row_and_what_the_model_asks_for() -> None:
    inputs, targets, weights, named = MicroBatcher(
        make_job("sgd", 6), Layout(), 0, CPU, weighted=False
    ).whole(BATCH)
    assert torch.equal(inputs, torch.from_numpy(TOKENS[..., :8]))
    assert inputs.data_ptr() == TOKENS.ctypes.data, "whole rows are not copied"
    assert torch.equal(targets, torch.from_numpy(TOKENS[..., 1:]))
    assert (weights.dtype, weights.tolist()) == (torch.float64, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert named == {}
    job = make_job("sgd", 6, kernels=KernelsConfig(loss="linear"))
    _, targets, weights, named = MicroBatcher(job, Layout(), 0, CPU, weighted=True).whole(BATCH)
    assert list(named) == ["weights", "targets"]
    assert named["weights"] is weights
    assert named["targets"] is targets


def test_a_ranks_part_of_rows_and_documents_of_all() -> None:
    batcher = MicroBatcher(documents_job("sgd", 6), Layout(cp=2), 1, CPU, weighted=True)
    found = list(batcher.micro_batches(BATCH))
    assert len(found) == 2
    for number, (inputs, targets, weights, named) in enumerate(found):
        rows = torch.from_numpy(TOKENS[number])
        assert torch.equal(inputs, rows[:, 2:6])
        assert torch.equal(targets, rows[:, 3:7])
        assert weights.tolist() == [3.0 * number, 3.0 * number + 1, 3.0 * number + 2]
        assert list(named) == ["weights", "documents"]
        assert torch.equal(named["weights"], weights)
        assert torch.equal(named["documents"], document_numbers(rows[:, :8], END))
    assert found[0][3]["documents"][0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_the_host_goes_on_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    class OnHost:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def to(self, *_: object, non_blocking: bool = False) -> torch.Tensor:
            told.append(non_blocking)
            return torch.tensor(self.array)

    monkeypatch.setattr(torch, "from_numpy", OnHost)
    MicroBatcher(make_job("sgd", 6), Layout(), 0, CPU, weighted=False).whole(BATCH)
    assert told == [True, True]
