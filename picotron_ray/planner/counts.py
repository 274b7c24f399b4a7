"""Analytic sizes of the Llama-style decoder: parameters and floating-point operations. Torch-free.

Tested against the built module, parameter by parameter count.
"""

from __future__ import annotations

from picotron_ray.config.job import ModelConfig


def head_size(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.hidden_size // model.heads


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one decoder block: two norms, q, k, v and output projections, gate, up and down."""
    hidden, key_value = model.hidden_size, model.kv_heads * head_size(model)
    attention = 2 * hidden * hidden + 2 * hidden * key_value
    return 2 * hidden + attention + 3 * hidden * model.intermediate_size


def embedding_parameters(model: ModelConfig) -> int:
    """Parameters of the token embedding."""
    return model.vocab_size * model.hidden_size


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model; a tied embedding counts once."""
    matrices = 1 if model.tie_embeddings else 2
    return model.layers * block_parameters(model) + matrices * embedding_parameters(model) + model.hidden_size


def stage_parameters(model: ModelConfig, pp: int, stage: int) -> int:
    """Parameters of one of ``pp`` stages: the embedding is on the first, norm and head on the last."""
    if pp == 1:
        return parameter_count(model)
    total = model.layers // pp * block_parameters(model)
    if stage == 0:
        total += embedding_parameters(model)
    if stage == pp - 1:
        total += embedding_parameters(model) + model.hidden_size
    return total


def flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Training FLOPs (forward and backward) per token: 6·N + 12·L·h·s.

    N is the global parameter count, L layers, h hidden size, s sequence length (PaLM, Chowdhery et al. 2022,
    appendix B; picotron's MFU formula). The attention term counts the full s x s square: a causal kernel
    does half of it, so multiply that term by 0.5 for the operations really done.
    """
    attention = 12 * model.layers * model.hidden_size * sequence_length
    return float(6 * parameter_count(model) + attention)


def stage_flops_per_token(model: ModelConfig, sequence_length: int, pp: int, stage: int) -> float:
    """Training FLOPs per token of one pipeline stage, in matrix products really done.

    As ``flops_per_token``, but the embedding look-up multiplies nothing, and a tied head is counted.
    """
    attention = 12 * model.hidden_size * sequence_length
    flops = model.layers // pp * (6 * block_parameters(model) + attention)
    if stage == pp - 1:
        flops += 6 * embedding_parameters(model)
    return float(flops)
