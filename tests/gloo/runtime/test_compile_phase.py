"""Compilation is a phase of its own, entered from wherever torch compiles, and left again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.compile_phase import compile_phase


@pytest.mark.parametrize("compiles", [True, False])
def test_the_page_says_when_torch_compiles(tmp_path: Path, compiles: bool) -> None:
    entered: list[str] = []
    page = Page(tmp_path / "w.page", ElasticConfig(), lambda step, phase: entered.append(phase))
    double = torch.compile(lambda x: 2 * x, backend="eager")
    with compile_phase(page, parse_job({"kernels": {"compile": compiles}}), Layout()):
        page.phase("forward")
        assert double(torch.ones(3)).sum() == 6
        assert page.name == "forward"
        double(torch.ones(3))
    assert entered == ["forward", *(["compile", "forward"] if compiles else [])]
    torch.compile(lambda x: 3 * x, backend="eager")(torch.ones(2))
    assert page.name == "forward"
    assert len(entered) == (3 if compiles else 1)
