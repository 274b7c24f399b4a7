"""Inspection of a model of the user's own before a run starts: its parameters, and the cuts that it stands.

``python -m picotron_ray.train.custom_model.inspect`` reads a job as JSON and writes
``{"built": …, "said": [lines]}`` or ``{"problems": [lines]}``. It is a process of its own, so that the driver
stays free of torch, and of the side effects of importing the user's code.

All that can be tried is tried:

- The module is built twice, and must be the same.
- It runs on a few tokens in fp64: shape, repeatability, causality, independence of rows, constant buffers.
- It runs once at the job's sequence length.
- A loss of the user's own gives one number per token, with a gradient, whatever other rows there are.
- A tensor-parallel plan, the user's or a proposed one, runs at each degree with threads for ranks. Its logits
  and gradients must equal those of the whole module.
- The chain of a pipeline must give the logits of the whole module.
- Where blocks are to be compiled, each must be one graph.
- A model that learns from tasks is tried on one instead (`train.meta.inspect_model`).

It takes about 8 bytes x parameters x (3 + tp) of this machine's memory.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.config.import_path import import_object, one_line
from picotron_ray.config.schema.custom_model import BuiltModel, PlanConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.errors import ConfigError
from picotron_ray.models.custom import build_whole, logits_of, ties_of
from picotron_ray.models.families.registry import freeze_mistakes
from picotron_ray.train.custom_model.compile_check import check_compiles
from picotron_ray.train.custom_model.loss_check import check_loss
from picotron_ray.train.custom_model.plan_search import Trial, find_blocks, find_pipeline, find_tensor
from picotron_ray.train.meta.inspect_model import inspect_learner

KEY = "model.builder"
LENGTH = 16
"""Tokens per row of the short runs."""


def inspect(job: JobConfig) -> tuple[BuiltModel, list[str]]:
    """Inspect the module of a job.

    Returns:
        The description that workers need, and lines for the user.

    Raises:
        ConfigError: one line, if the module cannot be trained here at all, or not by the user's plan.
    """
    model = job.model
    module = build_whole(model, job.seed)
    _check_parameters(module)
    _check_repeatable(module, build_whole(model, job.seed))
    _check_randomness(module)
    if job.meta.on:
        return inspect_learner(job, module)
    trial = _check_forward(job, module)
    of_loss = check_loss(job, trial)
    plan = read_plan(model)
    blocks = find_blocks(module, plan)
    _check_ties(module, blocks)
    if job.kernels.compile is True:
        check_compiles(trial.module, trial.tokens, blocks)
    hidden, activations = _measure(trial, blocks)
    pipeline, no_pipeline = find_pipeline(trial, plan, blocks)
    tensor = find_tensor(trial, plan, degrees(job))
    built = BuiltModel(
        parameters=tuple((name, tuple(p.shape)) for name, p in module.named_parameters()),
        blocks=blocks,
        pipeline=pipeline,
        tensor=tensor.styles,
        cuts=tensor.cuts,
        tensor_degrees=tensor.degrees,
        embeddings=_embeddings(module),
        hidden_size=hidden,
        activations=activations,
        no_tensor=tensor.why,
        no_pipeline=no_pipeline,
    )
    wrong = [f"model.freeze: {text}" for text in freeze_mistakes(model.model_copy(update={"built": built}))]
    if wrong:
        raise ConfigError(*wrong)
    return built, [*_said(model, built), *of_loss]


def _embeddings(module: nn.Module) -> tuple[str, ...]:
    """List the parameters of torch's embeddings, each by the first of its names."""
    tables = {id(found.weight) for found in module.modules() if isinstance(found, nn.Embedding)}
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) in tables)


def degrees(job: JobConfig) -> list[int]:
    """List the tensor-parallel degrees above 1 that the job may use."""
    if job.layout.tp != "auto":
        return [job.layout.tp] if job.layout.tp > 1 else []
    return list(range(2, min(job.cluster.max_workers, 8) + 1))


def read_plan(model: ModelConfig) -> PlanConfig:
    """Return ``model.plan``, completed by the mapping that its import path names.

    Raises:
        ConfigError: the import path names no mapping of a plan's keys.
    """
    plan = model.plan
    if plan.path is None:
        return plan
    found = import_object("model.plan.path", plan.path)
    try:
        found = found() if callable(found) else found
        values = {**dict(found), **plan.model_dump(exclude_none=True)}
        return PlanConfig.model_validate(values)
    except Exception as error:
        raise ConfigError(
            f"model.plan.path: {plan.path} gives no plan: {one_line(error)}; expected a mapping with some of"
            " blocks, tensor, pipeline"
        ) from error


