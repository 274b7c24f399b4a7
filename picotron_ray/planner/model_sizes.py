"""Sizes of a model: parameters and floating-point operations, from its config alone. Torch-free.

For our decoder (Llama-style or GPT-2) they are formulas, tested against the built module parameter by
parameter; for a model of your own they come from the table that launch made from the built module
(``model.built``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks, recomputed
from picotron_ray.planner.stage_partition import Bounds, partition

Config = TypeVar("Config")


Result = TypeVar("Result")


Rest = ParamSpec("Rest")


def of_the_latest(
    function: Callable[Concatenate[Config, Rest], Result],
) -> Callable[Concatenate[Config, Rest], Result]:
    """Remember what a pure function gave for the config that it was last called with.

    By identity: configs are frozen, and hashing one means writing it out, which costs more than most of what
    is remembered. The other arguments must be hashable.
    """
    latest: tuple[object, dict[object, Result]] = (None, {})

    @wraps(function)
    def remembered(config: Config, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        nonlocal latest
        known = latest  # threads may replace it meanwhile: config and results stay together
        if known[0] is not config:
            known = latest = (config, {})
        key = (rest, tuple(sorted(named.items())))
        if key not in known[1]:
            known[1][key] = function(config, *rest, **named)
        return known[1][key]

    return remembered


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What planner and memory model need to know of a model; numbers of elements.

    Fields:
        layers: repeated blocks.
        hidden: width of what leaves a block.
        embed, block, head: parameters before the blocks, of one block, and after the blocks.
        tied: parameters before the blocks that the head uses too; in a pipeline its stage has a copy.
        whole_block, whole_embed, whole_head: of those, what every tensor-parallel rank holds whole (0 for the
            Llama-style decoder, where that is only the norms; GPT-2's positions are told apart).
        activations: elements that one block keeps for backward, per token.
        products: of those, inputs and results of matrix products and attention, what selective recomputation
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


@of_the_latest
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
    positions = (model.max_positions or 0) * model.hidden_size
    hidden, width, key_value = model.hidden_size, model.query_width, model.key_width
    return ModelSizes(
        layers=model.layers,
        hidden=model.hidden_size,
        embed=embedding + positions,
        block=block_parameters(model),
        head=norm_parameters(model) + (0 if model.tie_embeddings else embedding),
        tied=embedding if model.tie_embeddings else 0,
        whole_block=0,
        whole_embed=positions,
        whole_head=0,
        # Block input, two norm outputs and the residual between, q, attention output, k and v, and what the
        # hidden layer keeps; attention scores are not kept (SDPA recomputes them).
        activations=4 * hidden + 2 * width + 2 * key_value + _hidden_activations(model),
        # Block input and what the output projection gives, q, attention output, k and v, gate and up.
        products=2 * hidden + 2 * width + 2 * key_value + _hidden_products(model),
        # Of the hidden layer one, and a few of the residual stream.
        at_work=6 * hidden + _inner(model),
        # Two norms read and write, the residual sum reads twice; positions turn q and k; the hidden layer.
        pointwise=7 * hidden + 2 * width + 2 * key_value + _hidden_pointwise(model),
        sequence_cut=True,
        vocabulary=model.vocab_size,
        scores=width,
        matrices=block_parameters(model) - _block_vectors(model),
        experts=expert_parameters(model),
        idle=expert_parameters(model) * (model.moe.experts - model.moe.top_k) // max(1, model.moe.experts),
        routed=model.moe.top_k * model.hidden_size if model.moe.experts else 0,
    )


def _inner(model: ModelConfig) -> int:
    """Width of what a token goes through in a block's hidden layer."""
    moe = model.moe
    return moe.top_k * moe.intermediate_size if moe.experts else model.intermediate_size


def _hidden_activations(model: ModelConfig) -> int:
    """Elements that a block's hidden layer keeps for backward, per token.

    Gate, up, their activation and product (4·I), of GPT-2 up and its activation (2·I); of each chosen expert
    also its input and output.
    """
    moe = model.moe
    if not moe.experts:
        return (2 if model.is_gpt2 else 4) * model.intermediate_size
    expert = 2 * model.hidden_size + 4 * moe.intermediate_size
    return moe.top_k * expert + 4 * moe.shared_intermediate_size + 3 * moe.experts


