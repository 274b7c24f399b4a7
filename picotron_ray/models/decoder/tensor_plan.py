"""Tensor and sequence parallelism of decoders as data, from parts that families share. Torch-free.

Names are dotted, ``*`` stands for a layer's number. A style whose module a pipeline stage lacks is simply not
applied there.

Styles (Korthikanti et al. 2022: activations between blocks are cut over the sequence):
    vocab_embed: rows of the vocabulary cut; whole tokens in, output cut over the sequence.
    positions: nothing is cut; each rank adds the rows of its part of the sequence.
    sequence: a norm whose weight is whole and whose activations are cut over the sequence.
    gather_input: the module's input, cut over the sequence, is gathered before it.
    sinks: an attention's sinks, cut with its heads.
    colwise: output features cut (weight dim 0); whole input, local output.
    rowwise: input features cut (weight dim 1); output reduce-scattered over the sequence, then the bias.
    vocab_head: input gathered over the sequence, output logits cut over the vocabulary.
    mixture: input gathered over the sequence, output reduce-scattered over it.
    experts: every stacked expert cut in its inner width.
    whole: nothing is cut; each rank uses it for its own heads.
    cut_norm: a norm over features that colwise cut (weight dim 0); its sum of squares is that of all ranks.
    inner: input features cut, as rowwise, but the partial sums are left to whoever adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from picotron_ray.models.parameters import Style

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

TensorPlan = tuple[tuple[str, Style], ...]

ATTENTION_MODULES = ("layers.*.attention",)
"""Modules whose ``kernel`` and ``shard`` context parallelism sets."""

ATTENTION: TensorPlan = (
    ("layers.*.attention", "gather_input"),
    ("layers.*.attention.wq", "colwise"),
    ("layers.*.attention.wk", "colwise"),
    ("layers.*.attention.wv", "colwise"),
    ("layers.*.attention.wo", "rowwise"),
)
NORMS: TensorPlan = (("layers.*.attention_norm", "sequence"), ("layers.*.mlp_norm", "sequence"))
POST_NORMS: TensorPlan = (
    ("layers.*.post_attention_norm", "sequence"),
    ("layers.*.post_mlp_norm", "sequence"),
)
HEAD_NORMS: TensorPlan = (("layers.*.attention.q_norm", "whole"), ("layers.*.attention.k_norm", "whole"))
SWIGLU: TensorPlan = (
    ("layers.*.mlp", "gather_input"),
    ("layers.*.mlp.gate", "colwise"),
    ("layers.*.mlp.up", "colwise"),
    ("layers.*.mlp.down", "rowwise"),
)
MIXTURE: TensorPlan = (
    ("layers.*.mlp", "mixture"),
    ("layers.*.mlp.experts", "experts"),
    ("layers.*.mlp.shared.gate", "colwise"),
    ("layers.*.mlp.shared.up", "colwise"),
    ("layers.*.mlp.shared.down", "inner"),
)


def decoder_plan(config: ModelConfig, *parts: TensorPlan) -> TensorPlan:
    """The styles of all modules: those outside the blocks, and those of a block in ``parts``."""
    return (
        ("embed", "vocab_embed"),
        *((name, "positions") for name in position_modules(config)),
        *(style for part in parts for style in part),
        ("norm", "sequence"),
        ("head", "vocab_head"),
    )


def mixture_layers(config: ModelConfig) -> range | None:
    """Numbers of the blocks with a mixture of experts; None: all blocks are alike."""
    first = config.moe.first_dense_layers
    return range(first, config.layers) if first else None


def at_layers(names: Iterable[str], layers: Iterable[int] | None) -> tuple[str, ...]:
    """Names of modules of these blocks alone; None: of all."""
    if layers is None:
        return tuple(names)
    return tuple(name.replace("*", str(layer), 1) for layer in layers for name in names)


def styles_at(plan: TensorPlan, layers: Iterable[int] | None) -> TensorPlan:
    """The styles of modules of these blocks alone; None: of all."""
    if layers is None:
        return plan
    return tuple((name.replace("*", str(layer), 1), style) for layer in layers for name, style in plan)


def position_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules that add learned positions, whose ``shard`` context parallelism sets."""
    return () if config.max_positions is None else ("positions",)


def mixture_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules that are mixtures of experts."""
    return at_layers(("layers.*.mlp",), mixture_layers(config)) if config.moe.experts else ()


def swiglu_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with gate and up projections of one input; those of a mixture are its experts."""
    if config.moe.experts:
        mixed = at_layers(("layers.*.mlp.experts", "layers.*.mlp.shared"), mixture_layers(config))
        return (*mixed, *at_layers(("layers.*.mlp",), range(config.moe.first_dense_layers)))
    return ("layers.*.mlp",)
