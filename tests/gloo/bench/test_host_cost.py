"""``bench host``: what the host of one rank does at many ranks is measured, in one process."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.bench.rendezvous_calls import rendezvous_calls


@pytest.mark.parametrize("zero", [0, 3])
def test_a_host_of_many_ranks_is_measured_in_one_process(zero: int) -> None:
    words = ["bench", "host", "--ranks", "2,64", "--zero", str(zero), "--json", "-"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    few, many = found["sizes"]
    assert (few["ranks"], many["ranks"]) == (2, 64)
    measured = [each[name] for each in found["sizes"] for name in each if name[-2:] in ("_s", "us")]
    assert len(measured) == 12
    assert min(measured) > 0
    assert [each["rounds"] for each in found["sizes"]] == [1, 14], "7 neighbours, and 7 other nodes"
    assert [each["store_calls"] for each in found["sizes"]] == [3, 3], "whatever the number of ranks"


@pytest.mark.parametrize(
    ("ranks", "why"), [("0", "saw 0, expected from 1"), ("x", "saw x, expected numbers")]
)
def test_sizes_that_are_none(ranks: str, why: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", "host", "--ranks", ranks])
    assert done.exit_code == 2
    assert f"error: --ranks: {why}" in done.output


@pytest.mark.parametrize("ranks", [2, 64, 16384])
def test_no_rank_asks_the_store_more_at_more_ranks(ranks: int) -> None:
    """To arrive, to say so as the last one, to wait; where it runs a rank tells once: a size and a text."""
    assert rendezvous_calls(ranks) == (3, 2)
    assert rendezvous_calls(ranks, formed=9) == (3, 2), "a backend that needs no addresses exchanges none"
