"""Mapping between a family and its checkpoints in Hugging Face's format. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig


class Held(NamedTuple):
    """Some of our parameters, and the tensors of a checkpoint that hold them.

    Fields:
        ours: canonical names; several are joined along their outputs (dimension 0) in one tensor.
        theirs: tensors of the checkpoint; several are stacked in one parameter of ours.
        stacked: whether ours is a stack of theirs, one per expert.
        transposed: whether the tensor has our last two dimensions the other way round.
        in_turns: whether the outputs (dimension 1) of several stacks of ours take turns in the tensor.
        packed: whether theirs are two, values in MXFP4 and their scales, which hold one tensor.
        rows: for each row of ours the row of the tensor that it is; None: the same one.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    stacked: bool = False
    transposed: bool = False
    rows: tuple[int, ...] | None = None
    in_turns: bool = False
    packed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceMapping:
    """Architectures of one family, both ways.

    Fields:
        defaults: values that transformers takes for absent keys of config.json, by architecture; those that
            decide what is computed.
        model_types: names of the architectures in config.json's ``model_type``.
        model_keys: our ``model`` section for an architecture and a config.json. Raises ConfigError.
        architecture_of: the architecture that a model is exported as, given config.json of the checkpoint
            that it began as (None: of none). Raises ConfigError for a model that none has.
        tensors: which tensors hold which of our parameters, each parameter once, given the architecture and
            the names of the tensors in a checkpoint that is read.
        ignored: tensors that a checkpoint may hold besides, given their names; a tied head aside.
        config: config.json of an exported model, given the architecture and its longest row.
    """

    defaults: Mapping[str, Mapping[str, Any]]
    model_types: Mapping[str, str]
    model_keys: Callable[[str, Mapping[str, Any]], dict[str, Any]]
    architecture_of: Callable[[ModelConfig, Mapping[str, Any] | None], str]
    tensors: Callable[[ModelConfig, str, Collection[str]], Iterator[Held]]
    ignored: Callable[[ModelConfig, Collection[str]], set[str]]
    config: Callable[[ModelConfig, str, int], dict[str, Any]]
