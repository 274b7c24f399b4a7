"""A model of the user's own: built by an import path, its parameters named by the module itself.

What is expected of the module: ``forward(tokens [batch, seq] int64) -> logits [batch, seq, vocab]``, or an
object with ``.logits``. `train.custom_model.inspect` has looked into it before any worker starts; here its
findings (``model.built``) are turned into a definition for the engine.

The builder runs whole, on the CPU, in fp32, under a seed made of ``job.seed``: so its own initialisation
is what the run starts from, the same at every layout, and buffers (masks, positional tables) have their
values. It costs every worker process the whole model in host memory (4 bytes per parameter) while it
builds: once per process for the shape of things, which is kept without the parameters, and once more where
a run starts from step 0. Workers of one node do so at the same time.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from picotron_ray.config.import_path import import_object, one_line
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.layout.shards import region, whole
from picotron_ray.models.definition import InitialValue, ModelDefinition
from picotron_ray.models.finetune import frozen
from picotron_ray.models.parameters import ParameterSpec, Style

STYLES: dict[str, Style] = {"colwise": "copy_colwise", "rowwise": "sum_rowwise"}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """All three generators that builders use, set and put back; new tensors are fp32 on the CPU."""
    python, numbers, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(python)
            np.random.set_state(numbers)


def build_whole(config: ModelConfig, seed: int) -> nn.Module:
    """The uncut module with its own initial weights, on the CPU.

    Raises ConfigError where the builder cannot be imported, fails, or returns something else.
    """
    assert config.builder is not None
    builder: Callable[..., Any] = import_object("model.builder", config.builder)
    arguments = config.model_dump(mode="json")["arguments"]  # lists, wherever the config came from
    try:
        with _seeded(seed):
            module = builder(**arguments)
    except Exception as error:
        raise ConfigError(
            f"model.builder: {config.builder} raises {one_line(error)}; check model.arguments"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.builder: {config.builder} returns a {type(module).__name__}, expected a torch.nn.Module"
        )
    return module.train()


def logits_of(output: Any) -> Tensor:
    """The logits in what a module returns."""
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def ties_of(module: nn.Module) -> list[list[str]]:
    """Names of one parameter that several modules share, for each such parameter; the first is its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter where its dotted name says."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)


def on_meta(module: nn.Module) -> nn.Module:
    """Drop the values of all parameters, in place; what is shared stays shared, buffers keep theirs."""
    seen: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
                owner._parameters[name] = seen.setdefault(id(parameter), empty)
    return module


@lru_cache(maxsize=1)
def _prototype(config: ModelConfig, seed: int) -> nn.Module:
    """The module without parameter values, kept by the process from one generation to the next."""
    return on_meta(build_whole(config, seed))


def keep_only(module: nn.Module, names: tuple[str, ...], dropped: tuple[str, ...]) -> None:
    """Make ``module`` the chain of its submodules ``names``; those of ``dropped`` leave it."""
    for name in dropped:
        owner, _, leaf = name.rpartition(".")
        del module.get_submodule(owner)._modules[leaf]

    def forward(x: Tensor) -> Any:
        for name in names:
            x = module.get_submodule(name)(x)
        return x

    module.forward = forward


class CustomDefinition(ModelDefinition):
    """The module that ``model.builder`` builds."""

    sequence_parallel = False

    def __init__(self, config: ModelConfig, seed: int) -> None:
        built = config.built
        if built is None:
            raise ConfigError("model.built: saw nothing, expected what launch finds in the module")
        self.config, self._built, self._seed = config, built, seed
        self._check_same(_prototype(config, seed))
        self.hidden_size = built.hidden_size
        self.styles = tuple((name, STYLES[style]) for name, style in built.tensor.items())
        table = tuple(self._spec(name, shape) for name, shape in built.parameters)
        self.table = frozen(table, config.freeze) if config.freeze else table

    def _check_same(self, module: nn.Module) -> None:
        """This process must see the module that launch looked into."""
        found = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        if found != self._built.parameters:
            expected = dict(self._built.parameters)
            other = next((f"{n}{list(s)}" for n, s in found if expected.get(n) != s), "fewer parameters")
            raise ConfigError(
                f"model.builder: {self.config.builder} built {other} here, which is not the module that"
                " launch looked into; give every node the same source"
            )

    def _spec(self, name: str, shape: tuple[int, ...]) -> ParameterSpec:
        part, number = self._built.part_of(name)
        cut, embedding = self._built.cuts.get(name), name in self._built.embeddings
        return ParameterSpec(name, shape, number, part, cut, len(shape) > 1, None, embedding=embedding)

    def build(self, first: int, last: int, *, embed: bool, head: bool) -> nn.Module:
        module, built = copy.deepcopy(_prototype(self.config, self._seed)), self._built
        if not (embed and head):
            start, end = (built.pipeline.index(built.blocks[i]) for i in (0, -1))
            kept = built.blocks[first:last]
            if embed:
                kept = built.pipeline[:start] + kept
            if head:
                kept += built.pipeline[end + 1 :]
            keep_only(module, kept, tuple(name for name in built.pipeline if name not in kept))
        else:
            inner = module.forward
            module.forward = lambda tokens: logits_of(inner(tokens))
        return module

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        modules = dict(module.named_modules())
        return [modules[name] for name in self._built.blocks if name in modules]

    def tie(self, module: nn.Module) -> None:
        names = {name for name, _ in module.named_parameters()}
        for first, *others in ties_of(_prototype(self.config, self._seed)):
            for other in others:
                if first in names:  # a stage holds all of them or none
                    set_parameter(module, other, module.get_parameter(first))

    def initial(self, seed: int) -> InitialValue:
        values = dict(build_whole(self.config, seed).named_parameters())
        return lambda spec, box: values[spec.name].detach()[region(box, whole(spec.shape))]
