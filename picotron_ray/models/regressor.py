"""A small network of numbers, for tasks of regression: what ``model.builder`` may name."""

from __future__ import annotations

from typing import Literal

from torch import nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def build(
    inputs: int = 1,
    outputs: int = 1,
    width: int = 40,
    layers: int = 2,
    activation: Literal["relu", "tanh"] = "relu",
) -> nn.Module:
    """Build a multilayer perceptron of ``[..., inputs] → [..., outputs]``.

    Its defaults are the network of Finn et al. 2017 for waves: two hidden layers of 40, ReLU.
    """
    parts: list[nn.Module] = []
    for layer in range(layers):
        parts += [nn.Linear(inputs if layer == 0 else width, width), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, nn.Linear(width if layers else inputs, outputs))
