"""Curricula in a config: what is refused, in one line each, and what the defaults leave alone."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.curriculum import CurriculumConfig
from picotron_ray.errors import ConfigError

BASIC = {"name": "basic", "difficulty": 0.1, "steps": 10}
ALL = {"name": "all", "steps": 10}


def parsed(curriculum: dict[str, Any], **data: Any) -> CurriculumConfig:
    return parse_job({"data": {"curriculum": curriculum, **data}}).data.curriculum


@pytest.mark.parametrize(
    ("curriculum", "data", "said"),
    [
        (
            {"stages": [ALL, BASIC]},
            {},
            "saw difficulty 0.1 of basic after 1 of all, expected stages that do not",
        ),
        ({"stages": [BASIC, BASIC]}, {}, "saw the name basic twice"),
        ({"stages": [{**BASIC, "steps": 0}]}, {}, "data.curriculum.stages"),
        ({"stages": [{**BASIC, "difficulty": 0}]}, {}, "data.curriculum.stages"),
        ({"difficulty": "length"}, {}, "saw 'length' without data.curriculum.stages"),
        (
            {"stages": [{**ALL, "sequence_length": 999}]},
            {},
            "saw 999, expected at most data.sequence_length=128",
        ),
        (
            {"stages": [{**ALL, "sequence_length": 64}]},
            {"document_masks": True},
            "data.document_masks: saw true with stages that read rows as pieces",
        ),
        ({"stages": [BASIC], "difficulty": "combined"}, {}, r"data.curriculum.combined: saw nothing"),
        ({"stages": [BASIC], "combined": [["length", 1]]}, {}, "saw measures with difficulty=rarity"),
        (
            {"stages": [BASIC], "difficulty": "combined", "combined": [["length", 1], ["length", 2]]},
            {},
            "saw length twice",
        ),
        (
            {"stages": [BASIC], "difficulty": "combined", "combined": [["length", -1]]},
            {},
            "saw weight -1 of length",
        ),
        ({"stages": [BASIC], "difficulty": "loss"}, {}, "picotron-ray data score CONFIG --by loss"),
        ({"stages": [BASIC], "scores": "folder"}, {}, "saw folder with measures that need none"),
        ({"stages": [BASIC], "advance": "auto"}, {"prefetch_steps": 16}, "expected at most 15"),
        (
            {"stages": [BASIC]},
            {"sources": [{"name": "a", "repeat": False}]},
            "data.sources.a.repeat: saw false with data.curriculum",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(curriculum: Any, data: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(curriculum, **data)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_stages_of_pieces_keep_them_apart() -> None:
    data = parse_job(
        {"data": {"curriculum": {"stages": [{**ALL, "name": "short", "sequence_length": 32}, ALL]}}}
    ).data
    assert data.curriculum.widths(data.sequence_length) == (32, 128)
    assert data.keeps_documents_apart
    assert not data.finds_documents
    whole = parse_job({"data": {"curriculum": {"stages": [{**ALL, "sequence_length": 128}]}}}).data
    assert not whole.keeps_documents_apart
    with pytest.raises(ConfigError, match=r"saw pieces of a stage's sequence_length; a model of your own"):
        parse_job(
            {
                "model": {"builder": "a:b"},
                "data": {"curriculum": {"stages": [{**ALL, "sequence_length": 32}]}},
            }
        )
