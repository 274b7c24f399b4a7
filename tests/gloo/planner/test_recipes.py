"""The chosen layout of recipes on cards: the fullest rank's estimate against what fake tensors count."""

from __future__ import annotations

import pytest

from picotron_ray.commands.plan import proof_of, shape_of
from picotron_ray.planner.card_plans import card_plan, cards_of

BOUND = 0.05
DEVICES = (
    *((name, "8x80") for name in ("smollm-135m", "gpt2-small", "gpt2-medium", "smollm-1.7b", "olmo2-1b")),
    *((name, "8x80") for name in ("gemma-3-1b", "gemma-2-2b", "llama-3-8b", "llama-2-7b")),
    *(
        ("llama-3-70b", "64x80"),
        ("deepseek-v2-lite", "64x80"),
        ("llama-3-8b", "512x80"),
        ("smollm-1.7b", "512x80"),
    ),
)


def off_by(model: str, words: str) -> float:
    (cards,) = cards_of(words)
    job = shape_of(model, [], cards.number, "cuda")
    proof = card_plan(model, job, cards, lambda found: dict(proof_of(found).to_dict())).dry_run
    assert proof is not None
    assert proof["order_problems"] == []
    for rank in proof["ranks"]:
        for axis, size in rank["predicted_sent"].items():
            assert rank["traced_sent"][axis] == pytest.approx(size, rel=0.02, abs=1e6), axis
    fullest = max(proof["ranks"], key=lambda rank: float(rank["traced_peak"]))
    return float(fullest["error"])


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "words"), DEVICES, ids=str)
def test_estimates_of_recipes_are_near_what_fake_tensors_count(model: str, words: str) -> None:
    assert abs(off_by(model, words)) <= BOUND
