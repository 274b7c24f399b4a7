"""Hugging Face's names of the tensors of a model, and the config of an export. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.models.families.registry import family_of
from picotron_ray.models.huggingface.config import BY_ARCHITECTURE, DEFAULTS
from picotron_ray.models.huggingface.mapping import Held
from picotron_ray.models.huggingface.rope import fixed_length

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

_LONGEST = "max_position_embeddings"
# What an export takes over from the config of the checkpoint that was imported, as it was.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")


def architecture_of(model: ModelConfig, imported: Mapping[str, Any] | None = None) -> str:
    """The architecture that a model is exported as.

    Args:
        imported: config.json of the checkpoint that it began as. A Mistral without its window computes what
            a Llama does; it stays a Mistral.

    Raises ConfigError for a model that none of them has.
    """
    if model.builder is not None:
        raise ConfigError("model.builder: saw a model of your own, expected one of ours; export it yourself")
    return family_of(model).huggingface.architecture_of(model, imported)


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once.

    Args:
        names: of the tensors in a checkpoint that is read, where those differ from file to file.
    """
    return BY_ARCHITECTURE[architecture].tensors(model, architecture, names)


def ignored(model: ModelConfig, names: Collection[str]) -> set[str]:
    """Tensors that a checkpoint may hold besides, as transformers ignores them.

    A tied head that is stored all the same, and what the family says.
    """
    head = {"lm_head.weight"} if model.tie_embeddings else set()
    return head | family_of(model).huggingface.ignored(model, names)


def hf_config(
    model: ModelConfig,
    length: int,
    dtype: str,
    imported: Mapping[str, Any] | None = None,
    document_end: int | None = None,
) -> dict[str, Any]:
    """config.json for an exported model.

    Args:
        length: longest row that it was trained on; what was imported may say more, and a table of learned
            positions says it otherwise.
        dtype: of the tensors, ``float32`` or ``bfloat16``.
        imported: config.json of the checkpoint that it began as; None: it began from random weights.
        document_end: the id that ends a document in the data of a model that was not imported.

    Raises ConfigError for a model that none of the architectures has.
    """
    if imported is None:  # a key that is left out would mean ids of the architecture's own tokenizer
        kept = {"bos_token_id": None, "eos_token_id": document_end, "pad_token_id": None}
    else:
        kept = {key: imported[key] for key in _KEPT if key in imported}
    architecture = architecture_of(model, imported)
    mapping = BY_ARCHITECTURE[architecture]
    named = {"architectures": [architecture], "model_type": mapping.model_types[architecture], "dtype": dtype}
    found = {**named, **mapping.config(model, architecture, length)}
    if imported is not None and _LONGEST in found and fixed_length(model) is None:
        found[_LONGEST] = max(length, imported.get(_LONGEST, DEFAULTS[architecture][_LONGEST]))
    return {**found, **kept}
