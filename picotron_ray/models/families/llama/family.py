"""Llama (Touvron et al. 2023) and the decoders after it: Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE."""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.llama.config import rules
from picotron_ray.models.families.llama.huggingface import HUGGINGFACE
from picotron_ray.models.families.llama.sizes import sizes
from picotron_ray.models.families.llama.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

LLAMA = Family(
    summary="as other keys say",
    rotary=True,
    norms="RMSNorm",
    rules=rules,
    table=parameter_table,
    tensor_plan=tensor_plan,
    sizes=sizes,
    fused_modules=fused_modules,
    compiled_functions=compiled_functions,
    huggingface=HUGGINGFACE,
)
