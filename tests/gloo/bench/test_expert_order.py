"""``bench experts``: both ways order alike, and the ratio of their times is printed."""

from __future__ import annotations

import json

import torch
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.bench.expert_order import on_the_device, on_the_host


def test_both_ways_order_alike() -> None:
    chosen = torch.rand(1, 50, 8, generator=torch.Generator().manual_seed(1)).topk(2, dim=-1).indices
    kept = torch.ones_like(chosen, dtype=torch.bool)
    (order, arrivals), (expected, theirs) = (way(chosen, kept, 8) for way in (on_the_device, on_the_host))
    assert torch.equal(order[:100], expected)
    assert torch.equal(arrivals, theirs)
    kept[0, 7] = False
    (order, _), (expected, _) = (way(chosen, kept, 8) for way in (on_the_device, on_the_host))
    assert torch.equal(order[:98], expected)


def test_the_ratio_is_printed() -> None:
    words = ["bench", "experts", "--tokens", "64", "--experts", "8", "--json", "-"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ratio"] == found["device_ms"] / found["host_ms"] > 0
    done = CliRunner().invoke(cli.app, ["bench", "experts", "--experts", "6"])
    assert done.exit_code == 2
    assert "saw 8192 tokens, 6 experts, top-k 2" in " ".join(done.output.split())