def _check_parameters(module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ConfigError(f"{KEY}: the module has no parameters; nothing would be trained")
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise ConfigError(
                f"{KEY}: {name} is frozen (requires_grad=False); unfreeze it, and name it in model.freeze"
            )
        if not parameter.is_floating_point():
            raise ConfigError(f"{KEY}: {name} is {parameter.dtype}, expected a floating-point parameter")
        if parameter.device.type != "cpu":
            raise ConfigError(
                f"{KEY}: {name} is built on {parameter.device}; build on the CPU, workers move it"
            )


def _check_repeatable(module: nn.Module, again: nn.Module) -> None:
    first, second = module.state_dict(), again.state_dict()
    for name, value in first.items():
        if name not in second or not torch.equal(value, second[name]):
            raise ConfigError(
                f"{KEY}: {name} differs between two builds under one seed; take random numbers from torch,"
                " numpy or random alone, without seeding them"
            )


def _check_randomness(module: nn.Module) -> None:
    """Refuse dropout, whose masks would differ from layout to layout."""
    for name, part in module.named_modules():
        rate = getattr(part, "p", 0.0) if "Dropout" in type(part).__name__ else getattr(part, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0.0:
            raise ConfigError(
                f"{KEY}: {name} ({type(part).__name__}) drops out with p={rate:g}, which would differ from"
                " layout to layout; build the model with dropout 0"
            )


def _run(module: nn.Module, tokens: Tensor, what: str) -> Tensor:
    try:
        output = module(tokens)
        logits = logits_of(output)
    except Exception as error:
        raise ConfigError(
            f"{KEY}: forward of tokens {list(tokens.shape)} ({what}) raises {one_line(error)}"
        ) from error
    return logits


def _check_forward(job: JobConfig, module: nn.Module) -> Trial:
    """Run the module in every way that training relies on."""
    vocabulary, length = job.model.vocab_size, min(LENGTH, job.data.sequence_length)
    generator = torch.Generator().manual_seed(job.seed)
    long = torch.randint(vocabulary, (1, job.data.sequence_length), generator=generator)
    with torch.no_grad():
        logits = _run(module, long, "data.sequence_length")
    expected = (*long.shape, vocabulary)
    if tuple(logits.shape) != expected:
        raise ConfigError(
            f"{KEY}: forward gives {list(logits.shape)}, expected logits [batch, seq, model.vocab_size]"
            f" = {list(expected)}"
        )
    trial = Trial(module, torch.randint(vocabulary, (2, length), generator=generator))
    before = {name: value.clone() for name, value in trial.module.named_buffers()}
    with torch.no_grad():
        base = _run(trial.module, trial.tokens, "in fp64")
        if not torch.equal(base, _run(trial.module, trial.tokens, "again")):
            raise ConfigError(
                f"{KEY}: forward gives other logits the second time; make it free of randomness"
            )
        for name, value in trial.module.named_buffers():
            if not torch.equal(value, before[name]):
                raise ConfigError(
                    f"{KEY}: forward writes buffer {name}, which no checkpoint holds; use layers without"
                    " running statistics"
                )
        other = trial.tokens.clone()
        other[0, -1] += 1
        other[1] += 1
        other %= vocabulary
        changed = _run(trial.module, other, "changed")
    if not trial.close(changed[0, :-1], base[0, :-1]):
        raise ConfigError(
            f"{KEY}: logits depend on later tokens, or on other rows of the batch: the loss would mean"
            " nothing; use a causal mask and no batch statistics"
        )
    return trial


def _check_ties(module: nn.Module, blocks: tuple[str, ...]) -> None:
    """Refuse parameters shared across blocks, which ZeRO gathers one at a time."""
    for names in ties_of(module):
        homes = {next((b for b in blocks if name.startswith(f"{b}.")), "") for name in names}
        if len(homes) > 1:
            raise ConfigError(
                f"{KEY}: {names[0]} and {names[1]} are one parameter shared across blocks, which is not"
                " supported; share outside the blocks only"
            )


def _measure(trial: Trial, blocks: tuple[str, ...]) -> tuple[int, int]:
    """Measure the width of the first block's output, and the elements per token that it saves."""
    block = trial.module.get_submodule(blocks[0]) if blocks else trial.module
    own = {p.data_ptr() for p in [*trial.module.parameters(), *trial.module.buffers()]}
    kept: dict[int, int] = {}
    width: list[int] = []
    inside = [False]

    def enter(*_: Any) -> None:
        inside[0] = True

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        inside[0] = False
        first = output[0] if isinstance(output, tuple) else output if blocks else logits_of(output)
        width.append(first.size(-1))

    def pack(tensor: Tensor) -> Tensor:
        if inside[0] and tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    hooks = [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = _run(trial.module, trial.tokens, "measured")
    for hook in hooks:
        hook.remove()
    del output
    if not width:
        raise ConfigError(f"model.plan.blocks: {blocks[0]} is not called by forward; name modules that are")
    return width[0], -(-sum(kept.values()) // trial.tokens.numel())


def _said(model: ModelConfig, built: BuiltModel) -> list[str]:
    counts = built.elements.values()
    total, whole = (sum(pair[i] for pair in counts) for i in (0, 1))
    lines = [
        f"model {model.builder}: {total:,} parameters in {len(built.parameters)} tensors, {len(built.blocks)}"
        " repeated blocks"
    ]
    if built.tensor_degrees:
        tried = ", ".join(map(str, built.tensor_degrees))
        lines.append(
            f"tensor parallelism (tried at {tried}) cuts {', '.join(kinds(built.tensor))};"
            f" {whole / total:.0%} of the parameters stay whole on every rank"
        )
    return lines


def kinds(tensor: Mapping[str, str]) -> list[str]:
    """List the names of the cut modules with ``*`` for the block's number, each once, with its style."""
    named = (re.sub(r"(^|\.)\d+(\.|$)", r"\1*\2", name, count=1) for name in tensor)
    return list(dict.fromkeys(f"{name} {style}" for name, style in zip(named, tensor.values(), strict=True)))


def main() -> None:
    """Run the inspection as a process of its own."""
    job = JobConfig.model_validate_json(sys.stdin.read())
    torch.set_num_threads(1)
    result: dict[str, Any]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the user's code may print
            built, said = inspect(job)
        result = {"built": built.model_dump(mode="json"), "said": said}
    except ConfigError as error:
        result = {"problems": error.problems}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
