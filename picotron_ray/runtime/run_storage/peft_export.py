"""LoRA's matrices of a commit in the files of Hugging Face's PEFT, and added to the weights of an export.

PEFT keeps ``adapter_config.json`` and ``adapter_model.safetensors``. Its tensors are named by the layer of
the model of transformers: ``base_model.model.<layer>.lora_A.weight`` ``[rank, in]`` and ``lora_B`` ``[out,
rank]`` (PEFT 0.21, ``peft.utils.save_and_load``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.finetune import LORA_A, LORA_B, targeted
from picotron_ray.models.huggingface import names as hf

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model"


def layers_in_peft(job: JobConfig) -> dict[str, str]:
    """The layer of transformers' model that each adapted module is, by the module's name.

    Raises:
        ConfigError: there are no adapters, or a layer of transformers' is more than one of ours.
    """
    model = job.model
    if not model.lora.rank:
        raise ConfigError("--adapter: saw model.lora.rank=0, a run without adapters; leave it out")
    wanted = targeted(parameter_table(model), model.lora)
    found: dict[str, str] = {}
    for held in hf.tensors(model, hf.architecture_of(model)):
        for name in held.ours:
            module = name.removesuffix(".weight")
            if name == module or module not in wanted:
                continue
            layer = held.theirs[0].removesuffix(".weight")
            if len(held.ours) > 1:
                text = (
                    f"saw an adapter of {module}, which transformers keeps in one layer with others, {layer}"
                )
                raise ConfigError(f"--adapter: {text}; export the merged model without --adapter")
            found[module] = layer
    return found


def write_adapter(
    job: JobConfig, folder: Path, values: Mapping[str, Tensor], base: str | None, transposed: bool
) -> int:
    """Write PEFT's two files; returns the number of tensors.

    Args:
        values: A and B of every adapted module, by our names, in the type that is written.
        base: where the model comes from that they belong to, as PEFT would load it; None: not known.
        transposed: whether transformers keeps the weights of these layers as ``[in, out]`` (GPT-2).
    """
    from safetensors.torch import save_file

    lora, layers = job.model.lora, layers_in_peft(job)
    tensors = {
        f"{PREFIX}.{layer}.{theirs}.weight": values[f"{module}.{ours}"].contiguous()
        for module, layer in layers.items()
        for ours, theirs in ((LORA_A, "lora_A"), (LORA_B, "lora_B"))
    }
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(layers.values()),
        "bias": "none",
        "fan_in_fan_out": transposed,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors)


def merged(
    job: JobConfig, weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weights with what their adapters add, ``W + alpha / rank · B A``, in the type that they are kept in.

    Args:
        adapters: A and B by name; a weight without them stays as it is.
    """
    lora = job.model.lora
    found = dict(weights)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if f"{module}.{LORA_B}" in adapters:
            update = adapters[f"{module}.{LORA_B}"] @ adapters[f"{module}.{LORA_A}"]
            found[name] = weight + update * (lora.alpha / lora.rank)
    return found
