"""Rules of a config with ``model.family=llama``, which takes all keys but learned positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from picotron_ray.config.problem import Problem
from picotron_ray.models.decoder.rules import unlearned_positions

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


def rules(model: ModelConfig, sequence_length: int) -> Iterator[Problem]:
    """Mistakes in the ``model`` section."""
    yield from unlearned_positions(model)
