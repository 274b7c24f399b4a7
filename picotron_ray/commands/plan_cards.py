"""``picotron-ray plan --cards`` and ``--recipes``: a row for each model and number of cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.planner.card_plans import USUAL, CardPlan, card_lines, card_plan, cards_of, rates


def plan_cards(
    given: Mapping[str, Any], shape_of: Callable[..., Any], proof_of: Callable[[Any], Any]
) -> tuple[list[str], dict[str, Any]]:
    """Plan each model on each of the cards; lines, and the same as plain data.

    Args:
        given: what `plan` was called with.
        shape_of: gives the job of a config with overrides on so many devices of a kind.
        proof_of: steps a plan's layout with fake tensors.

    Raises:
        ConfigError: options that do not go together, or cards that are none.
    """
    from picotron_ray.config.load import recipe_names

    if given["recipes"] == (given["config"] is not None):
        saw = f"{given['config']} with it" if given["recipes"] else "no config"
        raise ConfigError(f"plan --recipes: saw {saw}, expected a config or --recipes, not both")
    cards = cards_of(given["cards"] or USUAL)
    models = recipe_names() if given["recipes"] else [given["config"]]
    prove = (lambda found: proof_of(found).to_dict()) if given["dry_run"] else None
    plans: list[CardPlan] = []
    for model in models:
        for one in cards:
            job = shape_of(model, given["overrides"] or [], one.number, "cuda")
            plans.append(card_plan(model, job, one, prove))
    value = {
        "estimate": True,
        "plans": [each.to_dict() for each in plans],
        "rates": rates([each.hardware for each in plans]),
    }
    return list(card_lines(plans)), value
