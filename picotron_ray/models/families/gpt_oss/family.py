"""gpt-oss (OpenAI 2025): attention sinks, windows in every other block, mixtures of experts with biases."""

from __future__ import annotations

from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gpt_oss.config import rules
from picotron_ray.models.families.gpt_oss.huggingface import HUGGINGFACE
from picotron_ray.models.families.gpt_oss.sizes import sizes
from picotron_ray.models.families.gpt_oss.table import (
    compiled_functions,
    fused_modules,
    parameter_table,
    tensor_plan,
)

GPT_OSS = Family(
    summary="attention sinks, blocks with and without a window, mixtures of experts with biases",
    rotary=True,
    norms="RMSNorm",
    rules=rules,
    table=parameter_table,
    tensor_plan=tensor_plan,
    sizes=sizes,
    fused_modules=fused_modules,
    compiled_functions=compiled_functions,
    huggingface=HUGGINGFACE,
    sinks=True,
)
