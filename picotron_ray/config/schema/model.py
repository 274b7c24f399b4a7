"""Config of the built-in models, and what a model of your own is called by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.custom_model import IMPORT_PATH, BuiltModel, PlanConfig
from picotron_ray.models.families.registry import FAMILIES, FamilyName


class MoeConfig(Section):
    """Mixture of experts in the blocks; each token goes to ``top_k`` of them.

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
    scaling: float = Field(
        default=1.0, gt=0, description="factor of those weights, after they were normalized (DeepSeek)"
    )
    groups: int = Field(
        default=1,
        ge=1,
        description="groups of consecutive experts, of which a token goes to the best alone (DeepSeek);"
        " 1: it goes to any expert",
    )
    top_k_groups: int = Field(default=1, ge=1, description="groups that a token's experts are chosen from")
    group_score: Literal["max", "top-2"] = Field(
        default="max",
        description="score of a group: its best expert's (DeepSeek-V2), or the sum of its best two (V3)",
    )
    first_dense_layers: int = Field(
        default=0, ge=0, description="deepseek: blocks before the first mixture, with a dense SwiGLU"
    )
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


class LatentConfig(Section):
    """Multi-head latent attention of ``model.family=deepseek`` (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    Keys and values come from a latent vector of a token, queries from another one or from the token itself. A
    part of each query, and one key that all heads share, carry the positions.

    Example::

        model:
          family: deepseek
          kv_heads: 4
          mla:
            kv_lora_rank: 32
            qk_nope_head_dim: 32
            qk_rope_head_dim: 16
            v_head_dim: 32
    """

    q_lora_rank: int | None = Field(
        default=None, ge=1, description="width of the queries' latent vector; null: there is none"
    )
    kv_lora_rank: int = Field(
        default=0, ge=0, description="width of the latent vector of keys and values; 0: no latent attention"
    )
    qk_nope_head_dim: int = Field(
        default=32, ge=1, description="width of the part of a query or key head without positions"
    )
    qk_rope_head_dim: int = Field(
        default=16, ge=2, description="width of the part with rotary positions, an even number"
    )
    v_head_dim: int = Field(
        default=32, ge=1, description="width of a value head, at most that of a query head"
    )
    mscale_all_dim: float = Field(
        default=0.0,
        ge=0,
        description="how far attention is made sharper where model.rope_scaling stretches: scores are"
        " multiplied by (0.1 x mscale_all_dim x ln(factor) + 1) squared; 0: they are not",
    )

    @property
    def head_size(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


RopeType = Literal["llama3", "linear", "dynamic", "yarn"]


class RopeScaling(Section):
    """Stretching of rotary positions over rows longer than those of the first training.

    - ``llama3`` (Dubey et al. 2024): a frequency whose wavelength is above ``original_length /
      low_frequency_factor`` tokens is divided by ``factor``. One below ``original_length /
      high_frequency_factor`` is left. Between the two is a ramp.
    - ``linear`` (Chen et al. 2023): every frequency is divided by ``factor``.
    - ``dynamic`` (NTK-aware): the base grows once a row is longer than ``original_length``.
    - ``yarn`` (Peng et al. 2023): as llama3, by the turns within ``original_length``, with another ramp, and
      attention is made sharper.

    Example::

        model:
          rope_scaling:
            factor: 8.0
            low_frequency_factor: 1.0
            high_frequency_factor: 4.0
            original_length: 8192
    """

    type: RopeType = Field(
        default="llama3",
        description="llama3, slow frequencies are divided; linear, all are; dynamic, the base grows with the"
        " row (NTK); yarn, by the turns within the original length, and attention is made sharper",
    )
    factor: float = Field(default=1.0, ge=1, description="divisor of slow frequencies; 1: no scaling")
    low_frequency_factor: float = Field(default=1.0, gt=0, description="llama3: where scaling is full")
    high_frequency_factor: float = Field(default=4.0, gt=0, description="llama3: where scaling begins")
    original_length: int = Field(default=8192, ge=1, description="tokens per row in the first training")
    beta_fast: float = Field(
        default=32.0, gt=0, description="yarn: turns within the original length from which a frequency stays"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="yarn: turns within the original length below which it is divided"
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="yarn: what cosine and sine are multiplied by; null: 0.1 ln(factor) + 1",
    )
    truncate: bool = Field(default=True, description="yarn: the ramp begins and ends at whole pairs")


def rotary_width(head: int, part: float) -> int:
    """Elements of a head of so many that turn, where a part of it does; rounded down."""
    return int(head * part)


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
    full_attention_every: int | None = Field(
        default=None,
        ge=2,
        description="gemma2, gemma3, gpt_oss: every so many blocks one sees all tokens before it, whatever"
        " sliding_window says; null: none does",
    )
    query_pre_attn_scalar: int | None = Field(
        default=None,
        ge=1,
        description="gemma2, gemma3: scores are divided by its root; null: by that of the head's width",
    )
    attention_softcap: float | None = Field(
        default=None,
        gt=0,
        description="gemma2: bound that attention scores come near to, cap x tanh(score / cap); null: none",
    )
    logit_softcap: float | None = Field(
        default=None, gt=0, description="gemma2, gemma3: the same of the output's logits; null: none"
    )
    rope_scaling: RopeScaling = Field(
        default_factory=RopeScaling,
        description="stretching of the rotary positions (Llama 3, linear, dynamic NTK, YaRN)",
    )
    rope_theta: float = Field(default=10_000.0, gt=0, description="base of the rotary frequencies")
    rope_local_theta: float | None = Field(
        default=None,
        gt=0,
        description="gemma3: base of the unstretched frequencies of blocks with a window; null: as all",
    )
    partial_rotary_factor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of each head that turns, from its beginning (Phi, GPT-NeoX)",
    )
    max_positions: int | None = Field(
        default=None, ge=1, description="gpt2: rows of the table of learned positions, its longest sequence"
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the norms")
    tie_embeddings: bool = Field(default=False, description="share the embedding matrix with the output head")
    init_std: float = Field(default=0.02, gt=0, description="standard deviation of the initial weights")
    moe: MoeConfig = Field(
        default_factory=MoeConfig, description="a mixture of experts instead of the SwiGLU"
    )
    mla: LatentConfig = Field(
        default_factory=LatentConfig, description="deepseek: attention by latent vectors"
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
    loss: str | None = Field(
        default=None,
        pattern=IMPORT_PATH,
        description="loss of a model of your own: import path package.module:function of a function (logits"
        " [batch, seq, vocab], targets [batch, seq]) that gives losses of tokens [batch, seq]; null:"
        " cross-entropy",
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
        """Width of one query or key head."""
        return (
            self.mla.head_size if self.mla.kv_lora_rank else self.head_dim or self.hidden_size // self.heads
        )

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Width of all key heads together, and of all value heads as kernels get them."""
        return self.kv_heads * self.head_size

    @property
    def value_width(self) -> int:
        """Width of what attention gives to its output projection."""
        return self.heads * (self.mla.v_head_dim if self.mla.kv_lora_rank else self.head_size)

    @property
    def depth(self) -> int:
        """Number of repeated blocks; 0 where launch has not looked into the module yet."""
        if self.builder is None:
            return self.layers
        return len(self.built.blocks) if self.built else 0
