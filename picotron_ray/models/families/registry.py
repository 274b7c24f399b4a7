"""The model families, by the name that ``model.family`` gives them. Torch-free.

A new family is a folder beside this file, its name in `FamilyName` and its line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from picotron_ray.models.families.deepseek.family import DEEPSEEK
from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gemma2.family import GEMMA2
from picotron_ray.models.families.gemma3.family import GEMMA3
from picotron_ray.models.families.gpt2.family import GPT2
from picotron_ray.models.families.gpt_oss.family import GPT_OSS
from picotron_ray.models.families.llama.family import LLAMA
from picotron_ray.models.families.olmo2.family import OLMO2
from picotron_ray.models.finetune import (
    freeze_problems,
    frozen,
    is_adapter,
    named,
    nearest,
    target_problems,
    with_adapters,
)
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

FamilyName = Literal["llama", "gpt2", "olmo2", "gemma2", "gemma3", "deepseek", "gpt_oss"]
FAMILIES: dict[FamilyName, Family] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
}

__all__ = [  # what is asked for from below, where this module alone may be imported
    "FAMILIES",
    "FamilyName",
    "family_of",
    "finetuned_table",
    "freeze_mistakes",
    "is_adapter",
    "named",
    "nearest",
    "parameter_table",
    "target_mistakes",
]

assert set(FAMILIES) == set(get_args(FamilyName))


def family_of(config: ModelConfig) -> Family:
    """The family that a config names; of no meaning for a model of the user's own."""
    return FAMILIES[config.family]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model without adapters, in ``named_parameters`` order."""
    return family_of(config).table(config)


def finetuned_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the model as it is trained: LoRA's among them, and what is frozen marked as such."""
    table = parameter_table(config)
    if config.lora.rank:
        table = with_adapters(frozen(table, ("*",)), config.lora)
    return frozen(table, config.freeze) if config.freeze else table


def freeze_mistakes(config: ModelConfig) -> Iterator[str]:
    """Mistakes in ``model.freeze``, in words; none for a module that launch has not built yet."""
    if not config.freeze:
        return
    if config.builder is not None:
        names = [name for name, _ in config.built.parameters] if config.built else []
        yield from freeze_problems(names, names, config.freeze) if names else ()
        return
    plain = finetuned_table(config.model_copy(update={"freeze": ()}))
    trained = [spec.name for spec in plain if spec.trained]
    yield from freeze_problems([spec.name for spec in plain], trained, config.freeze)


def target_mistakes(config: ModelConfig) -> Iterator[str]:
    """Mistakes in ``model.lora.targets``, in words."""
    yield from target_problems(parameter_table(config), config.lora.targets)
