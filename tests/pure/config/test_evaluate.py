"""Held-out sets and the figure of the best commit: what a config may say of them."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.support.evaluation import figures, judges_commit, set_names
from picotron_ray.errors import ConfigError

WIKI = {"name": "wiki", "source": "text", "path": "wiki"}
MIXED = {"sources": [{"name": "web", "source": "text", "path": "web"}, {"name": "lib"}]}


def test_names_are_those_of_sets_and_then_of_sources() -> None:
    job = parse_job({"data": MIXED, "evaluate": {"sets": [WIKI], "source_samples": 4}})
    assert set_names(job) == ("wiki", "web", "lib")
    assert figures(job) == ("eval_loss", "eval_loss/wiki", "eval_loss/web", "eval_loss/lib")
    assert set_names(parse_job({"data": MIXED, "evaluate": {"sets": [WIKI]}})) == ("wiki",)


def test_a_commit_is_judged_where_both_intervals_meet() -> None:
    words = {"steps": 90, "checkpoint": {"interval_steps": 10}, "evaluate": {"interval_steps": 15}}
    words["checkpoint"] = {"interval_steps": 10, "keep_best": "eval_loss"}
    assert [step for step in range(1, 91) if judges_commit(parse_job(words), step)] == [30, 60, 90]
    words["checkpoint"] = {"interval_steps": 10}
    assert not judges_commit(parse_job(words), 30)


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"evaluate": {"sets": [WIKI, WIKI]}}, r"evaluate.sets: saw the name wiki twice"),
    (
        {"data": MIXED, "evaluate": {"sets": [{**WIKI, "name": "web"}], "source_samples": 1}},
        r"evaluate.sets: saw the name web twice, also counting data.sources",
    ),
    (
        {"evaluate": {"sets": [{**WIKI, "name": f"s{at}"} for at in range(33)]}},
        r"evaluate.sets: saw 33 sets, with the sources of data, expected at most 32",
    ),
    ({"evaluate": {"source_samples": 3}}, r"evaluate.source_samples: saw 3 without data.sources"),
    ({"evaluate": {"sets": [{"name": "x", "source": "text"}]}}, r"evaluate.sets.x.path: saw nothing"),
    (
        {
            "evaluate": {
                "sets": [{"name": "x", "source": "jsonl", "path": "x", "loss_mask": True, "prompt_key": "q"}]
            }
        },
        r"evaluate.sets.x.loss_mask: saw true, but no source of data has a mask",
    ),
    (
        {"checkpoint": {"keep_best": "eval_loss/wiki"}},
        r"checkpoint.keep_best: saw eval_loss/wiki, expected one of eval_loss$",
    ),
    (
        {
            "steps": 50,
            "checkpoint": {"keep_best": "eval_loss", "interval_steps": 10},
            "evaluate": {"interval_steps": 7},
        },
        r"evaluate.interval_steps=7 first meet at step 70 of 50; make one a multiple of the other",
    ),
)


@pytest.mark.parametrize(("words", "line"), BAD)
def test_mistakes_are_named(words: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        parse_job(words)
