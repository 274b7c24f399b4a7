"""Plans, analyses and their doors: figures by hand, bad input in one line, torch-free."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.config.load import load_job
from picotron_ray.config.support.fast_path import settled
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.analysis import analyse
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.hardware import NAMES, hardware
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.plan import for_devices, plan
from picotron_ray.planner.plan_text import analysis_lines, plan_lines, validation_lines
from picotron_ray.planner.published.validate import validate
from picotron_ray.planner.search import choose_layout

H100 = hardware("h100-80g")


def job(name: str = "smollm-135m", *overrides: str) -> Any:
    return load_job(name, ["data.path=unread", *overrides])


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


@pytest.mark.parametrize("gpus", [1, 6, 16])
def test_the_plan_is_the_coordinators_choice(gpus: int) -> None:
    """One search for both: what a plan promises is what a run on those devices takes."""
    found = plan(job(), gpus, H100)
    chosen = choose_layout(for_devices(job(), gpus), gpus, H100.profile, H100.node_sizes(gpus))
    assert found.best.layout == chosen.layout
    assert found.best.cost.total_s == chosen.cost_s
    costs = [step.cost.total_s for step in found.table]
    assert costs == sorted(costs)
    assert len({(s.layout.dp, s.layout.tp, s.layout.pp, s.layout.zero) for s in found.table}) > 1 or gpus == 1


def test_figures_of_a_plan_by_hand() -> None:
    found, config = plan(job(), 16, H100).to_dict(), job()
    layout = Layout.from_dict(found["layout"])
    tokens = config.data.global_batch * config.data.sequence_length
    assert found["tokens_per_s"] == pytest.approx(tokens / found["step_s"])
    assert found["step_s"] == pytest.approx(sum(found["breakdown"]["step_s"].values()))
    flops = analyse(config, 16, H100).flops_per_token
    assert found["mfu"] == pytest.approx(flops * found["tokens_per_s"] / (16 * 989e12))
    estimate = memory_estimate(settled(for_devices(config, 16), "cuda"), layout).total_bytes
    assert max(found["memory_bytes"]) == pytest.approx(estimate)
    for rank in found["breakdown"]["memory_bytes"]:
        state = rank["weights"] + rank["gradients"] + rank["optimizer"]
        assert rank["total"] == pytest.approx(
            state + max(rank["activations"] + rank["received"] + rank["buffers"], rank["update"])
        )


def test_gpus_override_the_configs_worker_counts() -> None:
    found = plan(job("smollm-135m", "cluster.max_workers=4", "cluster.min_workers=4"), 2, H100)
    assert found.best.layout.world_size == 2


def test_faults_of_workers_that_are_not_there_do_not_count() -> None:
    assert run("plan", "quickstart", "--gpus", "2").exit_code == 0


def test_degrees_may_need_more_than_the_configs_workers() -> None:
    words = ("layout.tp=2", "layout.pp=2", "layout.dp=8", "cluster.min_workers=4", "cluster.max_workers=4")
    found = run("plan", "llama-3-8b", "--gpus", "32", *words)
    assert found.exit_code == 0, found.stderr
    assert "dp8-tp2-pp2" in found.stdout


def test_what_more_would_buy_is_searched_anew() -> None:
    found = plan(job("llama-3-8b"), 8, H100)
    node, memory = found.purchases
    assert node.what == "8 more GPUs"
    assert node.step_s == plan(job("llama-3-8b"), 16, H100).best.cost.total_s < found.best.cost.total_s
    assert memory.step_s <= found.best.cost.total_s


def test_each_axis_has_its_route() -> None:
    """Tensor parallelism over NVLink, replicas four to a node between nodes, one of each in a pipeline."""
    words = ("layout.tp=2", "layout.pp=2", "layout.dp=8", "cluster.max_workers=32")
    found = plan(job("llama-3-8b", *words), 32, H100, buys=False)
    routes = {route.axis: route for route in found.routes()}
    profile = H100.profile
    assert routes["tp"] == ("tp", 2, True, profile.link_bytes_s, "nvlink")
    between = min(profile.link_bytes_s, 4 * profile.node_link_bytes_s)
    assert routes["dp"][1:] == (8, False, between, "cross_node")
    assert routes["pp"][1:] == (2, False, profile.node_link_bytes_s, "cross_node")
    assert str(routes["tp"]) == "tp=2 over NVLink, 279 GB/s"
    assert str(routes["pp"]) == "pp=2 between nodes, 32 GB/s"
    assert [route["axis"] for route in found.to_dict()["routes"]] == ["tp", "dp", "pp"]


def test_losers_have_their_reasons() -> None:
    found = plan(job("llama-3-8b"), 8, H100)
    reasons = [reason for _, reason in found.rejected]
    assert len(reasons) >= len(found.table) - 1
    assert any("more, for" in reason for reason in reasons)
    large = [(layout, reason) for layout, reason in found.rejected if "GB at least" in reason]
    assert large
    for layout, _ in large:
        whole = memory_estimate(for_devices(job("llama-3-8b"), 8), layout).total_bytes
        assert whole > found.budget_bytes


def test_seconds_by_cause_are_the_cost_models() -> None:
    found = plan(job(), 16, H100)
    assert found.best.cost == step_cost(found.job, found.best.layout, H100.profile, (8, 8))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("plan",), "plan: saw no config, expected a YAML file or a recipe, or --validate"),
        (("plan", "tiny", "--validate"), "plan --validate: saw tiny, expected no config"),
        (("plan", "--validate", "--dry-run"), "plan --validate: saw --dry-run, which is of one plan"),
        (
            ("plan", "llama-3-8b", "--dry-run", "precision=fp8", "fp8.scaling=mxfp8"),
            "--dry-run: saw fp8.scaling=mxfp8, whose kernels need a GPU",
        ),
        (("plan", "llama-3.1-405b", "--gpus", "8"), "; 120 h100-80g would do"),
        (("plan", "tiny", "--gpus", "0"), "--gpus: saw 0, expected at least 1, such as --gpus 8"),
        (("plan", "tiny", "--tokens", "2T"), "--tokens: saw 2T, expected a number above 0, such as 2e12"),
        (("plan", "--validate", "--gpus", "4"), "plan --validate: saw --gpus, which is of one plan"),
        (("plan", "--validate", "--goal", "memory"), "plan --validate: saw --goal"),
        (
            ("plan", "tiny", "--calibration", "/nowhere/x"),
            "--calibration: cannot read /nowhere/x: No such file",
        ),
        (
            ("plan", "tiny", "--calibration", __file__),
            "which holds no measured runs; expected auto, none, or",
        ),
        (
            ("plan", "tiny", "--hardware", "h100"),
            "--hardware: saw h100, expected one of a100-40g, a100-80g, h100-80g",
        ),
        (("plan", "llama-3-70b", "--gpus", "8"), "; 24 h100-80g would do"),
        (("plan", "quickstart", "layout.dp=16"), "= 16 workers, more than cluster.max_workers=4; nearest"),
        (
            ("plan", "quickstart", "layout.dp=2", "--gpus", "1"),
            "2 workers, more than --gpus 1",
        ),
        (
            ("plan", "llama-3-70b", "--gpus", "8", "layout.memory_budget_gib=150"),
            "room for 64.8 GB per worker, which layout.memory_margin=0.1 leaves of the device, below"
            " layout.memory_budget_gib=150, expected at least 147 GB for the leanest layout on 8 workers",
        ),
        (
            ("plan", "llama-3-70b", "--gpus", "8", "layout.memory_budget_gib=15"),
            "16.1 GB per worker by layout.memory_budget_gib=15, expected at least 147 GB for the leanest"
            " layout on 8 workers; raise layout.memory_budget_gib, add workers,",
        ),
        (
            ("plan", "quickstart", "--gpus", "8", "layout.memory_budget_gib=0.001"),
            "raise layout.memory_budget_gib to at least 0.0029, add workers, or make the model smaller; with"
            " that key no number of workers that was looked at would do",
        ),
        (("plan", "tiny", "layout.tp=3"), "layout.tp: saw 3, which does not divide"),
        (("plan", "tiny", "--json", "/nowhere/x.json"), "--json: cannot write /nowhere/x.json"),
        (("plan", "nothing"), "config: saw nothing, neither a file nor a packaged recipe"),
        (("analyse", "tiny", "--hardware", "h1000-80g"), "did you mean h100-80g?"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(words: tuple[str, ...], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(*words)
    assert found.exit_code == 2
    assert line in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not found.stdout


def test_a_model_that_fits_nowhere_says_so() -> None:
    with pytest.raises(ConfigError, match="no number up to 512 h100-80g would do"):
        plan(job("llama-3-70b", "layout.tp=1", "layout.pp=1", "layout.zero=0"), 8, H100)


def test_the_door_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = run("plan", "llama-3-8b", "--gpus", "16", "--json", str(path))
    assert found.exit_code == 0
    value = json.loads(path.read_text())
    assert value.keys() >= {
        "layout", "step_s", "tokens_per_s", "mfu", "memory_bytes", "breakdown", "best", "rejected", "seconds"
    }  # fmt: skip
    assert value["name"] in found.stdout
    assert f"MFU {100 * value['mfu']:.1f} %" in found.stdout
    assert "8 more GPUs would make a step of" in found.stdout


def test_validation_prints_every_row(tmp_path: Path) -> None:
    path = tmp_path / "validation.json"
    found = run("plan", "--validate", "--json", str(path))
    assert found.exit_code == 0
    value = json.loads(path.read_text())
    assert len(value["rows"]) == 359
    assert value["rows"][0].keys() >= {"source", "published", "predicted", "error", "doubt"}
    assert value["megatron_held_out_mape"] <= 0.07
    assert value["others_mape"] <= 0.12
    assert value["others_worst"] <= 0.30
    assert sum(" [judged]" in line or " [fitted]" in line or " [doubt]" in line or " [incomplete]" in line
               for line in found.stdout.splitlines()) == 359  # fmt: skip


def test_doors_load_no_torch() -> None:
    words = "['picotron-ray', 'plan', 'llama-3-8b', '--gpus', '64']"
    code = (
        f"import sys; sys.argv = {words}\nfrom picotron_ray.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_every_hardware_has_a_plan(name: str) -> None:
    found = plan(job("llama-3-8b"), 16, hardware(name), buys=False)
    assert 0.2 < found.mfu(found.best) < 0.75


def test_rows_of_a_table_are_of_different_kinds_and_say_who_idles() -> None:
    found = plan(job("llama-3-8b"), 61, H100, buys=False)
    kinds = {(s.layout.tp, s.layout.pp, s.layout.cp, s.layout.zero, s.layout.schedule) for s in found.table}
    assert len(kinds) == len(found.table)
    idle = 61 - found.best.layout.world_size
    assert idle
    assert f"layout     {found.best.layout} ({idle} idle)" in list(plan_lines(found))


def test_the_range_of_tokens_is_that_of_judged_sources() -> None:
    found = plan(job(), 8, H100, buys=False)
    sources = [one for one in validate().by_source.values() if one["judged"]]
    seen = [one["efficiency"] for one in sources]
    assert found.hardware.reached == pytest.approx((min(seen), max(seen)), abs=0.02)
    assert all(one["plain_mape"] >= 0.9 * (abs(1 - one["efficiency"]) - one["mape"]) for one in sources)
    best = found.tokens_per_s(found.best.cost.total_s)
    assert found.tokens_range() == pytest.approx([share * best for share in H100.reached])
    assert plan(job(), 8, replace(H100, reached=(1.0, 1.0)), buys=False).tokens_range() is None
    line = next(line for line in validation_lines(validate()) if "8 judged" in line)
    assert "efficiency 1.15" in line
    assert "% without it" in line


# --- analyse -----------------------------------------------------------------------------------------


def test_an_analysis_by_hand() -> None:
    config = job("smollm-135m")
    found = analyse(config, 8, H100)
    assert found.parameters == found.trainable == found.active == 134_515_008
    assert found.bytes == {"fp32": 4 * found.parameters, "bf16": 2 * found.parameters}
    assert found.state_bytes == 16 * found.parameters
    rows, batch = config.data.sequence_length, config.data.global_batch
    said = f"one row of {rows} tokens a micro-batch, steps of {batch} rows, in bf16:"
    assert any(said in line for line in analysis_lines(found))
    assert (
        found.flops_per_step == found.flops_per_token * config.data.global_batch * config.data.sequence_length
    )
    assert [found.memory_bytes[zero] for zero in "0123"] == sorted(found.memory_bytes.values(), reverse=True)


def test_the_largest_micro_batch_fits_and_one_row_more_does_not() -> None:
    config, found = for_devices(job("smollm-1.7b"), 8), analyse(job("smollm-1.7b"), 8, H100)
    for zero, rows in found.largest_micro_batch.items():
        for policy, most in rows.items():
            assert most > 0
            layout = Layout(dp=8, zero=int(zero), recompute=policy, micro_batch=most)  # type: ignore[arg-type]
            more = Layout(dp=8, zero=int(zero), recompute=policy, micro_batch=most + 1)  # type: ignore[arg-type]
            room = 0.9 * H100.profile.memory_bytes
            assert memory_estimate(config, layout).total_bytes <= room
            assert memory_estimate(config, more).total_bytes > room
    assert analyse(job("llama-3-70b"), 8, H100).largest_micro_batch["0"] == {"none": 0, "full": 0}


def test_one_device_shards_nothing() -> None:
    assert list(analyse(job(), 1, H100).memory_bytes) == ["0"]


def test_a_mixture_counts_what_a_token_goes_through() -> None:
    found = analyse(job("qwen3-30b-a3b"), 8, H100)
    assert 2.9e9 < found.active < 3.5e9
    assert 30e9 < found.parameters < 31e9


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    """Sizes by dtype come from the headers of its files; a broken header is one line."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [10], "data_offsets": [0, 20]},
        "b": {"dtype": "F32", "shape": [3], "data_offsets": [20, 32]},
    }).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    out = tmp_path / "analysis.json"
    assert run("analyse", str(tmp_path), "data.sequence_length=128", "--json", str(out)).exit_code == 0
    found = json.loads(out.read_text())
    assert found["bytes"] == {"bf16": 20, "fp32": 12}
    assert found["parameters"] == 2 * (32 * 64 + 32 * 32 + 3 * 32 * 48 + 64) + 2 * 64 * 32 + 32
    (tmp_path / "model.safetensors").write_bytes(b"short")
    broken = run("analyse", str(tmp_path))
    assert broken.exit_code == 2
    assert "model.safetensors" in broken.stderr
    assert len(broken.stderr.strip().splitlines()) == 1
