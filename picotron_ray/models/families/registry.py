"""The model families, by the name that ``model.family`` gives them. Torch-free.

A new family is a folder beside this file, its name in `FamilyName` and its line in `FAMILIES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from picotron_ray.models.families.deepseek.family import DEEPSEEK
from picotron_ray.models.families.family import Family
from picotron_ray.models.families.gemma2.family import GEMMA2
from picotron_ray.models.families.gemma3.family import GEMMA3
from picotron_ray.models.families.gpt2.family import GPT2
from picotron_ray.models.families.llama.family import LLAMA
from picotron_ray.models.families.olmo2.family import OLMO2
from picotron_ray.models.parameters import ParameterSpec

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

FamilyName = Literal["llama", "gpt2", "olmo2", "gemma2", "gemma3", "deepseek"]
FAMILIES: dict[FamilyName, Family] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "deepseek": DEEPSEEK,
}

assert set(FAMILIES) == set(get_args(FamilyName))


def family_of(config: ModelConfig) -> Family:
    """The family that a config names; of no meaning for a model of the user's own."""
    return FAMILIES[config.family]


def parameter_table(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    """All parameters of the uncut model, in ``named_parameters`` order."""
    return family_of(config).table(config)
