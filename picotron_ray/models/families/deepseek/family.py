"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, and mixtures of experts after the first blocks.

Heads of a block share a latent vector of keys and values, and one key that carries positions. The prediction
of further tokens (V3's multi-token module) is not built.
"""

from __future__ import annotations

from picotron_ray.models.families.deepseek.config import rules
from picotron_ray.models.families.deepseek.huggingface import HUGGINGFACE
from picotron_ray.models.families.deepseek.sizes import sizes
from picotron_ray.models.families.deepseek.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)
from picotron_ray.models.families.family import Family

DEEPSEEK = Family(
    summary="multi-head latent attention, dense blocks before mixtures of experts",
    rotary=True,
    norms="RMSNorm",
    rules=rules,
    table=parameter_table,
    tensor_plan=tensor_plan,
    sizes=sizes,
    fused_modules=fused_modules,
    compiled_functions=compiled_functions,
    huggingface=HUGGINGFACE,
    latent=True,
)
