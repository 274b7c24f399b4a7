"""The model as data: canonical parameter names, and how each is cut.

Torch-free, so that the planner's tests, the checkpoint tools and ``parallel`` can speak of a model
without building it. The names are those of :class:`picotron_ray.models.llama.Transformer`'s own
``named_parameters``: a pipeline stage keeps the absolute layer number, so nothing is renamed but the head's
copy of a tied embedding (`tied_copies`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from picotron_ray.config.schema.model import ModelConfig

Part = Literal["embed", "block", "head"]
Style = Literal[
    "vocab_embed",
    "positions",
    "sequence",
    "gather_input",
    "colwise",
    "rowwise",
    "vocab_head",
    "copy_colwise",
    "sum_rowwise",
    "mixture",
    "experts",
    "inner",
    "whole",
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
        expert: whether dimension 0 counts experts, which expert parallelism cuts.
        trained: whether a gradient moves it. What the balancing of experts moves instead is whole on every
            rank that has the layer, and has no moments.
        embedding: whether it is a table that tokens or positions look up.
        copy: whether it is what the head's pipeline stage holds of a tied embedding, which is on another
            stage: the same tensor of the state once more.
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


def _residual_norm(
    config: ModelConfig, at: str, *, layer: int | None = None, part: Part = "block"
) -> list[ParameterSpec]:
    """A norm over the residual stream: a weight, and LayerNorm's bias."""
    weight = _norm(f"{at}.weight", config.hidden_size, layer=layer, part=part)
    return [weight, replace(weight, name=f"{at}.bias", init_std=0.0)] if config.is_gpt2 else [weight]


def _block(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    """Parameters of one decoder block, in the module's own order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    width, kv = config.query_width, config.key_width
    out_std, at = _out_std(config), f"layers.{layer}"
    return [
        *_residual_norm(config, f"{at}.attention_norm", layer=layer),
        *_projection(config, f"{at}.attention.wq", width, layer),
        *_projection(config, f"{at}.attention.wk", kv, layer),
        *_projection(config, f"{at}.attention.wv", kv, layer),
        _matrix(f"{at}.attention.wo.weight", (hidden, width), 1, out_std, layer=layer),
        *([_bias(f"{at}.attention.wo.bias", hidden, None, layer)] if config.is_gpt2 else []),
        *(
            _norm(f"{at}.attention.{name}.weight", config.head_size, layer=layer)
            for name in (("q_norm", "k_norm") if config.qk_norm else ())
        ),
        *_residual_norm(config, f"{at}.mlp_norm", layer=layer),
        *_hidden_layer(config, layer, f"{at}.mlp", inner),
    ]


def _hidden_layer(config: ModelConfig, layer: int, at: str, inner: int) -> list[ParameterSpec]:
    if config.moe.experts:
        return _mixture(config, layer)
    return (_gelu if config.is_gpt2 else _swiglu)(config, layer, at, inner)


def _bias(name: str, size: int, tp_dim: int | None, layer: int) -> ParameterSpec:
    return ParameterSpec(name, (size,), layer, "block", tp_dim, False, 0.0)


def _projection(config: ModelConfig, at: str, width: int, layer: int) -> list[ParameterSpec]:
    """The weight of a q, k or v projection, and its bias where the model has one."""
    weight = _matrix(f"{at}.weight", (width, config.hidden_size), 0, config.init_std, layer=layer)
    return [weight, _bias(f"{at}.bias", width, 0, layer)] if config.qkv_bias or config.is_gpt2 else [weight]


def _swiglu(config: ModelConfig, layer: int, at: str, inner: int) -> list[ParameterSpec]:
    hidden, std, out_std = config.hidden_size, config.init_std, _out_std(config)
    return [
        _matrix(f"{at}.gate.weight", (inner, hidden), 0, std, layer=layer),
        _matrix(f"{at}.up.weight", (inner, hidden), 0, std, layer=layer),
        _matrix(f"{at}.down.weight", (hidden, inner), 1, out_std, layer=layer),
    ]


def _gelu(config: ModelConfig, layer: int, at: str, inner: int) -> list[ParameterSpec]:
    hidden = config.hidden_size
    return [
        _matrix(f"{at}.up.weight", (inner, hidden), 0, config.init_std, layer=layer),
        _bias(f"{at}.up.bias", inner, 0, layer),
        _matrix(f"{at}.down.weight", (hidden, inner), 1, _out_std(config), layer=layer),
        _bias(f"{at}.down.bias", hidden, None, layer),
    ]


def _mixture(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    """Router, stacked experts, shared expert."""
    moe, hidden, std = config.moe, config.hidden_size, config.init_std
    at, experts, inner = f"layers.{layer}.mlp", moe.experts, moe.intermediate_size

    def stacked(name: str, shape: tuple[int, ...], tp_dim: int, spread: float) -> ParameterSpec:
        return ParameterSpec(f"{at}.experts.{name}", shape, layer, "block", tp_dim, True, spread, expert=True)

    table = [ParameterSpec(f"{at}.router.weight", (experts, hidden), layer, "block", None, True, std)]
    if moe.balance == "bias":
        table.append(
            ParameterSpec(f"{at}.router.bias", (experts,), layer, "block", None, False, 0.0, trained=False)
        )
    table += [
        stacked("gate", (experts, inner, hidden), 1, std),
        stacked("up", (experts, inner, hidden), 1, std),
        stacked("down", (experts, hidden, inner), 2, _out_std(config)),
    ]
    if moe.shared_intermediate_size:
        table += _swiglu(config, layer, f"{at}.shared", moe.shared_intermediate_size)
    return table


def _out_std(config: ModelConfig) -> float:
    """Spread of matrices that write into the residual stream: smaller by sqrt(2 x layers).

    So its variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3).
    """
    return config.init_std / math.sqrt(2 * config.layers)


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order.

    With tied embeddings there is no ``head.weight``: the head reads ``embed.weight``, or in a pipeline a copy
    of it (`tied_copies`).
    """
    embedding = (config.vocab_size, config.hidden_size)
    first = ParameterSpec("embed.weight", embedding, None, "embed", 0, True, config.init_std, embedding=True)
    table = [first]
    if config.max_positions is not None:
        shape = (config.max_positions, config.hidden_size)
        table.append(
            ParameterSpec(
                "positions.weight", shape, None, "embed", None, True, config.init_std, embedding=True
            )
        )
    for layer in range(config.layers):
        table += _block(config, layer)
    table += _residual_norm(config, "norm", part="head")
    if not config.tie_embeddings:
        table.append(_matrix("head.weight", embedding, 0, config.init_std, part="head"))
    return tuple(table)


