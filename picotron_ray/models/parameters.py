"""The words in which a model is described: a parameter, how a module is cut, a part of a sequence.

Torch-free, so that planner, checkpoint tools and ``parallel`` can speak of a model without building it. The
names are those of ``named_parameters``. A pipeline stage keeps the absolute layer number, so nothing is
renamed but the head's copy of a tied embedding (`models.decoder.table.tied_copies`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Part = Literal["embed", "block", "head"]
Style = Literal[
    "vocab_embed",
    "positions",
    "sequence",
    "gather_input",
    "sinks",
    "colwise",
    "rowwise",
    "vocab_head",
    "copy_colwise",
    "sum_rowwise",
    "mixture",
    "experts",
    "inner",
    "whole",
    "cut_norm",
]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One canonical parameter of the uncut model.

    Fields:
        name: as ``named_parameters`` says it.
        shape: full shape, elements.
        layer: absolute layer number, None outside the blocks.
        part: ``embed`` lives on the first pipeline stage, ``head`` (final norm, head) on the last.
        tp_dim: dimension that tensor parallelism cuts, None where every tp rank holds the whole.
        decay: whether weight decay may apply (not to norms and biases).
        init_std: standard deviation of the normal initial value; None: all ones. Not used for a model of the
            user's own, which initialises itself.
        init_bound: the initial value is uniform within ± this instead; None: it is not.
        expert: whether dimension 0 counts experts, which expert parallelism cuts.
        trained: whether a gradient moves it. What the balancing of experts moves instead is whole on every
            rank that has the layer, and has no moments.
        embedding: whether it is a table that tokens or positions look up.
        copy: whether it is what the head's pipeline stage holds of a tied embedding, which is on another
            stage: the same tensor of the state once more.
        frozen: whether ``model.freeze`` or LoRA keeps it from being trained: it has neither gradient nor
            moments, and ZeRO cuts it like what is trained.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    part: Part
    tp_dim: int | None
    decay: bool
    init_std: float | None
    expert: bool = False
    trained: bool = True
    embedding: bool = False
    copy: bool = False
    frozen: bool = False
    init_bound: float | None = None

    @property
    def sharded(self) -> bool:
        """Whether ZeRO cuts it; it does not where something else than a gradient moves it."""
        return self.trained or self.frozen

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix inside a block, or a stack of them, one per expert: what Muon is for."""
        inside = self.part == "block" and self.trained and not self.embedding
        return inside and len(self.shape) == (3 if self.expert else 2)


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Tokens of every row that a context-parallel rank holds: the ``index``-th of ``parts``.

    The row is cut into ``2 x parts`` chunks; rank i holds chunks i and 2 x parts - 1 - i. Under a causal mask
    every rank then has the same number of (query, key) pairs to compute, at every step of a ring (the
    head-tail or zigzag order; Llama 3, Dubey et al. 2024, section 3.3.2).
    """

    length: int  # tokens of a whole row, a multiple of 2 x parts
    parts: int = 1
    index: int = 0

    def positions(self) -> tuple[int, ...]:
        """Positions in the row of the local tokens, in their local order, which is ascending."""
        if self.parts == 1:
            return tuple(range(self.length))
        size = self.length // (2 * self.parts)
        head, tail = self.index * size, (2 * self.parts - 1 - self.index) * size
        return (*range(head, head + size), *range(tail, tail + size))
