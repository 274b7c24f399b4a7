"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, GELU, biases, one key head per query head.

Dropout is not modelled: a checkpoint that was trained with it is taken as it is, and trained on without.
"""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gpt2.config import rules
from picotron_ray.models.families.gpt2.huggingface import HUGGINGFACE
from picotron_ray.models.families.gpt2.sizes import sizes
from picotron_ray.models.families.gpt2.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

GPT2 = Family(
    summary="LayerNorm, learned positions, GELU, biases, no dropout",
    rotary=False,
    norms="LayerNorm",
    rules=rules,
    table=parameter_table,
    tensor_plan=tensor_plan,
    sizes=sizes,
    fused_modules=fused_modules,
    compiled_functions=compiled_functions,
    huggingface=HUGGINGFACE,
)
