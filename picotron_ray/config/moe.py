"""Mixture of experts: what replaces the SwiGLU of every block."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from picotron_ray.config.section import Section


class MoeConfig(Section):
    """A mixture of experts in every block; each token goes to ``top_k`` of them."""

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