def _hidden_products(model: ModelConfig) -> int:
    """Of `_hidden_activations` what matrix products gave: gate, up, and the output of each expert."""
    moe = model.moe
    if not moe.experts:
        return (1 if model.is_gpt2 else 2) * model.intermediate_size + model.hidden_size
    expert = model.hidden_size + 2 * moe.intermediate_size
    return moe.top_k * expert + 2 * moe.shared_intermediate_size + moe.experts


def _hidden_pointwise(model: ModelConfig) -> int:
    """Elements that operations of a hidden layer other than products read and write, per token.

    SwiGLU's activation reads and writes, its product reads twice (5·I); GELU alone 2·I. Tokens are copied on
    their way to experts, and results weighted and summed on the way back.
    """
    moe = model.moe
    if not moe.experts:
        return (2 if model.is_gpt2 else 5) * model.intermediate_size
    expert = 6 * model.hidden_size + 5 * moe.intermediate_size
    return moe.top_k * expert + 5 * moe.shared_intermediate_size + 6 * moe.experts


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of all experts of one block; 0 in a dense one."""
    return 3 * model.moe.experts * model.hidden_size * model.moe.intermediate_size


def joined_parameters(model: ModelConfig) -> tuple[int, int]:
    """Of a block's matrices those of fused projections: of attention and hidden layer, and of experts."""
    moe, hidden = model.moe, model.hidden_size
    inner = moe.shared_intermediate_size if moe.experts else 0 if model.is_gpt2 else model.intermediate_size
    return hidden * (model.query_width + 2 * model.key_width + 2 * inner), expert_parameters(model) * 2 // 3


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
        products=built.activations,  # not told apart
        at_work=2 * built.hidden_size,
        pointwise=2 * built.activations,  # each is written, after as much was read
        sequence_cut=False,
        vocabulary=vocabulary,
        scores=built.hidden_size,
        matrices=built.matrices // blocks,
    )


def norm_parameters(model: ModelConfig) -> int:
    """Parameters of one norm over the residual stream: a weight, and LayerNorm's bias."""
    return model.hidden_size * (2 if model.is_gpt2 else 1)


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one decoder block: two norms, q, k, v and output projections, gate, up and down.

    Instead of the last three a mixture has its router, its experts and the shared one; GPT-2 has no gate, and
    biases everywhere. A bias that no gradient moves is not counted.
    """
    hidden, width, key_value, moe = model.hidden_size, model.query_width, model.key_width, model.moe
    attention = 2 * hidden * width + 2 * hidden * key_value
    if model.is_gpt2:
        return _block_vectors(model) + attention + 2 * hidden * model.intermediate_size
    inner = moe.shared_intermediate_size if moe.experts else model.intermediate_size
    matrices = attention + 3 * hidden * inner + moe.experts * hidden + expert_parameters(model)
    return _block_vectors(model) + matrices


def _block_vectors(model: ModelConfig) -> int:
    """Parameters of one block's norms and biases."""
    biases = (model.query_width + 2 * model.key_width) * (model.qkv_bias or model.is_gpt2)
    if model.is_gpt2:  # of the projections back into the residual stream, and of the hidden layer
        biases += 2 * model.hidden_size + model.intermediate_size
    return 2 * norm_parameters(model) + biases + 2 * model.head_size * model.qk_norm


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    sizes = sizes_of(model)
    return sizes.layers * sizes.block + sizes.embed + sizes.head


@of_the_latest
def stage_bounds(model: ModelConfig, stages: int) -> Bounds:
    """Half-open ranges of absolute layer numbers of every pipeline stage.

    By matrix products per token: a block's parameters that a token goes through, and the head's on the last
    stage; the embedding only looks up. Raises LayoutError where there are more stages than layers.
    """
    sizes = sizes_of(model)
    head = sizes.vocabulary * sizes.hidden
    return partition([float(sizes.block - sizes.idle)] * sizes.layers, 0.0, float(head), stages)


def stage_depth(model: ModelConfig, stages: int, stage: int) -> int:
    """Layers of one of ``stages`` pipeline stages."""
    start, end = stage_bounds(model, stages)[stage]
    return end - start


