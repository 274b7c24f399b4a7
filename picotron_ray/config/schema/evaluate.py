"""Config of the held-out loss: when, on which sets, and with which weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.data import SourceConfig


class EvaluationSet(SourceConfig):
    """Held-out set of its own: documents of a source that are never trained on here.

    Example::

        evaluate:
          sets:
            - {name: wiki, source: text, path: held-out/wiki, samples: 128}
            - {name: code, source: jsonl, path: held-out/code.jsonl}
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="of the set, in figures and messages")
    samples: int = Field(default=64, ge=1, description="samples per evaluation, always the same ones")


class EvaluateConfig(Section):
    """Loss on held-out data.

    Example::

        evaluate:
          interval_steps: 100
          samples: 256
          sets:
            - {name: wiki, source: text, path: held-out/wiki}
    """

    interval_steps: int = Field(
        default=50, ge=1, description="steps between evaluations; the last step is always evaluated"
    )
    samples: int = Field(
        default=64, ge=1, description="held-out samples per evaluation, always the same ones"
    )
    sets: tuple[EvaluationSet, ...] = Field(
        default=(), description="held-out sets beside the part of data; each has its own loss"
    )
    source_samples: int = Field(
        default=0,
        ge=0,
        description="samples of each of data.sources' held-out parts, whose loss is told by itself under the"
        " source's name; 0: none",
    )
    weights: Literal["trained", "ema"] = Field(
        default="trained",
        description="weights that are evaluated: as trained, or their moving average (optimizer.ema_decay)",
    )

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        """Sources of the sets by the key under which messages name them."""
        return {f"evaluate.sets.{one.name}": one for one in self.sets}
