"""Config of what travels between ranks, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from picotron_ray.config.schema.base import Section

COMPRESSED = ("topk", "int8", "powersgd", "bf16")
"""Values of ``comm.gradients`` whose result is not the exact sum."""
Gather = Literal["auto", "flat", "ring", "mesh", "hierarchical"]
"""Algorithm of gathers, and of sums that leave each rank its part."""


class CommConfig(Section):
    """Communication: sums of gradients, gathers of weights and activations, exchanges of experts' rows.

    Example::

        comm:
          gradients: int8
          bits: 8
    """

    gradients: Literal[
        "auto",
        "flat",
        "bucketed",
        "overlapped",
        "reduce-scatter",
        "hierarchical",
        "topk",
        "int8",
        "powersgd",
        "bf16",
    ] = Field(
        default="auto",
        description="how replicas sum gradients. Exact: auto, what overlapped is, and under ZeRO FSDP2's;"
        " flat, all at once after the backward pass; bucketed, in buckets after it; overlapped, in buckets"
        " beside it; reduce-scatter, in two halves; hierarchical, inside neighbourhoods of inner_ranks and"
        " between them. Not exact, for layout.zero 0 and matrices, with error feedback in the training state:"
        " topk (the largest values), int8 (codes of bits with a scale per 256), powersgd (projections on few"
        " directions), bf16",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="type in which ZeRO sends gradients to be summed over its shards, with precision bf16,"
        " fp16 or fp8: fp32, in which they are added up, or bf16, half the bytes and rounded once; copies"
        " (layout.replicate) sum their shards in fp32. Replicas without ZeRO have gradients=bf16",
    )
    topology: Literal["auto", "ring", "tree", "mesh"] = Field(
        default="auto",
        description="algorithm of exact sums: auto, the backend's; ring, tree or mesh (each to each in one"
        " round), own ones over point-to-point messages (gloo), after the backward pass",
    )
    parameters: Gather = Field(
        default="auto",
        description="how ZeRO gathers weights. auto and flat: by the backend; ring, mesh (each to each in one"
        " round) and hierarchical (between neighbourhoods of inner_ranks, then inside): own algorithms over"
        " point-to-point messages (gloo). All exact",
    )
    activations: Gather = Field(
        default="auto",
        description="how tensor parallelism gathers and sums activations: as parameters",
    )
    experts: Literal["auto", "flat", "pairwise", "hierarchical"] = Field(
        default="auto",
        description="how rows go to their experts and back. auto and flat: by the backend; pairwise, one rank"
        " at a time, and hierarchical, one message for each neighbourhood of inner_ranks: own algorithms over"
        " point-to-point messages (gloo). All exact",
    )
    selector: bool = Field(
        default=False,
        description="with gradients and topology auto: measure the exact ways of gradients (without ZeRO),"
        " and on gloo of parameters, activations and experts where they are auto, while the run goes on, and"
        " every 100 steps take those that cost the step least (another one only if faster by 10 %); sums are"
        " rounded in another order then",
    )
    bucket_mib: float = Field(
        default=25.0, gt=0, le=25, description="gradients that are summed together, MiB at most"
    )
    zero_blocks: int = Field(
        default=1,
        ge=1,
        description="consecutive blocks of a stage whose weights ZeRO gathers, and whose gradients it sums,"
        " together: fewer and larger messages for small blocks over many ranks, and as many blocks' weights"
        " at once",
    )
    chunk_mib: float = Field(default=4.0, ge=1, le=64, description="largest message of an own algorithm, MiB")
    overlap_ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        default="auto",
        description="share of the buckets, 0 to 1, whose sums may start during the backward pass; auto: all",
    )
    ratio: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = Field(
        default="auto",
        description="topk and powersgd: bytes sent over bytes of the gradients, above 0 to 1; auto: 0.1 for"
        " gradients above 100 MB, 0.3 above 10 MB, else 0.5",
    )
    bits: Literal[8, 4] = Field(default=8, description="int8: bits of a code, 8 or 4")
    inner_ranks: Annotated[int, Field(ge=2)] | Literal["auto"] = Field(
        default="auto",
        description="hierarchical: neighbouring ranks of a neighbourhood, for gradients of the replicas"
        " (dp x cp); auto: those of a node, where all nodes have as many",
    )