def tied_copies(config: ModelConfig) -> dict[str, ParameterSpec]:
    """By the module's own name, what a pipeline stage with the head and without the embedding holds of it."""
    if not config.tie_embeddings:
        return {}
    embedding = parameter_table(config)[0]
    return {"head.weight": replace(embedding, part="head", copy=True)}


def tensor_parallel_plan(config: ModelConfig) -> tuple[tuple[str, Style], ...]:
    """How tensor and sequence parallelism cut each module: (module name with ``*`` for a layer, style).

    Styles (Korthikanti et al. 2022: activations between blocks are cut over the sequence):
        vocab_embed: rows of the vocabulary cut; whole tokens in, output cut over the sequence.
        positions: nothing is cut; each rank adds the rows of its part of the sequence.
        sequence: a norm whose weight is whole and whose activations are cut over the sequence.
        gather_input: the module's input, cut over the sequence, is gathered before it.
        colwise: output features cut (weight dim 0); whole input, local output.
        rowwise: input features cut (weight dim 1); output reduce-scattered over the sequence, then the bias.
        vocab_head: input gathered over the sequence, output logits cut over the vocabulary.
        mixture: input gathered over the sequence, output reduce-scattered over it.
        experts: every stacked expert cut in its inner width.
        whole: nothing is cut; each rank uses it for its own heads.
        inner: input features cut, as rowwise, but the partial sums are left to whoever adds them up.
    A style whose module a pipeline stage lacks is simply not applied there.
    """
    return (
        ("embed", "vocab_embed"),
        *((name, "positions") for name in position_modules(config)),
        ("layers.*.attention_norm", "sequence"),
        ("layers.*.attention", "gather_input"),
        ("layers.*.attention.wq", "colwise"),
        ("layers.*.attention.wk", "colwise"),
        ("layers.*.attention.wv", "colwise"),
        ("layers.*.attention.wo", "rowwise"),
        *((f"layers.*.attention.{name}", "whole") for name in ("q_norm", "k_norm") if config.qk_norm),
        ("layers.*.mlp_norm", "sequence"),
        *(_MIXTURE_PLAN if config.moe.experts else _GELU_PLAN if config.is_gpt2 else _SWIGLU_PLAN),
        ("norm", "sequence"),
        ("head", "vocab_head"),
    )


_SWIGLU_PLAN: tuple[tuple[str, Style], ...] = (
    ("layers.*.mlp", "gather_input"),
    ("layers.*.mlp.gate", "colwise"),
    ("layers.*.mlp.up", "colwise"),
    ("layers.*.mlp.down", "rowwise"),
)
_GELU_PLAN: tuple[tuple[str, Style], ...] = (
    ("layers.*.mlp", "gather_input"),
    ("layers.*.mlp.up", "colwise"),
    ("layers.*.mlp.down", "rowwise"),
)
_MIXTURE_PLAN: tuple[tuple[str, Style], ...] = (
    ("layers.*.mlp", "mixture"),
    ("layers.*.mlp.experts", "experts"),
    ("layers.*.mlp.shared.gate", "colwise"),
    ("layers.*.mlp.shared.up", "colwise"),
    ("layers.*.mlp.shared.down", "inner"),
)


def attention_modules() -> tuple[str, ...]:
    """Modules whose ``kernel`` and ``shard`` context parallelism sets; ``*`` stands for a layer's number."""
    return ("layers.*.attention",)


def joint_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules with projections of one input that ``fuse()`` makes one product; ``*`` is a layer's number."""
    if config.is_gpt2:
        return ("layers.*.attention",)
    hidden = ("layers.*.mlp.experts", "layers.*.mlp.shared") if config.moe.experts else ("layers.*.mlp",)
    return ("layers.*.attention", *hidden)


def compiled_functions(config: ModelConfig) -> dict[str, tuple[str, str]]:
    """Functions that can be compiled by themselves: name → (modules, ``*`` a layer's number; their field)."""
    norm = {"norm": ("layers.*", "added_norm")}
    dense = not config.is_gpt2 and not config.moe.experts
    return {**norm, "activation": ("layers.*.mlp", "activation")} if dense else norm


def position_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules that add learned positions, whose ``shard`` context parallelism sets."""
    return () if config.max_positions is None else ("positions",)


def mixture_modules(config: ModelConfig) -> tuple[str, ...]:
    """Modules that are mixtures of experts; ``*`` stands for a layer's number."""
    return ("layers.*.mlp",) if config.moe.experts else ()
