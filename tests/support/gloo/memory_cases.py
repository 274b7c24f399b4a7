"""Layouts by which the memory model is judged, drawn by seed: families, precisions, every degree and kernel.

The peak of a layout is its fullest pipeline rank's, of which the first and the last are looked at: under
every schedule one of them holds most.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import rank_memory
from picotron_ray.planner.model_sizes import blocks_again

SEQUENCE, LAYERS = 512, 4
FAMILIES = ("llama", "gpt2", "olmo2", "tied", "mixture", "shared", "gemma2", "gemma3")
LATENT = ("latent", "latent-queries", "latent-mixture")
"""Kinds of DeepSeek; drawn apart, so that the others stay what they were."""
MIXTURES = ("mixture", "shared", "latent-mixture")


def shape_of(family: str, smaller: int = 1) -> dict[str, Any]:
    """The model of a family, ``smaller`` times narrower."""
    shape = {
        "family": (
            "deepseek"
            if family in LATENT
            else family
            if family in ("gpt2", "olmo2", "gemma2", "gemma3")
            else "llama"
        ),
        "vocab_size": 4096 // smaller,
        "hidden_size": 512 // smaller,
        "intermediate_size": 1376 // smaller,
        "layers": LAYERS,
        "heads": 8,
        "kv_heads": 8 if family == "gpt2" or family in LATENT else 4,
        "tie_embeddings": family == "tied",
    }
    if family == "gpt2":
        shape |= {"max_positions": SEQUENCE // smaller}
    if family.startswith("gemma"):  # windows as long as a row, which cp takes
        shape |= {"sliding_window": SEQUENCE // smaller, "full_attention_every": 2, "tie_embeddings": True}
        capped = {"attention_softcap": 50.0, "logit_softcap": 30.0}
        shape |= capped if family == "gemma2" else {"rope_local_theta": 100.0}
    if family in LATENT:
        heads = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
        shape["mla"] = {key: size // smaller for key, size in heads.items()} | {
            "kv_lora_rank": 128 // smaller
        }
    if family == "latent-queries":
        shape["mla"] |= {"q_lora_rank": 192 // smaller}
    if family in MIXTURES:
        shape["moe"] = {"experts": 4, "top_k": 2, "intermediate_size": 512 // smaller}
    if family == "latent-mixture":
        shape["moe"] |= {"shared_intermediate_size": 512 // smaller, "first_dense_layers": 1}
    if family == "shared":
        shape["moe"] |= {"shared_intermediate_size": 256 // smaller, "loss_coefficient": 0.01}
    return shape


SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zbv", 2))


class MemoryCase(NamedTuple):
    """A job and a layout, and what names them."""

    name: str
    job: JobConfig
    layout: Layout


def memory_cases(
    count: int, seed: int = 0, smaller: int = 1, families: tuple[str, ...] = FAMILIES
) -> Iterator[MemoryCase]:
    """So many cases, as many of each family as of any other, of models ``smaller`` times narrower."""
    draw, seen = random.Random(seed), set()
    while len(seen) < count:
        family = families[len(seen) % len(families)]
        case = _case(family, draw, smaller)
        if case is not None and case.name not in seen:
            seen.add(case.name)
            yield case


def one_process_cases(
    count: int, seed: int = 1, families: tuple[str, ...] = FAMILIES
) -> Iterator[MemoryCase]:
    """So many cases of one rank: families, precisions, recomputation, kernels, rows; small models."""
    left = count
    for case in memory_cases(40 * count, seed, 4, families):
        if left and case.layout.world_size == 1:
            left -= 1
            yield case


def _case(family: str, draw: random.Random, smaller: int) -> MemoryCase | None:
    pp = draw.choice((1, 1, 1, 2, 4))
    schedule, virtual = draw.choice(SCHEDULES) if pp > 1 else ("1f1b", 1)
    cp, tp = draw.choice((1, 1, 1, 2)), draw.choice((1, 1, 2))
    dp = draw.choice((1, 2, 4))
    ep = draw.choice((1, 2)) if family in MIXTURES and dp * cp > 1 else 1
    zero = draw.choice((0, 1, 2, 3)) if dp * cp > 1 else 0
    recompute = draw.choice(("none", "none", "full", "selective"))
    rows = draw.choice((1, 2))
    options: dict[str, Any] = {
        "precision": draw.choice(("fp32", "bf16", "bf16")),
        "optimizer": {"name": draw.choice(("adamw", "adamw", "sgd"))},
        "kernels": {"loss": draw.choice(("logits", "logits", "linear"))},
    }
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero, schedule=schedule, virtual_stages=virtual,
                    micro_batch=rows, recompute=recompute)  # fmt: skip
    try:
        job = parse_job(
            {
                "model": shape_of(family, smaller),
                "data": {"sequence_length": SEQUENCE // smaller, "global_batch": dp * rows * max(2, pp)},
                "cluster": {"device": "cpu", "max_workers": layout.world_size},
                **options,
            }
        )
        problems = layout_problems(job, layout)
    except (ConfigError, LayoutError):
        return None
    if problems or layout.stages > LAYERS:
        return None
    words = (options["precision"], options["optimizer"]["name"], options["kernels"]["loss"])
    return MemoryCase(" ".join((family, *words, str(layout))), job, layout)


def ends(layout: Layout) -> list[int]:
    """First and last pipeline ranks."""
    return sorted({0, layout.pp - 1})


def estimated(case: MemoryCase) -> dict[int, float]:
    """Estimated bytes of the pipeline ranks that are looked at."""
    job, layout = case.job, case.layout
    return {
        rank: rank_memory(job, layout, rank, blocks_again(job, layout, rank)).total_bytes
        for rank in ends(layout)
    }
