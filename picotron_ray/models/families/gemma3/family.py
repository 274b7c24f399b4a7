"""Gemma 3, its decoder of text (Gemma Team 2025): as Gemma 2, with norms of q and k and two rotary bases."""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gemma3.config import rules
from picotron_ray.models.families.gemma3.huggingface import HUGGINGFACE
from picotron_ray.models.families.gemma3.sizes import sizes
from picotron_ray.models.families.gemma3.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

GEMMA3 = Family(
    summary="as gemma2, with norms of q and k, and a rotary base of its own in blocks with a window",
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
