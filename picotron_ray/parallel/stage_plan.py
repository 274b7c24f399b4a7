"""The plan by which one pipeline stage of a model is parallelized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from picotron_ray.config.schema.compute import Fp8Scaling, OverlapMethod
from picotron_ray.models.parameters import Style
from picotron_ray.parallel.attention.backends import AttentionPlan
from picotron_ray.parallel.expert.expert_parallel import EXACT, ExpertExchange
from picotron_ray.parallel.precision.switches import PrecisionSwitches

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The role of a stage's modules in each parallelism, and the kernels that the job asks for.

    Fields:
        styles: the style of tensor parallelism of each module that it touches, by name or glob.
        blocks: the repeated blocks, in order. FSDP gathers `zero_blocks` at a time.
        embedding, head: what stands before and after them, each of which FSDP gathers by itself.
        attention: the attention modules and their backend.
        mixtures: names of the mixtures of experts.
        mixture_layers: layer number of each mixture, by its canonical name.
        positions: names of the modules that add learned positions.
        untrained: names of parameters that something else than a gradient moves. FSDP leaves them whole.
        zero_dims: the dimension along which FSDP cuts a parameter, by name, where it is not the first.
        zero_blocks: consecutive blocks that are one unit of FSDP's.
        compiled: whether torch.compile makes the blocks' kernels.
        one_graph: whether every compiled block has to be a single graph.
        grouped: whether the products of a mixture's experts are one grouped product.
        exchange: how rows travel to experts on other ranks.
        fused_linear: names of the modules whose projections are fused into one product.
        functions: functions that are compiled alone, by name: (glob of their modules, attribute).
        loss_chunk: tokens for which the head computes losses at a time. None: the head returns logits.
        fp8: the scaling of the linear layers of blocks, which compute in fp8. None: they do not.
        fp8_gather: whether FSDP gathers their weights in 8 bits.
        overlap: the method that hides tensor parallelism's communication in blocks.
        device: the device of the forward pass.
        tie: shares the model's shared parameters again after tensor parallelism replaced them. FSDP must see
            them shared: of two parameters that are tied later, it would gather one from freed storage.
        stage: the number of the pipeline stage.
        compute: the type of weights as they compute and are gathered, and of what goes from one stage to the
            next. None: that of the parameters.
        reduce: the type in which gradients travel. None: that in which they are added up.
        autocast: the type of matrix products under torch's autocast. None: the stage does without it.
        switches: the parts that can leave autocast. None: there are none.
    """

    styles: Sequence[tuple[str, Style]]
    blocks: Sequence[nn.Module]
    attention: AttentionPlan
    mixtures: Sequence[str] = ()
    mixture_layers: Mapping[str, int] = field(default_factory=dict)
    positions: Sequence[str] = ()
    embedding: Sequence[nn.Module] = ()
    head: Sequence[nn.Module] = ()
    untrained: frozenset[str] = frozenset()
    zero_dims: Mapping[str, int] = field(default_factory=dict)
    zero_blocks: int = 1
    compiled: bool = False
    one_graph: bool = False
    grouped: bool = False
    exchange: ExpertExchange = EXACT
    fused_linear: Sequence[str] = ()
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    loss_chunk: int | None = None
    fp8: Fp8Scaling | None = None
    fp8_gather: bool = False
    overlap: OverlapMethod = "none"
    device: torch.device = CPU
    tie: Callable[[nn.Module], None] = lambda model: None
    stage: int = 0
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    autocast: torch.dtype | None = None
    switches: PrecisionSwitches | None = None
