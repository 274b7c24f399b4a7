"""``bench initial-weights``: a rank draws what it holds, and no more."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.bench.initial_weights import boxes_of
from picotron_ray.config.load import parse_job
from picotron_ray.layout.layout import Layout
from picotron_ray.models.families.registry import parameter_table


def test_one_rank_of_four_draws_about_a_quarter() -> None:
    degrees = ["layout.tp=2", "layout.pp=2", "cluster.max_workers=4"]
    words = ["bench", "initial-weights", "tiny", *degrees, "--json", "-"]
    done = CliRunner().invoke(cli.app, [*words, "--rank", "3"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["layout"].startswith("dp1-tp2-pp2")
    assert found["model_numbers"] / 5 < found["numbers"] < found["model_numbers"] / 3
    assert CliRunner().invoke(cli.app, [*words, "--rank", "4"]).exit_code == 2


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2, zero=3), Layout(tp=2, pp=2)], ids=str)
def test_the_boxes_of_all_ranks_are_the_model(layout: Layout) -> None:
    job = parse_job({"model": {"layers": 2}})
    held: dict[str, set[tuple[int, ...]]] = {}
    for rank in range(layout.world_size):
        for spec, box in boxes_of(job, layout, rank):
            held.setdefault(spec.name, set()).add((*box.offset, *box.size))
    for spec in parameter_table(job.model):
        width = len(spec.shape)
        assert sum(box[width] * (box[width + 1] if width > 1 else 1) for box in held[spec.name]) == spec.numel