@of_the_latest
def stage_parameters(model: ModelConfig, stages: int, stage: int, tp: int = 1, ep: int = 1) -> float:
    """Parameters that one rank of one of ``stages`` pipeline stages holds without ZeRO.

    The embedding is on the first stage, norm and head on the last, and there a copy of a tied embedding. What
    tensor parallelism leaves whole of a mixture (its router) is not told apart.
    """
    sizes = sizes_of(model)
    block = sizes.block - sizes.experts + sizes.experts // ep
    layers = stage_depth(model, stages, stage)
    total, whole = layers * block, layers * sizes.whole_block
    if stage == 0:
        total, whole = total + sizes.embed, whole + sizes.whole_embed
    if stage == stages - 1:
        total, whole = total + sizes.head, whole + sizes.whole_head
        if stages > 1:
            total += sizes.tied  # a copy of its own
    return whole + (total - whole) / tp + _uneven(sizes, stages, stage, tp)


def tied_copy(model: ModelConfig, layout: Layout) -> float:
    """Parameters of the head's copy of a tied embedding that one rank holds without ZeRO."""
    sizes = sizes_of(model)
    if not sizes.tied or layout.stages == 1:
        return 0.0
    return sizes.tied / layout.tp + _table_surplus(sizes, layout.tp)


def _uneven(sizes: ModelSizes, stages: int, stage: int, tp: int) -> float:
    """What the first tensor-parallel rank holds more than a tp-th of tables over an uneven vocabulary."""
    if not sizes.sequence_cut:
        return 0.0
    tables = (stage == 0) + (stage == stages - 1 and (stages > 1 or not sizes.tied))
    return tables * _table_surplus(sizes, tp)


def _table_surplus(sizes: ModelSizes, tp: int) -> float:
    return (-(-sizes.vocabulary // tp) - sizes.vocabulary / tp) * sizes.hidden


def active_parameters(model: ModelConfig) -> int:
    """Parameters that a token goes through: all of a dense model, ``top_k`` experts of a mixture."""
    sizes = sizes_of(model)
    return parameter_count(model) - sizes.layers * sizes.idle


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs (forward and backward) per token: 6·N + 12·L·w·s.

    N is the global parameter count (of experts, those that a token goes through), L layers, w width of the
    query heads, s sequence length (PaLM, Chowdhery et al. 2022, appendix B; picotron's MFU formula). The
    attention term counts the full s x s square: a causal kernel does half of it, so multiply that term by 0.5
    for the operations really done. Document masks do not change the count either: kernels that take a mask
    compute what it hides all the same.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.layers * sizes.scores * sequence_length
    return float(6 * active_parameters(model) + attention)


def stage_flops_per_token(
    model: ModelConfig, sequence_length: int, stages: int, stage: int, tp: int = 1
) -> float:
    """Training FLOPs per token of one rank of a pipeline stage, in matrix products really done.

    As ``flops_per_token``, but the embedding look-up multiplies nothing, and a tied head is counted. Every
    rank computes what tensor parallelism leaves whole; of attention scores, the block's share of that.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.scores * sequence_length
    flops = stage_depth(model, stages, stage) * (6 * (sizes.block - sizes.idle) + attention)
    whole = flops * sizes.whole_block / sizes.block if sizes.whole_block else 0
    if stage == stages - 1:
        head = 6 * sizes.vocabulary * sizes.hidden
        flops, whole = flops + head, whole + (0 if sizes.sequence_cut else head)
    return whole + float(flops - whole) / tp


def rank_depths(job: JobConfig, layout: Layout, rank: int) -> list[int]:
    """Blocks of each stage of a pipeline rank, in the order of ``Layout.rank_stages``."""
    return [stage_depth(job.model, layout.stages, stage) for stage in layout.rank_stages(rank)]


def blocks_again(job: JobConfig, layout: Layout, rank: int) -> RecomputedBlocks:
    """What the layout's policy comes to on a pipeline rank, all of its stages together."""
    stages, depths = layout.rank_stages(rank), rank_depths(job, layout, rank)
    kinds = [
        kind
        for stage, depth in zip(stages, depths, strict=True)
        for kind in recomputed(layout.recompute, depth, stage)
    ]
    return RecomputedBlocks(kinds.count("full"), kinds.count("selective"), len(kinds))
