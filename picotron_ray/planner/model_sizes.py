"""Sizes of a model: parameters and floating-point operations, from its config alone. Torch-free.

For our decoders the family says them (`models.families`), tested against the built module parameter by
parameter; for a model of your own they come from the table that launch made from the built module
(``model.built``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig, MoeConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.recompute_policy import RecomputedBlocks, recomputed
from picotron_ray.models.families.registry import family_of, finetuned_table, is_adapter
from picotron_ray.models.sizes import ModelSizes
from picotron_ray.planner.stage_partition import Bounds, cut_at, partition

Config = TypeVar("Config")
Result = TypeVar("Result")
Rest = ParamSpec("Rest")


def remember_latest(
    function: Callable[Concatenate[Config, Rest], Result],
) -> Callable[Concatenate[Config, Rest], Result]:
    """Remember the results of a pure function for the config that it was last called with.

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
        key = (rest, tuple(sorted(named.items()))) if named else rest
        results = known[1]
        if key not in results:
            results[key] = function(config, *rest, **named)
        return results[key]

    return remembered


@remember_latest
def sizes_of(model: ModelConfig) -> ModelSizes:
    """Sizes of the model that a config describes.

    Raises ConfigError for a model of your own that launch has not looked into yet.
    """
    if model.builder is None:
        return family_of(model).sizes(model)
    if model.built is None:
        raise ConfigError(
            f"model.builder: the sizes of {model.builder} are known only once launch has built it"
        )
    return _built_sizes(model.built, model.vocab_size)


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


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    return sizes_of(model).parameters


Cut = int | tuple[int, ...]
"""Number of pipeline stages, which the planner partitions; or the blocks of each (``Layout.cut``)."""


@remember_latest
def stage_bounds(model: ModelConfig, cut: Cut) -> Bounds:
    """Half-open ranges of absolute layer numbers of every pipeline stage.

    A number of stages is partitioned by matrix products per token: a block's parameters that a token goes
    through, and the head's on the last stage; the embedding only looks up.

    Raises LayoutError where there are more stages than layers, or the blocks of a cut are not the model's.
    """
    sizes = sizes_of(model)
    if isinstance(cut, tuple):
        return cut_at(cut, sizes.layers)
    blocks = [float(sizes.first_block)] * sizes.first
    blocks += [float(sizes.block - sizes.idle)] * (sizes.layers - sizes.first)
    return partition(blocks, 0.0, float(_head(sizes)), cut)


def _head(sizes: ModelSizes) -> int:
    return sizes.vocabulary * sizes.hidden


def head_blocks(model: ModelConfig) -> float:
    """Cost of the head in blocks, by matrix products per token."""
    sizes = sizes_of(model)
    return _head(sizes) / (sizes.block - sizes.idle)


def stage_count(cut: Cut) -> int:
    """Pipeline stages of a cut."""
    return cut if isinstance(cut, int) else len(cut)


def stage_depth(model: ModelConfig, cut: Cut, stage: int) -> int:
    """Layers of one pipeline stage."""
    start, end = stage_bounds(model, cut)[stage]
    return end - start


def stage_mixtures(model: ModelConfig, cut: Cut, stage: int) -> int:
    """Layers of one pipeline stage without those of a decoder's first ones that are dense beside mixtures."""
    return sizes_of(model).mixtures(*stage_bounds(model, cut)[stage])


