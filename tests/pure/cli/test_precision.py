"""``precision: auto``: what it comes to, what is judged before and after, what a resume may leave to it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.config.export import public_dict
from picotron_ray.config.load import load_job
from picotron_ray.config.resume import check_resume
from picotron_ray.config.support.precision import COMPUTE_BYTES, chosen, possible, precision_problem
from picotron_ray.errors import ConfigError
from picotron_ray.planner.kept_activations import STATE_BYTES
from picotron_ray.planner.search import layouts
from picotron_ray.runtime.run_storage.init_from import compatible_precision


@pytest.mark.parametrize(
    ("device", "capabilities", "expected"),
    [
        ("cpu", [], "fp32"),
        ("cuda", [(9, 0)], "bf16"),
        ("cuda", [(8, 0), (10, 0)], "bf16"),
        ("cuda", [(9, 0), (7, 5)], "fp16"),
        ("cuda", [(7, 0)], "fp16"),
    ],
)
def test_auto_is_what_all_devices_have(
    device: str, capabilities: list[tuple[int, int]], expected: str
) -> None:
    found, why = chosen(device, capabilities)
    assert found == expected
    least = ".".join(map(str, min(capabilities))) if capabilities else "CPUs"
    assert least in why
    job = load_job("tiny", [f"precision={found}"])
    assert precision_problem(job, device, capabilities) is None


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_a_machine_without_the_format_may_not_take_part(precision: str) -> None:
    job = load_job("tiny", [f"precision={precision}"])
    problem = precision_problem(job, "cuda", [(7, 0), (7, 5)])
    assert problem == (
        f"saw {precision}, which needs compute capability 8.0 or later, on devices of 7.5; use fp16 or fp32"
    )
    assert precision_problem(job, "cuda", [(7, 0), (8, 6)]) is None, "its worker on the other one says so"
    assert precision_problem(job, "cuda") is None, "no driver tells: the worker does"


def test_fp8_needs_newer_devices_and_sizes_that_its_products_take() -> None:
    job = load_job("tiny", ["precision=fp8", "data.sequence_length=32", "data.global_batch=8"])
    assert precision_problem(job, "cuda", [(8, 9)]) is None
    assert precision_problem(job, "cuda", [(8, 0)]) == (
        "saw fp8, which needs compute capability 8.9 or later, on devices of 8.0; use bf16 or fp32"
    )
    assert precision_problem(job, "cpu") == "saw fp8, which CPUs do not have; use fp32 or bf16"
    assert precision_problem(job, "auto") is None, "judged when the machines are known"
    blocks = load_job("tiny", ["precision=fp8", "fp8.scaling=mxfp8", "data.sequence_length=32"])
    assert precision_problem(blocks, "cuda", [(9, 0)]) == (
        "saw mxfp8, which needs compute capability 10.0 or later, on devices of 9.0; use rowwise or bf16"
    )
    assert precision_problem(blocks, "cuda", [(10, 0)]) is None
    tokens = [job.data.sequence_length // layout.cp for layout in layouts(job, 4)]
    assert tokens
    assert all(count % 16 == 0 for count in tokens)
    narrow = load_job("tiny", ["precision=fp8", "layout.cp=auto", "data.sequence_length=16"])
    assert {layout.cp for layout in layouts(narrow, 4)} == {1}, "half a row would be 8 tokens"


def test_rules_judge_what_auto_may_come_to() -> None:
    bound = "adaptive_precision.error_bound=0.01"
    for device in ("auto", "cuda"):
        load_job("tiny", ["precision=auto", bound, f"cluster.device={device}"])
    with pytest.raises(ConfigError, match=r"saw 0\.01 with precision=fp32"):
        load_job("tiny", ["precision=auto", bound, "cluster.device=cpu"])
    job = load_job("tiny", ["precision=auto"])
    assert [each.precision for each in possible(job)] == ["bf16", "fp16", "fp32"]
    assert all(STATE_BYTES[each.precision] == STATE_BYTES["auto"] for each in possible(job))
    assert all(COMPUTE_BYTES[each.precision] <= COMPUTE_BYTES["auto"] for each in possible(job))


def test_a_resume_may_leave_it_to_the_run_again() -> None:
    for was in ("fp32", "bf16", "fp16"):
        before = public_dict(load_job("tiny", [f"precision={was}"]))
        assert check_resume(before, load_job("tiny", ["precision=auto"])) == []
    with pytest.raises(ConfigError, match="precision: was 'bf16', now 'fp16'; it may not change"):
        check_resume(public_dict(load_job("tiny", ["precision=bf16"])), load_job("tiny", ["precision=fp16"]))


def test_another_runs_state_is_judged_once_auto_is_settled() -> None:
    assert compatible_precision("fp16", "auto", optimizer_state=True), "it may come to fp16"
    assert not compatible_precision("fp16", "bf16", optimizer_state=True)
    assert not compatible_precision("fp64", "auto", optimizer_state=False)


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "auto comes to fp32, workers"), ("auto", "else fp16; on CPUs fp32")]
)
def test_validate_says_what_it_can(device: str, said: str) -> None:
    words = ["validate", "tiny", "precision=auto", f"cluster.device={device}"]
    assert said in CliRunner().invoke(cli.app, words).stdout.splitlines()[-1]
    (note,) = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)["notes"]
    assert said in note
    assert "notes" not in json.loads(CliRunner().invoke(cli.app, ["validate", "tiny", "--json"]).stdout)
