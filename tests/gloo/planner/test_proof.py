"""A plan's dry run: peaks and bytes by axis against the engine's, in parts of a step too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.compute import Fp8Config, LayoutConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.sent_bytes import sent_bytes
from picotron_ray.train.dry_run.proof import PlanProof, prove

MODEL = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "layers": 4, "heads": 8, "kv_heads": 4
}  # fmt: skip
MIXTURE = {"moe": {"experts": 4, "top_k": 2, "intermediate_size": 128}}


def job_of(layout: Layout, micro_batches: int = 2, precision: str = "bf16", **model: Any) -> JobConfig:
    rows = sum(layout.replica_rows) or layout.dp * layout.micro_batch * micro_batches
    return parse_job(
        {
            "model": {**MODEL, **model},
            "data": {"sequence_length": 256, "global_batch": rows},
            "precision": precision,
            "cluster": {"max_workers": layout.world_size},
        }
    )


def holds(proof: PlanProof) -> None:
    """The fullest rank's peak within a tenth, none above what a plan leaves free, bytes within 3 %."""
    predicted = max(one.predicted_peak for one in proof.ranks)
    assert predicted == pytest.approx(max(one.traced_peak for one in proof.ranks), rel=0.1)
    for one in proof.ranks:
        assert one.traced_peak < one.predicted_peak / (1 - LayoutConfig().memory_margin), one
        for axis, size in one.predicted_sent.items():
            # norms of gradients and weights that ranks hold alike are not predicted
            assert one.traced_sent[axis] == pytest.approx(size, rel=0.03, abs=30_000), (axis, one)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=2, tp=2, zero=3, recompute="full"), {}),
        (Layout(recompute="int8", micro_batch=2), {}),
        (Layout(dp=2, pp=2, stage_blocks=(3, 1)), {}),
    ],
    ids=str,
)
def test_a_plan_keeps_the_peaks_and_bytes_that_it_predicts(layout: Layout, model: dict[str, Any]) -> None:
    holds(prove(job_of(layout, 2 * layout.pp, **model), layout))


RING = [
    (Layout(tp=2), "bf16", {}),
    pytest.param(Layout(tp=4, recompute="full"), "bf16", {}, marks=pytest.mark.deep),
    pytest.param(Layout(dp=2, tp=2, zero=3, recompute="full"), "fp32", {}, marks=pytest.mark.deep),
    pytest.param(Layout(tp=2, recompute="full"), "bf16", MIXTURE, marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("layout", "precision", "model"), RING, ids=str)
def test_what_a_ring_keeps_and_sends(layout: Layout, precision: str, model: dict[str, Any]) -> None:
    """By auto, in a plan for CUDA."""
    job = job_of(layout, 2, precision, **model)
    cuda = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "cuda"})})
    proof = prove(cuda, layout)
    holds(proof)
    gathered_once = sent_bytes(job, layout, 0)["tp"]
    assert proof.ranks[0].predicted_sent["tp"] > 1.05 * gathered_once


@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(dp=4), {}),
        (Layout(dp=4, zero=2, replicate=2, pp=2, recompute="selective"), {}),
        (Layout(dp=2, cp=2, zero=1), {}),
        (Layout(dp=2, cp=4, context="all-gather", recompute="full"), {}),
        (Layout(cp=2, micro_batch=2, recompute="selective"), {"sliding_window": 32}),
        (Layout(dp=2, cp=2, zero=1, context="ulysses"), {}),
        (Layout(cp=4, context="ulysses", recompute="selective"), {}),
        (Layout(dp=4, ep=2), MIXTURE),
        (Layout(dp=4, ep=2, zero=1, recompute="full"), MIXTURE),
        (Layout(pp=2, virtual_stages=2, schedule="interleaved-1f1b"), {}),
        (Layout(pp=2, tp=2, virtual_stages=2, schedule="zbv"), {}),
        (Layout(pp=2, stage_blocks=(1, 3), recompute="full"), {}),
        (Layout(dp=2, pp=2, zero=1), {"tie_embeddings": True}),
        (Layout(dp=4, zero=1, recompute="blocks-3"), {}),
        (Layout(dp=2, micro_batch=4, replica_rows=(6, 2), zero=2), {}),
        (Layout(dp=2, tp=2, zero=3, recompute="int8"), {}),
        (Layout(dp=2, micro_batch=2, pp=2, recompute="int8"), {}),
        (Layout(dp=2, micro_batch=4, zero=2, recompute="blocks-1-1-2"), {}),
        (Layout(pp=2, dp=2, micro_batch=2, stage_blocks=(3, 1), replica_rows=(10, 6), recompute="int8"), {}),
    ],
    ids=str,
)
def test_many_plans_keep_what_they_predict(layout: Layout, model: dict[str, Any]) -> None:
    holds(prove(job_of(layout, 2 * layout.pp, **model), layout))


def test_a_long_step_is_proven_in_part() -> None:
    layout = Layout(dp=2, zero=2)
    proof = prove(job_of(layout, micro_batches=16), layout)
    assert (proof.micro_batches, proof.of) == (2, 16)
    assert proof.lines()[0] == "dry run    2 of 16 micro-batches with fake tensors, kernels of CPUs:"
    assert PlanProof((), 1, 1, 0.0).lines()[0].startswith("dry run    1 micro-batch with fake tensors")
    assert "not traced" not in "\n".join(proof.lines())
    fuller = replace(proof, whole_peak=proof.ranks[0].predicted_peak + 2e9)
    assert fuller.lines()[-1].endswith("2 GB more, of 14 further micro-batches' buffers, not traced")
    whole = sent_bytes(job_of(layout, micro_batches=16), layout, 0)["replicas"]
    assert whole > proof.ranks[0].predicted_sent["replicas"]


def test_the_door_proves_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "tiny", "--gpus", "2", "--dry-run", "--json", str(path)]
    code = f"import sys; sys.argv = ['picotron-ray', *{words}]\nfrom picotron_ray.cli import app\napp()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr
    (rank, *_) = json.loads(path.read_text())["dry_run"]["ranks"]
    assert abs(rank["error"]) < 0.15
    assert rank.keys() >= {"predicted_peak", "traced_peak", "predicted_sent", "traced_sent"}
    assert "dry run" in found.stdout


@pytest.mark.deep
@pytest.mark.parametrize(
    ("layout", "scaling"),
    [
        (Layout(dp=2, pp=2, zero=2), "tensorwise"),
        (Layout(dp=2, zero=3), "tensorwise"),
        (Layout(dp=2, zero=3), "rowwise"),
        (Layout(dp=2, tp=2, zero=1), "tensorwise"),
        (Layout(dp=4, zero=2, replicate=2), "tensorwise"),
    ],
    ids=str,
)
def test_weights_gathered_in_8_bits_are_planned_and_counted_so(layout: Layout, scaling: str) -> None:
    """Pipeline ranks follow each other in one process: a later one meets what torch keeps of a mesh."""
    pytest.importorskip("torchao")
    job = job_of(layout, 2 * layout.pp, "fp8").model_copy(update={"fp8": Fp8Config(scaling=scaling)})
    proof = prove(job, layout)
    holds(proof)
    for one in proof.ranks:
        types = {kind for by_type in one.sent_by_type.values() for kind in by_type}
        assert ("uint8" in types) == (scaling == "tensorwise"), types
