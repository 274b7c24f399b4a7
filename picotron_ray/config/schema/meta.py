"""Config of meta-learning: how a model learns from many small tasks, and which tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.custom_model import IMPORT_PATH

Strategy = Literal["none", "maml", "fomaml", "reptile", "metasgd"]
SINUSOIDS, SEQUENCES = "sinusoids", "sequences"
TASKS = f"^({SINUSOIDS}|{SEQUENCES})$|{IMPORT_PATH}"


class MetaConfig(Section):
    """Meta-learning: a row of a batch is a task, and the model learns to adapt to tasks in a few steps.

    The outer rate is ``optimizer.learning_rate``: the optimizer updates by meta-gradients as by any others.

    Example::

        model:
          builder: picotron_ray.models.regressor:build
        meta:
          strategy: maml
          tasks: sinusoids
          inner_rate: 0.01
          inner_steps: 5
          support: 5
          query: 10
        data:
          global_batch: 16
    """

    strategy: Strategy = Field(
        default="none",
        description="none: ordinary training; maml: the gradient of the loss after adaptation, through the"
        " inner steps (Finn et al. 2017); fomaml: the same without second derivatives; reptile: the way that"
        " the inner steps went (Nichol et al. 2018); metasgd: maml with an inner rate of each weight's own,"
        " which is learned (Li et al. 2017)",
    )
    tasks: str = Field(
        default=SINUSOIDS,
        pattern=TASKS,
        json_schema_extra={"expected": f"{SINUSOIDS}, {SEQUENCES}, or an import path package.module:name"},
        description="sinusoids: regression of waves (a model of your own, of numbers); sequences: rules by"
        " which tokens follow each other, of data.sequence_length + 1 tokens; or an import path"
        " package.module:name of a function (generator, examples) -> (inputs, targets), numpy arrays with an"
        " example a row: targets of integers are token ids, others are regressed",
    )
    inner_rate: float = Field(
        default=0.01, gt=0, description="learning rate of the inner steps; metasgd: where the rates begin"
    )
    inner_steps: int = Field(
        default=5, ge=1, description="steps of gradient descent by which a model adapts to a task"
    )
    support: int = Field(default=5, ge=1, description="examples of a task that a model adapts to")
    query: int = Field(
        default=10, ge=1, description="examples of a task by which the adapted model is judged"
    )

    @property
    def on(self) -> bool:
        """Whether rows are tasks."""
        return self.strategy != "none"

    @property
    def second_order(self) -> bool:
        """Whether the meta-gradient goes through the inner steps."""
        return self.strategy in ("maml", "metasgd")
