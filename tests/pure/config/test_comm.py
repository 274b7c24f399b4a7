"""Bad values of ``comm`` and what it is at odds with: one line each, with the key and what to do."""

from __future__ import annotations

import pytest
import yaml

from picotron_ray.config.load import parse_job
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout

BAD = {
    "ratio of nothing": ("comm: {gradients: topk, ratio: 0}", "comm.ratio", "saw 0"),
    "ratio above one": ("comm: {gradients: topk, ratio: 1.5}", "comm.ratio", "<= 1"),
    "three bits": ("comm: {gradients: int8, bits: 3}", "comm.bits", "saw 3, expected one of 8, 4"),
    "bits of topk": ("comm: {gradients: topk, bits: 4}", "comm.bits", "comm.gradients=int8"),
    "ratio of int8": ("comm: {gradients: int8, ratio: 0.1}", "comm.ratio", "topk or powersgd"),
    "large bucket": ("comm: {bucket_mib: 26}", "comm.bucket_mib", "<= 25"),
    "small chunk": ("comm: {chunk_mib: 0.5}", "comm.chunk_mib", ">= 1"),
    "overlap above one": ("comm: {overlap_ratio: 1.1}", "comm.overlap_ratio", "saw 1.1"),
    "overlap of flat": (
        "comm: {gradients: flat, overlap_ratio: 0.5}",
        "comm.overlap_ratio",
        "which has none",
    ),
    "one inside": ("comm: {gradients: hierarchical, inner_ranks: 1}", "comm.inner_ranks", "saw 1"),
    "compressed under ZeRO-3": (
        "{comm: {gradients: powersgd}, layout: {zero: 3}}",
        "comm.gradients",
        "saw powersgd with layout.zero=3",
    ),
    "compressed in fp64": (
        "{comm: {gradients: int8}, precision: fp64}",
        "comm.gradients",
        "saw int8 with precision=fp64",
    ),
    "compressed tree": ("comm: {gradients: topk, topology: tree}", "comm.topology", "use auto"),
    "overlapped ring": ("comm: {gradients: overlapped, topology: ring}", "comm.topology", "flat, bucketed"),
    "tree of one worker": (
        "{comm: {topology: tree}, cluster: {max_workers: 1}}",
        "comm.topology",
        "saw tree with cluster.max_workers=1",
    ),
    "tree of one replica": ("{comm: {topology: tree}, layout: {dp: 1}}", "comm.topology", "one rank"),
    "levels of one replica": (
        "{comm: {gradients: hierarchical}, layout: {dp: 1}}",
        "comm.gradients",
        "one rank",
    ),
    "ring on NCCL": (
        "{comm: {topology: ring}, cluster: {device: cuda}}",
        "comm.topology",
        "or set NCCL_ALGO for all",
    ),
    "selector of one": (
        "comm: {gradients: flat, selector: true}",
        "comm.selector",
        "leaves no choice; drop one",
    ),
    "selector in a graph": (
        "{comm: {selector: true}, kernels: {cuda_graphs: true}, cluster: {device: cuda}}",
        "comm.selector",
        "cannot time",
    ),
    "gathers without ZeRO": (
        "{comm: {parameters: ring}, layout: {zero: 0}}",
        "comm.parameters",
        "no weights",
    ),
    "gathers without tp": ("{comm: {activations: mesh}, layout: {tp: 1}}", "comm.activations", "layout.tp=1"),
    "gathers beside overlap": (
        "{comm: {activations: ring}, kernels: {tp_overlap: ring}}",
        "comm.activations",
        "saw ring with kernels.tp_overlap=ring, which sends part by part itself",
    ),
    "gathers in a graph": (
        "{comm: {activations: ring}, kernels: {compile: true}}",
        "comm.activations",
        "kernels.compile=true",
    ),
    "rows of a dense model": ("{comm: {experts: pairwise}}", "comm.experts", "model.moe.experts=0"),
    "gathers of one worker": (
        "{comm: {parameters: ring}, cluster: {max_workers: 1}}",
        "comm.parameters",
        "cluster.max_workers=1",
    ),
    "gathers on NCCL": (
        "{comm: {parameters: hierarchical}, cluster: {device: cuda}}",
        "comm.parameters",
        "NCCL has algorithms of its own",
    ),
    "an exchange's ring": ("{comm: {experts: ring}}", "comm.experts", "saw 'ring'"),
    "no neighbourhoods": ("{comm: {inner_ranks: 2}}", "comm.inner_ranks", "without neighbourhoods"),
    "flat under ZeRO": ("{comm: {gradients: flat}, layout: {zero: 1}}", "comm.gradients", "block by block"),
    "levels under ZeRO": (
        "{comm: {gradients: hierarchical}, layout: {zero: 1}}",
        "comm.gradients",
        "replicate",
    ),
    "mesh under ZeRO": ("{comm: {topology: mesh}, layout: {zero: 1}}", "comm.topology", "layout.zero=1"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_line_with_the_key_and_a_remedy(name: str) -> None:
    text, key, words = BAD[name]
    with pytest.raises(ConfigError) as refused:
        parse_job(yaml.safe_load(text))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{key}: ")
    assert words in line


@pytest.mark.parametrize(
    "text",
    [
        "comm: {gradients: topk, ratio: 1}",
        "comm: {gradients: int8, bits: 4}",
        "comm: {topology: mesh, gradients: flat, bucket_mib: 25, chunk_mib: 64}",
        "comm: {gradients: bf16, overlap_ratio: 0}",
        "{comm: {gradients: hierarchical}, layout: {zero: 1, replicate: 2}}",
        "{comm: {gradients: reduce-scatter}, layout: {zero: 3}}",
        "{comm: {parameters: mesh, selector: true}, layout: {zero: 3}}",
        "{comm: {parameters: flat, activations: flat}, layout: {zero: 1}, cluster: {device: cuda}}",
        "{comm: {selector: true}, cluster: {device: cuda}}",
        "{comm: {activations: hierarchical, inner_ranks: 2}}",
    ],
)
def test_what_just_passes(text: str) -> None:
    parse_job(yaml.safe_load(text))


def test_the_planner_is_kept_from_zero_where_gradients_are_compressed() -> None:
    job = parse_job({"comm": {"gradients": "topk"}})
    found = layout_problems(job, Layout(dp=2, zero=2, micro_batch=1))
    assert [problem.key for problem in found] == ["comm.gradients"]
    assert not layout_problems(job, Layout(dp=2, micro_batch=1))


def test_the_planner_is_kept_to_zero_where_gathers_are_asked_for() -> None:
    job = parse_job({"comm": {"parameters": "ring"}})
    found = layout_problems(job, Layout(dp=2, micro_batch=1))
    assert [problem.key for problem in found] == ["comm.parameters"]
    assert not layout_problems(job, Layout(dp=2, zero=1, micro_batch=1))
    assert not layout_problems(job, Layout(dp=1, micro_batch=1)), "one replica gathers nothing"
