"""Gemma 2 (Gemma Team 2024): norms before and after each half, windows in every other block, soft caps."""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gemma2.config import rules
from picotron_ray.models.families.gemma2.huggingface import HUGGINGFACE
from picotron_ray.models.families.gemma2.sizes import sizes
from picotron_ray.models.families.gemma2.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

GEMMA2 = Family(
    summary="norms before and after attention and MLP, GeGLU, blocks with and without a window, soft caps",
    rotary=True,
    norms="RMSNorm",
    rules=rules,
    table=parameter_table,
    tensor_plan=tensor_plan,
    sizes=sizes,
    fused_modules=fused_modules,
    compiled_functions=compiled_functions,
    huggingface=HUGGINGFACE,
    scaled_embedding=True,
)
