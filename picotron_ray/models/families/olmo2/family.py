"""OLMo-2 (Team OLMo et al. 2025): norms after attention and MLP, and of q and k over all heads together."""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.olmo2.config import rules
from picotron_ray.models.families.olmo2.huggingface import HUGGINGFACE
from picotron_ray.models.families.olmo2.sizes import sizes
from picotron_ray.models.families.olmo2.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

OLMO2 = Family(
    summary="RMSNorm after attention and MLP, and over the whole width of q and of k",
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
