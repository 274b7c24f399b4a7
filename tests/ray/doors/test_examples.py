"""The examples in docstrings of what imports Ray; `picotron_ray.launch` and the resolver beside them."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "least"),
    [
        ("picotron_ray.runtime.ray_train.trainer", 4),
        ("picotron_ray.runtime.driver.resolve_job", 2),
        ("picotron_ray.launch", 3),
    ],
)
def test_examples_run(module: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["test"])
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted >= least
    assert found.failed == 0
