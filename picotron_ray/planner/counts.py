"""Sizes of a model: parameters and floating-point operations, from its config alone. Torch-free.

For the Llama-style decoder they are formulas, tested against the built module parameter by parameter; for
a model of your own they come from the table that launch made from the built module (``model.built``).
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.builder import BuiltModel
from picotron_ray.config.job import ModelConfig
from picotron_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What planner and memory model need to know of a model; numbers of elements.

    Fields:
        layers: repeated blocks.
        hidden: width of what leaves a block.
        embed, block, head: parameters before the blocks, of one block, and after the blocks.
        tied: parameters before the blocks that the head uses too.
        whole_block, whole_embed, whole_head: of those, what every tensor-parallel rank holds whole (0 for the
            Llama-style decoder, where that is only the norms).
        activations: elements that one block keeps for backward, per token.
        sequence_cut: whether tensor parallelism cuts activations too (sequence parallelism).
        vocabulary: rows of the output.
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
    sequence_cut: bool
    vocabulary: int


def sizes_of(model: ModelConfig) -> ModelSizes:
    """Sizes of the model that a config describes.

    Raises ConfigError for a model of your own that launch has not looked into yet.
    """
    if model.builder is None:
        return _llama_sizes(model)
    if model.built is None:
        raise ConfigError(
            f"model.builder: the sizes of {model.builder} are known only once launch has built it"
        )
    return _built_sizes(model.built, model.vocab_size)


def _llama_sizes(model: ModelConfig) -> ModelSizes:
    embedding = model.vocab_size * model.hidden_size
    key_value = model.kv_heads * head_size(model)
    return ModelSizes(
        layers=model.layers,
        hidden=model.hidden_size,
        embed=embedding,
        block=block_parameters(model),
        head=model.hidden_size + (0 if model.tie_embeddings else embedding),
        tied=embedding if model.tie_embeddings else 0,
        whole_block=0,
        whole_embed=0,
        whole_head=0,
        # Block input, two norm outputs, q, attention output and the residual between (6·h), k and v, and
        # gate, up, their activation and product (4·I); attention scores are not kept (SDPA recomputes them).
        activations=6 * model.hidden_size + 2 * key_value + 4 * model.intermediate_size,
        sequence_cut=True,
        vocabulary=model.vocab_size,
    )


def _built_sizes(built: BuiltModel, vocabulary: int) -> ModelSizes:
    elements, blocks = built.elements, max(1, len(built.blocks))
    (embed, whole_embed), (head, whole_head) = elements["embed"], elements["head"]
    block, whole_block = (count // blocks for count in elements["block"])
    return ModelSizes(
        layers=blocks,
        hidden=built.hidden_size,
        embed=embed,
        block=block,
        head=head,
        tied=0,
        whole_block=whole_block,
        whole_embed=whole_embed,
        whole_head=whole_head,
        activations=built.activations,
        sequence_cut=False,
        vocabulary=vocabulary,
    )


def head_size(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.hidden_size // model.heads


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one decoder block: two norms, q, k, v and output projections, gate, up and down."""
    hidden, key_value = model.hidden_size, model.kv_heads * head_size(model)
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    return 2 * hidden + attention + 3 * hidden * model.intermediate_size


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    sizes = sizes_of(model)
    return sizes.layers * sizes.block + sizes.embed + sizes.head


def stage_parameters(model: ModelConfig, pp: int, stage: int, tp: int = 1) -> float:
    """Parameters that one rank of one of ``pp`` stages holds without ZeRO.

    The embedding is on the first stage, norm and head on the last.
    """
    sizes = sizes_of(model)
    total, whole = sizes.layers // pp * sizes.block, sizes.layers // pp * sizes.whole_block
    if stage == 0:
        total, whole = total + sizes.embed, whole + sizes.whole_embed
    if stage == pp - 1:
        total, whole = total + sizes.head, whole + sizes.whole_head
        if pp > 1:
            total += sizes.tied  # would be a copy of its own; refused, but sizes are asked for
    return whole + (total - whole) / tp


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs (forward and backward) per token: 6·N + 12·L·h·s.

    N is the global parameter count, L layers, h hidden size, s sequence length (PaLM, Chowdhery et al. 2022,
    appendix B; picotron's MFU formula). The attention term counts the full s x s square: a causal kernel
    does half of it, so multiply that term by 0.5 for the operations really done.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.layers * sizes.hidden * sequence_length
    return float(6 * parameter_count(model) + attention)


def stage_flops_per_token(
    model: ModelConfig, sequence_length: int, pp: int, stage: int, tp: int = 1
) -> float:
    """Training FLOPs per token of one rank of one pipeline stage, in matrix products really done.

    As ``flops_per_token``, but the embedding look-up multiplies nothing, and a tied head is counted. Every
    rank computes what tensor parallelism leaves whole; of attention scores, the block's share of that.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.hidden * sequence_length
    flops = sizes.layers // pp * (6 * sizes.block + attention)
    whole = flops * sizes.whole_block / sizes.block if sizes.whole_block else 0
    if stage == pp - 1:
        head = 6 * sizes.vocabulary * sizes.hidden
        flops, whole = flops + head, whole + (0 if sizes.sequence_cut else head)
    return whole + float(flops - whole) / tp
