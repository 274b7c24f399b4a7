"""Sizes of a model as numbers, by which layouts are judged. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

GATED_PIECE_BYTES = 128 << 20
"""Most bytes of a mixture's weighted results, in the wider type, that are made at a time."""


class BlockProduct(NamedTuple):
    """One matrix product of a block, per token: ``into`` values become ``out``.

    Fields:
        cut: the side that tensor parallelism divides; ``whole``: none, every rank computes it.
        share: tokens that go through it, as a multiple of all tokens (a mixture's experts: ``top_k /
            experts`` each).
        copies: products of this shape.
    """

    out: int
    into: int
    cut: Literal["out", "into", "whole"]
    share: float = 1.0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Everything that planner and memory model need to know of a model; numbers of elements.

    Fields:
        layers: repeated blocks.
        hidden: width of what leaves a block.
        embed, block, head: parameters before the blocks, of one block, and after the blocks.
        tied: parameters before the blocks that the head uses too; in a pipeline its stage has a copy.
        whole_block, whole_embed, whole_head: of those, what every tensor-parallel rank holds whole. Norms of
            our decoders are not told apart.
        activations: elements that one block keeps for backward, per token.
        hidden_layer: of those, what the hidden layer keeps, which comes first in the backward pass; 0: not
            told apart.
        products: of all, inputs and results of matrix products and attention, what selective recomputation
            keeps.
        at_work: elements of gradients, and of what else lives meanwhile, while a block's backward pass runs.
        pointwise: elements that the other operations of a block's forward pass read and write, per token.
        sequence_cut: whether tensor parallelism cuts activations too (sequence parallelism).
        vocabulary: rows of the output.
        scores: width over which attention scores are formed, all heads together.
        matrices: parameters of one block's matrices.
        experts: parameters of one block's experts, which expert parallelism cuts; part of ``block``.
        idle: of those, what a token does not go through.
        routed: elements that one token sends to experts in one block (and gets back), 0 in a dense block.
        fused: parameters of one block's matrices that fused projections make one product of, experts aside.
        fused_experts: the same of its experts.
        rms_normed: elements per token that one block's RMSNorms keep where torch has no kernel for them.
        block_products: the matrix products of one block's forward pass; empty: their shapes are not known.
        first: blocks before all others that are dense where those are mixtures. What is said of one block is
            said of the others.
        first_block, first_matrices: parameters of one of them, and those of its matrices.
    """

    layers: int
    hidden: int
    embed: int
    block: int
    head: int
    tied: int
    whole_block: int
    whole_embed: int
    whole_head: int
    activations: int
    products: int
    at_work: int
    pointwise: int
    sequence_cut: bool
    vocabulary: int
    scores: int
    matrices: int
    experts: int = 0
    idle: int = 0
    routed: int = 0
    fused: int = 0
    fused_experts: int = 0
    rms_normed: int = 0
    block_products: tuple[BlockProduct, ...] = field(default=(), compare=False)
    hidden_layer: int = 0
    first: int = 0
    first_block: int = 0
    first_matrices: int = 0

    @property
    def parameters(self) -> int:
        """Of the whole model; a tied embedding counts once."""
        return self.of_blocks(0, self.layers) + self.embed + self.head

    def mixtures(self, start: int, end: int) -> int:
        """Blocks of the half-open range of layers that are not of the first, dense ones."""
        return max(0, end - max(start, self.first))

    def of_blocks(self, start: int, end: int) -> int:
        """Parameters of the half-open range of layers."""
        others = self.mixtures(start, end)
        return others * self.block + (end - start - others) * self.first_block
