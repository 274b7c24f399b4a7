"""Config of how a step is computed: parallel degrees, precision by part, kernels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from picotron_ray.config.schema.base import Section
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Zero
from picotron_ray.layout.recompute_policy import EXACT_PATTERN, PATTERN
from picotron_ray.layout.schedules import SCHEDULES, canonical_name, schedule_names

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "auto"]
OverlapMethod = Literal["none", "ring", "symmetric-memory"]
Degree = Annotated[int, Field(ge=1)] | Literal["auto"]


AUTO_SCHEDULE = "auto"
"""Leaves the schedule and its stages per rank to the planner."""


def _schedule(name: str) -> str:
    if name == AUTO_SCHEDULE:
        return name
    try:
        return canonical_name(name)
    except LayoutError as error:
        raise ValueError(str(error)) from None


def _schedule_choices(schema: dict[str, Any]) -> None:
    schema["enum"] = [*schedule_names(), AUTO_SCHEDULE]


ScheduleName = Annotated[str, AfterValidator(_schedule), Field(json_schema_extra=_schedule_choices)]
"""Name of an entry of `SCHEDULES`; an alias becomes the name."""
ONE_STAGE = " and ".join(name for name, entry in SCHEDULES.items() if entry.stages_per_rank[1] == 1)


_RECOMPUTE = (
    "auto, none, full, selective, int8, every-N, middle-P, blocks-K, blocks-K-S or blocks-K-S-Q, or one of"
    " these but auto per pipeline stage, with commas between"
)
Recompute = Annotated[
    Annotated[str, Field(pattern=f"{EXACT_PATTERN}|^auto$")] | Annotated[str, Field(pattern=PATTERN)],
    Field(json_schema_extra={"expected": _RECOMPUTE}),
]
"""A policy, or ``auto``. Policies that keep gradients exact are a pattern of their own."""


class LayoutConfig(Section):
    """Parallel degrees; ``auto`` leaves a degree to the planner at every generation.

    Example::

        layout:
          tp: 2
          pp: 2
          schedule: interleaved-1f1b
          zero: 1
    """

    dp: Degree = Field(default="auto", description="data-parallel replicas")
    tp: Degree = Field(default="auto", description="tensor-parallel ranks")
    pp: Degree = Field(default="auto", description="pipeline stages")
    cp: Degree = Field(
        default=1, description="context-parallel ranks, which share every row; auto: where it pays or must be"
    )
    ep: Degree = Field(
        default="auto", description="ranks that share the experts of a block; folded over dp x cp"
    )
    expert_placement: Literal["even", "by_load"] = Field(
        default="even",
        description="which experts a rank holds, where ep > 1: even: by their numbers; by_load: a generation"
        " packs those of each layer so that ranks have even loads, as measured in the last 100 steps of the"
        " one before (the first is even)",
    )
    context: Literal["ring", "all-gather", "ulysses"] = Field(
        default="ring",
        description="how attention sees the keys of other ranks, where cp > 1: ring holds three parts of"
        " them at a time (its own, the one at hand, the one coming), all-gather all of them, ulysses whole"
        " rows of 1/cp of the heads (cp divides the key heads of a tensor-parallel rank)",
    )
    zero: Zero | Literal["auto"] = Field(
        default="auto",
        description="what replicas share out: 0 nothing, 1 weights and optimizer state (gathered and reduced"
        " once per step), 2 gradients too, 3 weights also within the step (FSDP2)",
    )
    replicate: Degree = Field(
        default=1,
        description="copies of what zero 1 to 3 share out (HSDP), each over 1/replicate of dp x cp; auto:"
        " where the planner says that it pays",
    )
    schedule: ScheduleName = Field(
        default="1f1b",
        description=f"pipeline schedule, where pp > 1; all but {ONE_STAGE} cut more than one stage per rank;"
        " custom: the one that actions writes down; auto: the planner's choice at every generation",
    )
    actions: tuple[str, ...] = Field(
        default=(),
        description="schedule custom: a row per pipeline rank of what it computes in order, such as '0F0 0F1"
        " 0B0 0I1 0W1': stage, F (forward), B (backward) or its halves I (gradients of inputs) and W (of"
        " weights), micro-batch; fixes pp, virtual_stages and the number of micro-batches",
    )
    virtual_stages: Degree = Field(
        default="auto",
        description="stages per pipeline rank; auto: as few as the schedule asks, with schedule=auto as many"
        " as pay",
    )
    micro_batch: Degree = Field(default="auto", description="samples per micro-batch and replica")
    recompute: Recompute = Field(
        default="auto",
        description="which blocks compute their activations again in the backward pass: none, full, selective"
        " (all but matrix products and attention), every-N, middle-P (percent), blocks-K (the first K of each"
        " stage in full), blocks-K-S (and the next S selectively), or one of these per pipeline stage, with"
        " commas between; auto: the cheapest that keeps the memory budget. Not exact: int8, which computes"
        " nothing again but keeps activations in 8 bits, and blocks-K-S-Q (the next Q so)",
    )
    offload_activations: bool = Field(
        default=False,
        description="on CUDA: keep in pinned host memory what blocks save for the backward pass; with"
        " recompute=full that is their inputs",
    )
    memory_budget_gib: float | None = Field(
        default=None,
        gt=0,
        description="device memory that a worker may take, by the planner's estimate; null: all but"
        " layout.memory_margin",
    )
    memory_margin: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share that an estimate leaves free of the memory that training may use: on a GPU"
        " all but a tenth, which the driver and its libraries take",
    )


class AdaptivePrecisionConfig(Section):
    """Adaptive precision: the parts of a model that bear it compute in ``precision``, the others in fp32.

    Example::

        precision: bf16
        adaptive_precision:
          error_bound: 1.0e-3
    """

    error_bound: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="relative error of the held-out loss that low precision may add: at the start of every"
        " generation the most sensitive blocks' attentions, hidden layers and the head are kept in fp32 until"
        " it holds, by passes that count towards elastic.first_step_timeout_s; null: everything"
        " computes in precision",
    )
    batches: int = Field(
        default=2, ge=1, description="held-out batches that each part is measured on; the worst one counts"
    )
    calm_steps: int = Field(
        default=100,
        ge=1,
        description="steps without a finding after which a part that became unstable in low precision (its"
        " gradient overflows, vanishes or swings) and rose to fp32 falls back",
    )


Fp8Scaling = Literal["tensorwise", "rowwise", "mxfp8"]


class Fp8Config(Section):
    """Scales of ``precision: fp8``, and the type in which ZeRO gathers the weights that have them.

    Example::

        precision: fp8
        fp8:
          scaling: rowwise
    """

    scaling: Fp8Scaling = Field(
        default="tensorwise",
        description="what has a scale of its own: tensorwise a tensor; rowwise each row or column along which"
        " a product adds up, nearer to bf16; mxfp8 every 32 values (compute capability 10.0 or later)",
    )
    gather: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="in what ZeRO gathers these layers' weights: fp8, half the bytes, for tensorwise scales"
        " alone and where the shards divide every weight's rows; bf16; auto: fp8 where it can be",
    )


class KernelsConfig(Section):
    """Implementations of attention, norms, products and the loss.

    Example::

        kernels:
          attention: flash
          loss: linear
          loss_chunk: 512
    """

    attention: Literal["auto", "flash", "efficient", "cudnn", "flash-attn", "math"] = Field(
        default="auto",
        description="auto: the first that the device offers of cudnn (from compute capability 9.0 on), flash,"
        " efficient, math; flash, efficient and cudnn are torch's, flash-attn needs the extra flash, math is"
        " the formulas. On CUDA flash and flash-attn (bf16, fp16) take data.document_masks and windows"
        " without a mask in memory, efficient (fp32 too) and math with one, cudnn takes neither, under"
        " layout.cp as without",
    )
    experts: Literal["auto", "loop", "grouped"] = Field(
        default="auto",
        description="products of a mixture's experts: one after the other, or grouped into one kernel (not in"
        " fp64, and rows of hidden_size and of intermediate_size / tp must be multiples of 16 bytes); auto:"
        " grouped on CUDA where it can be",
    )
    expert_exchange: Literal["auto", "exact", "padded"] = Field(
        default="auto",
        description="rows that go to experts on other ranks, where ep > 1: exact, as many as there are, for"
        " which the host waits once a layer; padded, as many as could ever go, for which nobody waits: by"
        " capacity_factor (for each part of a row under layout.cp), or without one min(ep, experts / top_k)"
        " times those of even routes, each chunk by itself; auto: padded on CUDA where that is at most 1.5"
        " times as many",
    )
    expert_chunks: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="transfers of a micro-batch's rows, where ep > 1, each for some of a rank's experts,"
        " which compute while the others travel; auto: 2 on CUDA for at least 4 experts a rank, else 1",
    )
    projections: Literal["auto", "separate", "fused"] = Field(
        default="auto",
        description="queries, keys and values, and gate and up: a matrix product each, or fused into one;"
        " names, state and checkpoints are the same; auto: fused on CUDA without layout.zero and experts,"
        " where weights lie together",
    )
    tp_overlap: OverlapMethod | Literal["auto"] = Field(
        default="auto",
        description="where tp > 1, the gather before a block's first products and the sum after its last:"
        " none, one after the other; ring, part by part, products computing while parts travel round the"
        " ranks; symmetric-memory, torch's fused operators (CUDA, ranks that reach each other's memory);"
        " auto: ring on CUDA, where neither precision, schedule, compiled blocks nor comm.activations bar it",
    )
    loss: Literal["auto", "logits", "linear"] = Field(
        default="auto",
        description="cross-entropy of the logits, or linear: with the head's product, some tokens at a time,"
        " so that all logits never exist at once; backward computes them again; auto: linear on CUDA for"
        " vocabularies of 65,536 tokens or more",
    )
    loss_chunk: int = Field(
        default=1024,
        ge=1,
        description="tokens whose logits exist at a time under loss=linear, to which auto comes where this is"
        " said",
    )
    norm: Literal["auto", "eager", "closed-form", "compiled"] = Field(
        default="auto",
        description="RMSNorm: eager, torch's operator; closed-form, with its gradient written down, which"
        " takes less time and memory where torch has no kernel; compiled, a block's second norm and the"
        " residual sum before it in one kernel of torch.compile; auto: closed-form on CPUs, else eager",
    )
    activation: Literal["eager", "compiled"] = Field(
        default="eager",
        description="SwiGLU's gate: torch's operators, or one kernel of torch.compile, which keeps less for"
        " backward",
    )
    optimizer: Literal["fused", "foreach"] = Field(
        default="fused",
        description="adamw: one kernel, or foreach: a few operations, each over all tensors, which take one"
        " more copy of the parameters while they run",
    )
    deterministic: bool = Field(
        default=False,
        description="the same bits in every run of a layout on the same machines: torch's deterministic"
        " algorithms, which may be slower; what has none is refused (cudnn attention, symmetric-memory,"
        " comm.selector, adapt.apply). NCCL's choice of algorithm must not change between the runs either",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="on CUDA: record a micro-batch's forward and backward pass once and replay it, for models"
        " whose kernels are shorter than their launches; dense models under plain data parallelism (dp)",
    )
    compile: bool | Literal["auto"] = Field(
        default="auto",
        description="torch.compile of every block; the first step of a generation compiles, for which"
        " elastic.compile_timeout_s leaves time; auto: on CUDA in bf16 and fp16, in layouts where a block is"
        " one graph (tp and cp of 1, no experts) and nothing looks into it (selective or int8 recomputation)",
    )