@remember_latest
def stage_parameters(model: ModelConfig, cut: Cut, stage: int, tp: int = 1, ep: int = 1) -> float:
    """Parameters that one rank of a pipeline stage holds without ZeRO.

    The embedding is on the first stage, norm and head on the last, and there a copy of a tied embedding. What
    tensor parallelism leaves whole of a mixture (its router) is not told apart.
    """
    sizes = sizes_of(model)
    start, end = stage_bounds(model, cut)[stage]
    elsewhere = sizes.mixtures(start, end) * (sizes.experts - sizes.experts // ep)
    total, whole = sizes.of_blocks(start, end) - elsewhere, (end - start) * sizes.whole_block
    return whole + (total - whole) / tp + sum(end_parameters(model, cut, stage, tp))


class EndParameters(NamedTuple):
    """Parameters of a pipeline stage before its blocks, and after them."""

    embedding: float
    head: float


def end_parameters(model: ModelConfig, cut: Cut, stage: int, tp: int = 1) -> EndParameters:
    """Parameters of one rank of a stage beside blocks; a tied table is the embedding's if both are here."""
    sizes, stages = sizes_of(model), stage_count(cut)
    surplus = _table_surplus(sizes, tp) if sizes.sequence_cut else 0.0
    embedding = head = 0.0
    if stage == 0:
        embedding = sizes.whole_embed + (sizes.embed - sizes.whole_embed) / tp + surplus
    if stage == stages - 1:
        copy = sizes.tied if stages > 1 else 0
        head = sizes.whole_head + (sizes.head - sizes.whole_head + copy) / tp
        head += surplus if stages > 1 or not sizes.tied else 0.0
    return EndParameters(embedding, head)


def expert_padding(moe: MoeConfig, hidden: int, tp: int, ep: int, shards: int) -> float:
    """Elements of the fullest rank's part of a stack of experts, as a multiple of an equal part.

    Where ``shards`` ranks divide neither a rank's experts nor a dimension within them, ZeRO pads their number
    (`parallel.shard_boxes.zero_dim`).

    >>> expert_padding(MoeConfig(experts=16, intermediate_size=96), 64, 1, 1, 48)
    1.0
    >>> expert_padding(MoeConfig(experts=16, intermediate_size=96), 64, 1, 1, 63)
    3.9375
    """
    here = moe.experts // ep
    inner = moe.intermediate_size % (tp * shards)
    if not here or here % shards == 0 or inner == 0 or hidden % shards == 0:
        return 1.0
    return -(-here // shards) * shards / here


def padded_elements(job: JobConfig, layout: Layout) -> float:
    """Elements that ZeRO adds to one rank's experts of a block, whole, to cut them evenly."""
    if not layout.zero or layout.expert_shards == 1:
        return 0.0
    sizes = sizes_of(job.model)
    padding = expert_padding(job.model.moe, sizes.hidden, layout.tp, layout.ep, layout.expert_shards)
    return (padding - 1.0) * (sizes.experts // layout.ep) / layout.tp


class Trained(NamedTuple):
    """Trained parameters of a pipeline stage, as shares of its parameters without adapters.

    Fields:
        share: of elements that are trained, adapters among them.
        added: of elements of adapters.
    """

    share: float
    added: float


EVERYTHING = Trained(1.0, 0.0)


@remember_latest
def trained_of_stage(model: ModelConfig, cut: Cut, stage: int) -> Trained:
    """Shares that ``model.freeze`` and ``model.lora`` leave to be trained of one pipeline stage."""
    if not (model.freeze or model.lora.rank):
        return EVERYTHING
    first, last = stage_bounds(model, cut)[stage]
    final = stage == stage_count(cut) - 1
    base = trained = added = 0
    for part, layer, count, moves, adapter in _finetuned(model):
        here = {"embed": stage == 0, "head": final, "block": first <= (layer or 0) < last}[part]
        if here or (part == "embed" and final and model.tie_embeddings):  # the head's copy
            base, added = base + (not adapter) * count, added + adapter * count
            trained += moves * count
    return Trained(trained / base, added / base) if base else EVERYTHING


def trained_of_rank(model: ModelConfig, layout: Layout, rank: int) -> Trained:
    """As `trained_of_stage`, the mean over the stages of a pipeline rank."""
    kinds = [trained_of_stage(model, layout.cut, stage) for stage in layout.rank_stages(rank)]
    return Trained(*(sum(numbers) / len(kinds) for numbers in zip(*kinds, strict=True)))


def trained_elements(model: ModelConfig) -> int:
    """Elements of all parameters that are trained, adapters among them."""
    if not (model.freeze or model.lora.rank):
        return parameter_count(model)
    return sum(count for _, _, count, moves, _ in _finetuned(model) if moves)


def trains_embedding(model: ModelConfig) -> bool:
    """Whether the table that embeds tokens has a gradient."""
    if not (model.freeze or model.lora.rank):
        return True
    table = sizes_of(model).vocabulary * sizes_of(model).hidden
    return any(moves and part == "embed" and count == table for part, _, count, moves, _ in _finetuned(model))


def _finetuned(model: ModelConfig) -> Iterator[tuple[str, int | None, int, bool, bool]]:
    """Part, layer and elements of each parameter, and whether it is trained, and an adapter's."""
    built = model.built
    if model.builder is None:
        for spec in finetuned_table(model):
            if spec.trained or spec.frozen:
                yield spec.part, spec.layer, spec.numel, spec.trained, is_adapter(spec.name)
    elif built is not None:
        for name, shape in built.parameters:
            part, layer = built.part_of(name)
            still = any(fnmatchcase(name, pattern) for pattern in model.freeze)
            yield part, layer, math.prod(shape), not still, False


def tied_copy(model: ModelConfig, layout: Layout) -> float:
    """Parameters of the head's copy of a tied embedding that one rank holds without ZeRO."""
    sizes = sizes_of(model)
    if not sizes.tied or layout.stages == 1:
        return 0.0
    return sizes.tied / layout.tp + _table_surplus(sizes, layout.tp)


def _table_surplus(sizes: ModelSizes, tp: int) -> float:
    return (-(-sizes.vocabulary // tp) - sizes.vocabulary / tp) * sizes.hidden


def active_parameters(model: ModelConfig) -> int:
    """Parameters that a token goes through: all of a dense model, ``top_k`` experts of a mixture."""
    sizes = sizes_of(model)
    return sizes.parameters - sizes.mixtures(0, sizes.layers) * sizes.idle


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs (forward and backward) per token: 6·N + 12·L·w·s.

    N is the global parameter count (of experts, those that a token goes through), L layers, w width of the
    query heads, s sequence length (PaLM, Chowdhery et al. 2022, appendix B; picotron's MFU formula). The
    attention term counts the full s x s square: a causal kernel does half of it, so multiply that term by 0.5
    for the operations really done. Document masks do not change the count either: kernels that take a mask
    compute what it hides all the same. A frozen parameter has no gradient, which is a third of its 6; those
    of adapters count with the others.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.layers * sizes.scores * sequence_length
    return float(6 * active_parameters(model) + attention) - _saved_flops(model)


def _saved_flops(model: ModelConfig) -> float:
    """FLOPs per token that frozen parameters save, less those of adapters."""
    if not (model.freeze or model.lora.rank):
        return 0.0
    total = parameter_count(model)
    passed = active_parameters(model) / total  # of a mixture, all parameters alike
    added = sum(count for *_, count, _, adapter in _finetuned(model) if adapter)
    still = total + added - trained_elements(model)
    return 2.0 * still * passed - 6.0 * added


def stage_flops_per_token(
    model: ModelConfig, sequence_length: int, cut: Cut, stage: int, tp: int = 1
) -> float:
    """Training FLOPs per token of one rank of a pipeline stage, in matrix products really done.

    As ``flops_per_token``, but the embedding look-up multiplies nothing, and a tied head is counted. Every
    rank computes what tensor parallelism leaves whole; of attention scores, the block's share of that.
    """
    sizes = sizes_of(model)
    attention = 12 * sizes.scores * sequence_length
    start, end = stage_bounds(model, cut)[stage]
    through = sizes.of_blocks(start, end) - sizes.mixtures(start, end) * sizes.idle
    flops = 6 * through + (end - start) * attention
    whole = flops * sizes.whole_block / sizes.block if sizes.whole_block else 0
    if stage == stage_count(cut) - 1:
        head = 6 * _head(sizes)
        flops, whole = flops + head, whole + (0 if sizes.sequence_cut else head)
    return whole + float(flops - whole) / tp


def rank_depths(job: JobConfig, layout: Layout, rank: int) -> list[int]:
    """Blocks of each stage of a pipeline rank, in the order of ``Layout.rank_stages``."""
    return [stage_depth(job.model, layout.cut, stage) for stage in layout.rank_stages(rank)]


def blocks_again(job: JobConfig, layout: Layout, rank: int) -> RecomputedBlocks:
    """Blocks that a pipeline rank computes again by the layout's policy, all of its stages together."""
    stages, depths = layout.rank_stages(rank), rank_depths(job, layout, rank)
    return RecomputedBlocks.of_stages(
        RecomputedBlocks.of(recomputed(layout.recompute, depth, stage))
        for stage, depth in zip(stages, depths, strict=True)
    )


def mixtures_again(job: JobConfig, layout: Layout, rank: int) -> RecomputedBlocks:
    """As `blocks_again`, without a decoder's first blocks that are dense beside mixtures."""
    first, cut = sizes_of(job.model).first, layout.cut
    return RecomputedBlocks.of_stages(
        RecomputedBlocks.of(recomputed(layout.recompute, end - start, stage)[max(0, first - start) :])
        for stage in layout.rank_stages(rank)
        for start, end in [stage_bounds(job.model, cut)[stage]]
    )
