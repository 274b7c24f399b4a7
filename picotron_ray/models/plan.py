"""The model as data: canonical parameter names, how each is cut, and where pipeline stages are cut.

Torch-free, so that the planner's tests, the checkpoint tools and ``parallel`` can speak of a model
without building it. The names are those of :class:`picotron_ray.models.llama.Transformer`'s own
``named_parameters``: a pipeline stage keeps the absolute layer number, so no renaming happens anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from picotron_ray.config.job import ModelConfig

Part = Literal["embed", "block", "head"]
Style = Literal[
    "vocab_embed",
    "sequence",
    "gather_input",
    "colwise",
    "rowwise",
    "vocab_head",
    "copy_colwise",
    "sum_rowwise",
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
        decay: whether weight decay applies (not to norms).
        init_std: standard deviation of the normal initial value; None: all ones. Not used for a model of the
            user's own, which initialises itself.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    part: Part
    tp_dim: int | None
    decay: bool
    init_std: float | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """Which tokens of every row a context-parallel rank holds: the ``index``-th of ``parts``.

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


def _matrix(
    name: str,
    shape: tuple[int, int],
    tp_dim: int,
    std: float,
    *,
    layer: int | None = None,
    part: Part = "block",
) -> ParameterSpec:
    return ParameterSpec(name, shape, layer, part, tp_dim, True, std)


def _norm(name: str, size: int, *, layer: int | None = None, part: Part = "block") -> ParameterSpec:
    return ParameterSpec(name, (size,), layer, part, None, False, None)


def _block(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    """Parameters of one decoder block, in the module's own order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv = config.kv_heads * (hidden // config.heads)
    std = config.init_std
    # Matrices that write into the residual stream start smaller by sqrt(2 x layers), so that its
    # variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3).
    out_std = std / math.sqrt(2 * config.layers)
    at = f"layers.{layer}"
    return [
        _norm(f"{at}.attention_norm.weight", hidden, layer=layer),
        _matrix(f"{at}.attention.wq.weight", (hidden, hidden), 0, std, layer=layer),
        _matrix(f"{at}.attention.wk.weight", (kv, hidden), 0, std, layer=layer),
        _matrix(f"{at}.attention.wv.weight", (kv, hidden), 0, std, layer=layer),
        _matrix(f"{at}.attention.wo.weight", (hidden, hidden), 1, out_std, layer=layer),
        _norm(f"{at}.mlp_norm.weight", hidden, layer=layer),
        _matrix(f"{at}.mlp.gate.weight", (inner, hidden), 0, std, layer=layer),
        _matrix(f"{at}.mlp.up.weight", (inner, hidden), 0, std, layer=layer),
        _matrix(f"{at}.mlp.down.weight", (hidden, inner), 1, out_std, layer=layer),
    ]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order.

    With tied embeddings there is no ``head.weight``: the head reads ``embed.weight``.
    """
    embedding = (config.vocab_size, config.hidden_size)
    table = [_matrix("embed.weight", embedding, 0, config.init_std, part="embed")]
    for layer in range(config.layers):
        table += _block(config, layer)
    table.append(_norm("norm.weight", config.hidden_size, part="head"))
    if not config.tie_embeddings:
        table.append(_matrix("head.weight", embedding, 0, config.init_std, part="head"))
    return tuple(table)


def tensor_parallel_plan() -> tuple[tuple[str, Style], ...]:
    """How tensor and sequence parallelism cut each module: (module name with ``*`` for a layer, style).

    Styles (Korthikanti et al. 2022: activations between blocks are cut over the sequence):
        vocab_embed: rows of the vocabulary cut; whole tokens in, output cut over the sequence.
        sequence: a norm whose weight is whole and whose activations are cut over the sequence.
        gather_input: the module's input, cut over the sequence, is gathered before it.
        colwise: output features cut (weight dim 0); whole input, local output.
        rowwise: input features cut (weight dim 1); output reduce-scattered over the sequence.
        vocab_head: input gathered over the sequence, output logits cut over the vocabulary.
    A style whose module a pipeline stage lacks is simply not applied there.
    """
    return (
        ("embed", "vocab_embed"),
        ("layers.*.attention_norm", "sequence"),
        ("layers.*.attention", "gather_input"),
        ("layers.*.attention.wq", "colwise"),
        ("layers.*.attention.wk", "colwise"),
        ("layers.*.attention.wv", "colwise"),
        ("layers.*.attention.wo", "rowwise"),
        ("layers.*.mlp_norm", "sequence"),
        ("layers.*.mlp", "gather_input"),
        ("layers.*.mlp.gate", "colwise"),
        ("layers.*.mlp.up", "colwise"),
        ("layers.*.mlp.down", "rowwise"),
        ("norm", "sequence"),
        ("head", "vocab_head"),
    )


def attention_modules() -> tuple[str, ...]:
    """Modules whose ``kernel`` and ``shard`` context parallelism sets; ``*`` stands for a layer's number."""
    return ("layers.*.attention",)


def stage_layers(layers: int, pp: int, stage: int) -> tuple[int, int]:
    """Half-open range of absolute layer numbers of one pipeline stage (0-based).

    Uneven remainders go to the first stages: the last one already computes the head.
    """
    share, extra = divmod(layers, pp)
    first = stage * share + min(stage, extra)
    return first, first + share + (stage < extra)
