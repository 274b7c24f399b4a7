"""Config of the built-in models, and what a model of your own is called by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.custom_model import IMPORT_PATH, BuiltModel, PlanConfig
from picotron_ray.models.families.registry import FAMILIES, FamilyName


class MoeConfig(Section):
    """Mixture of experts in every block; each token goes to ``top_k`` of them.

    Example::

        model:
          moe:
            experts: 8
            top_k: 2
            intermediate_size: 176
            balance: bias
    """

    experts: int = Field(default=0, ge=0, description="experts per block; 0: a dense SwiGLU instead")
    top_k: int = Field(default=2, ge=1, description="experts per token")
    intermediate_size: int = Field(default=128, ge=1, description="width of one expert's SwiGLU hidden layer")
    shared_intermediate_size: int = Field(
        default=0, ge=0, description="width of a further expert that sees every token; 0: none"
    )
    router: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="scores of a token: a softmax over the experts, or a sigmoid for each"
    )
    normalize: bool = Field(default=True, description="make the weights of a token's experts sum to 1")
    balance: Literal["none", "loss", "bias"] = Field(
        default="loss",
        description="how load is evened: an auxiliary loss per row (Fedus et al. 2021, over each row as in"
        " DeepSeek-V3), or a bias on the choice alone, moved after every step (Wang et al. 2024)",
    )
    loss_coefficient: float = Field(default=0.01, ge=0, description="weight of the auxiliary loss")
    bias_rate: float = Field(default=0.001, gt=0, description="how far a bias moves per step")
    z_coefficient: float = Field(
        default=0.0, ge=0, description="weight of the router's z-loss (Zoph et al. 2022)"
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0,
        description="assignments that an expert takes of one row, as a multiple of its even share; what is"
        " over it is dropped, last tokens first; null: none is dropped",
    )


class RopeScaling(Section):
    """Llama 3's scaling of rotary positions (Dubey et al. 2024).

    A frequency whose wavelength is above ``original_length / low_frequency_factor`` tokens is divided by
    ``factor``. One below ``original_length / high_frequency_factor`` is left. Between the two is a ramp.

    Example::

        model:
          rope_scaling:
            factor: 8.0
            low_frequency_factor: 1.0
            high_frequency_factor: 4.0
            original_length: 8192
    """

    factor: float = Field(default=1.0, ge=1, description="divisor of slow frequencies; 1: no scaling")
    low_frequency_factor: float = Field(default=1.0, gt=0, description="where scaling is full")
    high_frequency_factor: float = Field(default=4.0, gt=0, description="where scaling begins")
    original_length: int = Field(default=8192, ge=1, description="tokens per row in the first training")


class LoraConfig(Section):
    """Low-rank adapters that are trained in place of the model's own parameters (Hu et al. 2021).

    Example::

        model:
          lora:
            rank: 8
            alpha: 16
            targets: ["*.attention.w[qkvo]"]
    """

    rank: int = Field(default=0, ge=0, description="rows of each adapter's A; 0: no adapters")
    alpha: float = Field(default=16.0, gt=0, description="what an adapter gives is times alpha / rank")
    targets: tuple[str, ...] = Field(
        default=("*.attention.wq", "*.attention.wv"),
        min_length=1,
        description="patterns of the linear layers of blocks that get adapters; * stands for anything, dots"
        " included",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="must be 0: a step repeats bit by bit, so nothing is dropped"
    )


class ModelConfig(Section):
    """Model: a built-in family (a Llama-style decoder by default), or a model of your own.

    Example::

        model:
          hidden_size: 256
          intermediate_size: 704
          layers: 8
          heads: 8
          kv_heads: 4
          tie_embeddings: true
    """

    family: FamilyName = Field(
        default="llama",
        description="; ".join(f"{name}: {family.summary}" for name, family in FAMILIES.items()),
    )
    vocab_size: int = Field(
        default=264, ge=2, description="rows of the embedding; at least the tokenizer's vocabulary"
    )
    hidden_size: int = Field(default=128, ge=2, description="width of the residual stream")
    intermediate_size: int = Field(default=352, ge=1, description="width of the hidden layer of a block")
    layers: int = Field(default=4, ge=1, description="decoder blocks")
    heads: int = Field(default=4, ge=1, description="query heads")
    kv_heads: int = Field(default=2, ge=1, description="key/value heads; divides heads")
    head_dim: int | None = Field(
        default=None, ge=2, description="width of one head, an even number; null: hidden_size / heads"
    )
    qkv_bias: bool = Field(default=False, description="biases of the q, k and v projections (Qwen2)")
    qk_norm: bool = Field(
        default=False, description="RMSNorm over each head of q and k before they are turned (Qwen3)"
    )
    sliding_window: int | None = Field(
        default=None,
        ge=1,
        description="tokens that a token sees, itself included (Mistral); null: all before it",
    )
    rope_scaling: RopeScaling = Field(
        default_factory=RopeScaling, description="stretching of the rotary positions (Llama 3)"
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    max_positions: int | None = Field(
        default=None, ge=1, description="gpt2: rows of the table of learned positions, its longest sequence"
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms")
    tie_embeddings: bool = Field(default=False, description="share the embedding matrix with the output head")
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of the initial weights")
    moe: MoeConfig = Field(
        default_factory=MoeConfig, description="a mixture of experts instead of the SwiGLU"
    )
    freeze: tuple[str, ...] = Field(
        default=(),
        description="patterns of parameters that are not trained (embed.*, layers.[0-3].*); * stands for"
        " anything, dots included",
    )
    lora: LoraConfig = Field(
        default_factory=LoraConfig, description="train low-rank adapters, and freeze all else"
    )
    builder: str | None = Field(
        default=None,
        pattern=IMPORT_PATH,
        description="a model of your own: import path package.module:function of what builds it; of the keys"
        " above only vocab_size and freeze apply then",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the builder; plain data"
    )
    plan: PlanConfig = Field(default_factory=PlanConfig, description="how a model of your own is cut")
    built: BuiltModel | None = Field(default=None, description="filled in by launch; leave it out")

    def __hash__(self) -> int:  # ``arguments`` and ``tensor`` are mappings
        return hash(self.model_dump_json())

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.heads

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def depth(self) -> int:
        """Number of repeated blocks; 0 where launch has not looked into the module yet."""
        if self.builder is None:
            return self.layers
        return len(self.built.blocks) if self.built else 0
