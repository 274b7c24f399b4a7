"""A norm over a width that tensor parallelism cuts, against torch's over the whole width in fp64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from picotron_ray.comm.all_reduce import ThreadGroup
from picotron_ray.errors import LayoutError
from picotron_ray.parallel.tensor import cut_norm
from tests.support.gloo.parallel_jobs.cut_norm_jobs import in_processes, part, whole
from tests.support.gloo.pool import Pool

pytestmark = pytest.mark.gloo


def in_threads(ranks: int, width: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients of all columns, each thread having computed some."""
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(lambda group: part(group, width, dtype), ThreadGroup.make(ranks)))
    return [torch.cat(parts, dim=-1) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_output_and_gradients_are_those_of_the_whole_width(ranks: int) -> None:
    for found, expected in zip(in_threads(ranks, 24), whole(24), strict=True):
        assert (found - expected).norm() <= 1e-14 * expected.norm()


def test_low_precision_is_computed_in_fp32() -> None:
    output, of_x, of_weight = in_threads(2, 24, torch.bfloat16)
    assert (output.dtype, of_x.dtype, of_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = whole(24)
    for found, exact in zip((output, of_x, of_weight), expected, strict=True):
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


def test_sums_of_a_ranks_own_columns_alone_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_norm, "all_sum", lambda x, group: x.clone())
    for found, expected in zip(in_threads(2, 24), whole(24), strict=True):
        assert (found - expected).norm() > 1e-2 * expected.norm()


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="25 rows or columns of a weight do not divide by 2"):
        part(ThreadGroup.make(2)[0], 25)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_processes_agree_with_one(pool: Pool, dtype: str) -> None:
    ranks = pool.run(2, in_processes, 24, dtype)
    assert all(same for rank in ranks for same, _ in rank)
    for number, expected in enumerate(whole(24)):
        found = np.concatenate([rank[number][1] for rank in ranks], axis=-1)
        wanted = expected.numpy()
        bound = 1e-14 if dtype == "float64" else 1e-6
        assert np.linalg.norm(found - wanted) <= bound * np.linalg.norm(wanted)
