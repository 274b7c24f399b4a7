"""Config of a model of your own: what the user says of how it is cut, and what launch found in it.

The module itself is never imported here: `launch` builds it once, in a process of its own
(`train.custom_model.inspect`), and leaves what planner, coordinator and workers need as plain data in the
job.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section

IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
Part = Literal["embed", "block", "head"]


class PlanConfig(Section):
    """Parallel plan of a model of your own: its blocks, and the modules that parallelism cuts.

    Keys that are left out are proposed from the built module and tried on it.

    Example::

        model:
          vocab_size: 264
          builder: my_package.model:build
          plan:
            blocks: layers.*
            tensor:
              layers.*.up: colwise
              layers.*.down: rowwise
            pipeline: [embed, layers.*, head]
    """

    path: str | None = Field(
        default=None,
        pattern=IMPORT_PATH,
        description="import path package.module:name of a mapping with the keys below, or of a function that"
        " returns one; keys given here go first",
    )
    blocks: str | None = Field(
        default=None,
        description="glob of the repeated blocks (layers.*): units of ZeRO and of pipeline stages",
    )
    tensor: dict[str, Literal["colwise", "rowwise"]] | None = Field(
        default=None,
        description="glob of linear modules: colwise (outputs cut) or rowwise (inputs cut, results summed);"
        " {}: tensor parallelism cuts nothing",
    )
    pipeline: tuple[str, ...] | None = Field(
        default=None,
        description="globs of modules that, applied one after the other, are the whole model; what stands"
        " before the blocks goes to the first pipeline stage, what follows them to the last",
    )


class BuiltModel(Section):
    """Facts of the module that ``model.builder`` builds, as plain data. Launch fills it in.

    The planner and the coordinator count with it without torch, and workers check their module against it.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...] = Field(
        description="name and shape of every parameter of the uncut module, in its own order"
    )
    blocks: tuple[str, ...] = Field(description="names of the repeated blocks, in order")
    pipeline: tuple[str, ...] = Field(
        description="names of the modules whose chain is the model; may be empty"
    )
    tensor: dict[str, str] = Field(description="name of a linear module: colwise or rowwise")
    cuts: dict[str, int] = Field(
        description="name of a parameter: the dimension that tensor parallelism cuts"
    )
    tensor_degrees: tuple[int, ...] = Field(description="degrees above 1 that were checked on the module")
    embeddings: tuple[str, ...] = Field(
        default=(), description="names of the parameters of torch.nn.Embedding modules"
    )
    hidden_size: int = Field(description="width of what leaves a block")
    activations: int = Field(description="elements that one block keeps for backward, per token")
    no_tensor: str = Field(default="", description="why no other tensor-parallel degree can be used")
    no_pipeline: str = Field(default="", description="why it cannot be cut into stages")

    def part_of(self, name: str) -> tuple[Part, int | None]:
        """Place a parameter: before the blocks, in one (with its number), or after them."""
        if name in self._numbers:
            return "block", self._numbers[name]
        after = self.pipeline[self.pipeline.index(self.blocks[-1]) + 1 :] if self.pipeline else ()
        return ("head" if any(name.startswith(f"{module}.") for module in after) else "embed"), None

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Number of the block of every parameter that stands in one."""
        return {
            name: number
            for number, block in enumerate(self.blocks)
            for name, _ in self.parameters
            if name.startswith(f"{block}.")
        }

    @cached_property
    def matrices(self) -> int:
        """Elements of all matrices inside blocks: of two dimensions, no embeddings."""
        return sum(
            math.prod(shape)
            for name, shape in self.parameters
            if len(shape) == 2 and name in self._numbers and name not in self.embeddings
        )

    @cached_property
    def elements(self) -> dict[str, tuple[int, int]]:
        """Elements of the parameters of each part, and of those that tensor parallelism leaves whole."""
        found = {"embed": (0, 0), "block": (0, 0), "head": (0, 0)}
        for name, shape in self.parameters:
            part, size = self.part_of(name)[0], math.prod(shape)
            total, whole = found[part]
            found[part] = total + size, whole + (0 if name in self.cuts else size)
        return found
