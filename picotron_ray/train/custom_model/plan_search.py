"""Search for plans that cut a module of the user's own: given, or proposed from its structure, then tried.

A proposal only names candidates that look right. The trial proves one: the cut module runs with threads for
ranks, and must give the logits and gradients of the whole module in fp64.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from picotron_ray.comm.all_reduce import ThreadGroup
from picotron_ray.config.import_path import one_line
from picotron_ray.config.schema.custom_model import PlanConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.custom import STYLES, keep_only, logits_of, ties_of
from picotron_ray.parallel.shard_boxes import chunk
from picotron_ray.parallel.tensor.tensor_parallel import apply_tensor_parallel, linear_dims, matches

TOLERANCE = 1e-9
"""Relative difference in fp64 that counts as equal."""


class Trial:
    """A module in fp64, a few tokens, and its logits and gradients on them.

    Fields:
        module: a copy of the module.
        tokens: ``[2, seq]``.
    """

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        self.module, self.tokens = copy.deepcopy(module).double(), tokens
        self._expected: tuple[Tensor, dict[str, Tensor]] | None = None

    @staticmethod
    def close(found: Tensor, expected: Tensor, floor: float = TOLERANCE) -> bool:
        """Return whether two tensors are equal but for rounding; norms below ``floor`` count as ``floor``."""
        return bool((found - expected).norm() <= TOLERANCE * max(float(expected.norm()), floor))

    def gradients(self, module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, and the gradient of a fixed function of them by every parameter."""
        logits = logits_of(module(self.tokens))
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).cos().view_as(logits)
        (logits.log_softmax(-1) * weights).sum().backward()
        return logits.detach(), {
            name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in module.named_parameters()
        }

    @property
    def expected(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits and gradients of the whole module."""
        if self._expected is None:
            self._expected = self.gradients(self.module)
        return self._expected


def resolve(module: nn.Module, glob: str, key: str) -> list[str]:
    """List the names of the modules that a glob matches (``*``: one part of a name), in the module's order.

    Raises:
        ConfigError: there is none.
    """
    found = [name for name, _ in module.named_modules() if name and matches(name, glob)]
    if not found:
        tops = ", ".join(name for name, _ in module.named_children())
        raise ConfigError(f"{key}: saw {glob!r}, which names no module; the model's own parts are {tops}")
    return found


# --- blocks and stages -----------------------------------------------------------------------------------


def find_blocks(module: nn.Module, plan: PlanConfig) -> tuple[str, ...]:
    """Find the repeated blocks: those of the plan, else the largest run of children that look alike."""
    if plan.blocks is not None:
        return tuple(resolve(module, plan.blocks, "model.plan.blocks"))
    runs: list[tuple[int, tuple[str, ...]]] = []
    for name, container in module.named_modules():
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            runs += _runs(name, container)
    return max(runs, key=lambda run: run[0])[1] if runs else ()


def _runs(name: str, container: nn.Module) -> list[tuple[int, tuple[str, ...]]]:
    """List (parameters, names) of every run of at least two alike children."""
    found: list[tuple[int, tuple[str, ...]]] = []
    last: object = None
    for child, block in container.named_children():
        shapes = tuple((n, tuple(p.shape)) for n, p in block.named_parameters())
        like, path = (type(block), shapes), f"{name}.{child}" if name else child
        size = sum(p.numel() for p in block.parameters())
        if like == last:
            found[-1] = (found[-1][0] + size, (*found[-1][1], path))
        else:
            found.append((size, (path,)))
        last = like
    return [run for run in found if run[0] and len(run[1]) > 1]


def find_pipeline(trial: Trial, plan: PlanConfig, blocks: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Find the chain of modules that is the whole model, or return () and the reason that there is none."""
    module, key = trial.module, "model.plan.pipeline"
    if plan.pipeline is not None:
        names = tuple(name for glob in plan.pipeline for name in resolve(module, glob, key))
        if not blocks:
            raise ConfigError(f"{key}: saw no repeated blocks to cut between; name them in model.plan.blocks")
    elif type(module) is nn.Sequential and blocks and all("." not in name for name in blocks):
        names = tuple(name for name, _ in module.named_children())
    else:
        return (), (
            f"{type(module).__name__} is no nn.Sequential of its blocks, so its forward cannot be cut into"
            " stages; use pp=1, or name the chain of modules that it is in model.plan.pipeline"
        )
    why = _chain_problem(trial, names, blocks)
    if why and plan.pipeline is not None:
        raise ConfigError(f"{key}: {why}")
    return ((), f"{why}; use pp=1") if why else (names, "")


def _chain_problem(trial: Trial, names: tuple[str, ...], blocks: tuple[str, ...]) -> str:
    """Say why the modules ``names``, applied in turn, are not the model; empty if they are."""
    missing = [block for block in blocks if block not in names]
    if missing:
        return f"block {missing[0]} is not in the chain"
    for name, _ in trial.module.named_parameters():
        if not _lies_in(name, names):
            return f"parameter {name} is in no module of the chain"
    start, end = names.index(blocks[0]), names.index(blocks[-1])
    if names[start : end + 1] != blocks:
        return f"{next(n for n in names[start:end] if n not in blocks)} stands between the blocks"
    for tied in ties_of(trial.module):
        parts = {(_lies_in(name, names[:start]), _lies_in(name, names[end + 1 :])) for name in tied}
        if len(parts) > 1:
            return f"{tied[0]} and {tied[1]} are one parameter, which would lie on two stages"
    chain = copy.deepcopy(trial.module)
    keep_only(chain, names, ())
    try:
        with torch.no_grad():
            logits = logits_of(chain(trial.tokens))
    except Exception as error:  # noqa: BLE001 - the user's modules may raise anything
        return f"the chain of modules raises {one_line(error)}"
    same = logits.shape == trial.expected[0].shape and trial.close(logits, trial.expected[0])
    return "" if same else "the modules applied in turn give other logits than the model"


def _lies_in(name: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter lies in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)


# --- tensor parallelism ----------------------------------------------------------------------------------


@dataclass(slots=True)
class TensorCuts:
    """Cuts of tensor parallelism (see `config.schema.custom_model.BuiltModel`); ``why``: no other degrees."""

    styles: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    degrees: tuple[int, ...] = ()
    why: str = ""


def find_tensor(trial: Trial, plan: PlanConfig, degrees: list[int]) -> TensorCuts:
    """Try the user's tensor-parallel plan, or a proposed one, at every degree in question.

    Raises:
        ConfigError: the user's plan gives other results than the whole module.
    """
    given = plan.tensor is not None
    kinds: list[dict[str, str]]
    if plan.tensor is not None:
        kinds = [
            {
                name: style
                for glob, style in plan.tensor.items()
                for name in resolve(trial.module, glob, "model.plan.tensor")
            }
        ]
    else:
        kinds = propose(trial.module)
    for styles in kinds:
        _check_linear(trial.module, styles)
    passed: list[dict[str, str]] = []
    reason = "model.plan.tensor cuts nothing" if given else "no pair of linear layers to cut was found in it"
    for styles in kinds:
        fitting = [degree for degree in degrees if divides(trial.module, styles, degree)]
        failed = try_tensor(trial, styles, fitting[0]) if fitting else ""
        if failed and given:
            raise ConfigError(f"model.plan.tensor: cut over {fitting[0]}, the model {failed}")
        if failed:
            reason = f"cutting {next(iter(styles))} and its like over {fitting[0]}, the model {failed}"
        else:
            passed.append(styles)
    styles = {name: style for kind in passed for name, style in kind.items()}
    return _combined(trial, styles, degrees, given) if styles else TensorCuts(why=f"{reason}; use tp=1")


def _combined(trial: Trial, styles: dict[str, str], degrees: list[int], given: bool) -> TensorCuts:
    """Try all kinds that passed alone, together at every degree."""
    good, reason = [], "others were not tried on the model"
    for degree in degrees:
        indivisible = next((n for n in styles if not divides(trial.module, {n: styles[n]}, degree)), None)
        if indivisible is not None:
            reason = f"{degree} does not divide {indivisible}"
            continue
        failed = try_tensor(trial, styles, degree)
        if failed and given:
            raise ConfigError(f"model.plan.tensor: cut over {degree}, the model {failed}")
        if failed:
            reason = f"cut over {degree}, the model {failed}"
        else:
            good.append(degree)
    known = ", ".join(map(str, [1, *good]))
    return TensorCuts(
        styles, cuts_of(trial.module, styles), tuple(good), f"expected one of {known}: {reason}"
    )


def _check_linear(module: nn.Module, styles: dict[str, str]) -> None:
    for name in styles:
        if linear_dims(module.get_submodule(name)) is None:
            raise ConfigError(
                f"model.plan.tensor: {name} is a {type(module.get_submodule(name)).__name__}, expected a"
                " linear module"
            )
    shared = {name.rpartition(".")[0] for names in ties_of(module) for name in names}
    for name in styles:
        if name in shared:
            raise ConfigError(
                f"model.plan.tensor: {name} shares its weight with another module; leave it whole"
            )


def propose(module: nn.Module) -> list[dict[str, str]]:
    """Propose groups of linears that look like an MLP (up → down) or attention (q, k, v → out).

    The pattern, among a module's own linears: some that map a → b, then one that maps b → a. The same place
    in every block makes one group, so that it is cut in all of them or in none.
    """
    groups: dict[str, dict[str, str]] = {}
    shared = {name.rpartition(".")[0] for names in ties_of(module) for name in names}
    for name, parent in module.named_modules():
        linears = [
            (f"{name}.{child}" if name else child, dims, part)
            for child, part in parent.named_children()
            if (dims := linear_dims(part)) is not None
        ]
        if len(linears) < 2 or any(path in shared for path, _, _ in linears):
            continue
        *ups, down = [(path, part.weight.shape[d[0]], part.weight.shape[d[1]]) for path, d, part in linears]
        leads_back = all(inputs == down[1] for _, _, inputs in ups) and ups[0][1] == down[2]
        square = len(ups) == 1 and ups[0][1] == ups[0][2]
        if leads_back and not square:
            place = ".".join("*" if part.isdigit() else part for part in name.split("."))
            group = groups.setdefault(place, {})
            group.update({path: "colwise" for path, _, _ in ups})
            group[down[0]] = "rowwise"
    return list(groups.values())


def cuts_of(module: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Map each cut parameter to the dimension that its module's style cuts."""
    cuts = {}
    for name, style in styles.items():
        part = module.get_submodule(name)
        dims = linear_dims(part)
        assert dims is not None
        cuts[f"{name}.weight"] = dims[0] if style == "colwise" else dims[1]
        if style == "colwise" and part.bias is not None:
            cuts[f"{name}.bias"] = 0
    return cuts


def divides(module: nn.Module, styles: dict[str, str], degree: int) -> bool:
    """Return whether a degree divides every cut dimension."""
    cuts = cuts_of(module, styles)
    return all(module.get_parameter(name).size(dim) % degree == 0 for name, dim in cuts.items())


def _replica(module: nn.Module, styles: dict[str, str], group: ThreadGroup) -> nn.Module:
    """Build one rank's part of the module, with its part of the values."""
    replica = copy.deepcopy(module)
    apply_tensor_parallel(replica, group, [(name, STYLES[style]) for name, style in styles.items()])
    with torch.no_grad():
        for name, dim in cuts_of(module, styles).items():
            whole = module.get_parameter(name)
            part = whole.narrow(dim, *chunk(whole.size(dim), group.size(), group.rank()))
            replica.get_parameter(name).copy_(part)
    return replica


def try_tensor(trial: Trial, styles: dict[str, str], degree: int) -> str:
    """Run the module cut over threads; return what is wrong with it, or an empty string."""
    logits, gradients = trial.expected
    groups = ThreadGroup.make(degree)
    replicas = [_replica(trial.module, styles, group) for group in groups]
    found: list[tuple[Tensor, dict[str, Tensor]] | BaseException | None] = [None] * degree

    def run(rank: int) -> None:
        try:
            found[rank] = trial.gradients(replicas[rank])
        except Exception as error:  # noqa: BLE001 - the user's module may raise anything
            found[rank] = error
            groups[rank].leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuts = cuts_of(trial.module, styles)
    errors = [result for result in found if isinstance(result, BaseException)]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        return f"raises {one_line((own or errors)[0])}"
    for rank, result in enumerate(found):
        assert isinstance(result, tuple)
        if result[0].shape != logits.shape or not trial.close(result[0], logits):
            return "gives other logits than uncut"
        # a gradient that is zero but for rounding (a key's bias) has no digits to compare
        floor = 1e-4 * float(torch.stack([value.norm() for value in gradients.values()]).norm())
        for name, whole in gradients.items():
            part = whole
            if name in cuts:
                part = whole.narrow(cuts[name], *chunk(whole.size(cuts[name]), degree, rank))
            if not trial.close(result[1][name], part, floor):
                return f"gives another gradient of {name} than uncut"
    return ""
