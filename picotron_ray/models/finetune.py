"""Fine-tuning as changes of a parameter table: what is frozen, and the adapters of LoRA. Torch-free.

LoRA (Hu et al. 2021) adds ``alpha / rank · B A x`` to what a linear layer gives, and trains A ``[rank, in]``
and B ``[out, rank]`` instead of the layer's own weight. Both are parameters of the layer's module beside that
weight. Tensor parallelism cuts them as it cuts the weight: of a layer whose outputs are cut B, of one whose
inputs are cut A. The other one is whole on every rank, and its gradient partial.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Protocol

from picotron_ray.models.parameters import ParameterSpec

LORA_A, LORA_B = "lora_a", "lora_b"


class Lora(Protocol):
    """The config's ``model.lora``."""

    @property
    def rank(self) -> int: ...

    @property
    def targets(self) -> tuple[str, ...]: ...


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of LoRA's, by its canonical name."""
    return name.rpartition(".")[2] in (LORA_A, LORA_B)


def named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names it; ``*`` stands for anything, dots included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def frozen(table: Iterable[ParameterSpec], patterns: Collection[str]) -> tuple[ParameterSpec, ...]:
    """The table with the parameters that the patterns name frozen."""
    return tuple(
        replace(spec, trained=False, frozen=True) if named(spec.name, patterns) else spec for spec in table
    )


def linear_layers(table: Iterable[ParameterSpec]) -> dict[str, ParameterSpec]:
    """Linear layers inside blocks: their weights by the name of the module."""
    return {
        spec.name.removesuffix(".weight"): spec
        for spec in table
        if spec.part == "block" and len(spec.shape) == 2 and spec.name.endswith(".weight")
        if not (spec.expert or spec.embedding or spec.name.endswith(".router.weight"))
    }


def targeted(table: Sequence[ParameterSpec], lora: Lora) -> frozenset[str]:
    """The linear layers that get adapters, by the name of the module."""
    return frozenset(name for name in linear_layers(table) if named(name, lora.targets))


def with_adapters(table: Sequence[ParameterSpec], lora: Lora) -> tuple[ParameterSpec, ...]:
    """The table with A and B after the other parameters of each module that has them.

    A begins as PEFT has it, uniform within ±1/√in (the Kaiming initialisation of torch's linear layers with
    a = √5), and B as zeros.
    """
    layers, chosen = linear_layers(table), targeted(table, lora)
    found: list[ParameterSpec] = []
    for at, spec in enumerate(table):
        found.append(spec)
        module = spec.name.rpartition(".")[0]
        last = at + 1 == len(table) or table[at + 1].name.rpartition(".")[0] != module
        if last and module in chosen:
            found += _adapters(module, layers[module], lora.rank)
    return tuple(found)


def _adapters(module: str, weight: ParameterSpec, rank: int) -> Iterator[ParameterSpec]:
    outputs, inputs = weight.shape
    plain = replace(weight, trained=True, frozen=False, decay=True, init_std=0.0)
    yield replace(
        plain,
        name=f"{module}.{LORA_A}",
        shape=(rank, inputs),
        tp_dim=1 if weight.tp_dim == 1 else None,
        init_bound=1 / math.sqrt(inputs),
    )
    yield replace(
        plain, name=f"{module}.{LORA_B}", shape=(outputs, rank), tp_dim=0 if weight.tp_dim == 0 else None
    )


def freeze_problems(names: Sequence[str], trained: Collection[str], patterns: Sequence[str]) -> Iterator[str]:
    """Mistakes in ``model.freeze``, in words.

    Args:
        names: of all parameters.
        trained: those of them that would be trained without it.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield f"saw {pattern!r}, which names no parameter; the nearest is {nearest(pattern, names)}"
    if patterns and trained and all(named(name, patterns) for name in trained):
        yield f"saw patterns that name all {len(trained)} trained parameters; leave some of them out"


def target_problems(table: Sequence[ParameterSpec], targets: Sequence[str]) -> Iterator[str]:
    """Mistakes in ``model.lora.targets``, in words."""
    layers = linear_layers(table)
    stacks = [spec.name for spec in table if spec.expert]
    modules = dict.fromkeys(spec.name.rpartition(".")[0] for spec in table) | dict.fromkeys(stacks)
    for target in targets:
        met = [name for name in modules if fnmatchcase(name, target)]
        other = next((name for name in met if name not in layers), None)
        if other is not None:
            text = f"saw {target!r}, which names {other}, no linear layer of a block"
            yield f"{text}; the nearest is {nearest(target, layers)}"
        elif not met:
            yield f"saw {target!r}, which names no linear layer; the nearest is {nearest(target, layers)}"


def nearest(pattern: str, names: Iterable[str]) -> str:
    """The name that is spelled most like a pattern; of equals the first, "none" where there are no names.

    Numbers and wildcards are left out of the comparison.
    """
    by_letters: dict[str, str] = {}
    for name in names:  # one of each kind: a deep model has thousands of names, and few kinds
        by_letters.setdefault(_letters(name), name)
    matcher = SequenceMatcher(autojunk=False, b=_letters(pattern))

    def likeness(name: str) -> float:
        matcher.set_seq1(_letters(name))
        return matcher.ratio()

    return max(by_letters.values(), key=likeness, default="none")


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalpha() or c in "._")
