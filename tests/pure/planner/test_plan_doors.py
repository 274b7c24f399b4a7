"""What ``plan`` and ``analyse`` take from their config, and say of machines and keys that a plan needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.config.load import load_job
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.kept_activations import receive_bytes
from picotron_ray.planner.memory_causes import memory_by_cause
from tests.pure.planner.test_hardware_profile import profile

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.fixture
def probed(tmp_path: Path) -> str:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(profile()))
    return str(path)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (("llama-3-70b",), 64),
        (("llama-3-70b", "cluster.max_workers=128"), 128),
        (("llama-3-70b", "--gpus", "32", "cluster.max_workers=128"), 32),
        (("gpt2-small",), 8),
    ],
)
def test_the_config_says_how_many_devices(words: tuple[str, ...], gpus: int) -> None:
    done = run("plan", *words, "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["gpus"] == gpus


def test_a_folder_of_hugging_face_is_planned_in_its_precision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = run("plan", str(tmp_path), "--gpus", "8")
    assert done.exit_code == 0, done.output
    told = run("analyse", str(tmp_path)).output
    assert "one row of 4096 tokens a micro-batch" in told
    assert "in bf16:" in told


def refusal(*words: str) -> str:
    done = run(*words)
    assert done.exit_code == 2
    return str(done.stderr)


def test_keys_that_a_run_on_gpus_refuses_are_refused() -> None:
    line = refusal("plan", "quickstart", "comm.topology=tree", "--hardware", "h100-80g")
    assert "comm.topology: saw tree, but workers run on GPUs" in line


def test_workers_on_cpus_are_bought_and_counted_by_machine(probed: str) -> None:
    done = run("plan", "quickstart", "--gpus", "2", "--hardware", probed, "--for", "cluster")
    assert "more workers on one more such machine would make a step of" in done.stdout
    assert "cluster    1 node of 2 workers, each with 4 CPUs" in done.stdout
    size = str(Path(probed).with_name("size.yaml"))
    words = ("plan", "quickstart", "--hardware", probed, "--for", "cluster", "--write-size", size)
    assert refusal(*words).startswith(f"error: --write-size: saw {probed}, whose workers are CPUs")
    assert not Path(size).exists()
    small = refusal("plan", "llama-3-8b", "precision=fp32", "--gpus", "2", "--hardware", probed)
    assert f"machines such as {probed} would do" in small


def test_a_number_that_would_do_is_looked_for_beyond_512() -> None:
    asked = ("layout.pp=8", "layout.tp=8", "layout.memory_budget_gib=48")
    words = ("plan", "llama-3.1-405b", *asked, "--gpus")
    line = refusal(*words, "512")
    assert "no number up to" not in line
    assert "; 960 h100-80g would do" in line
    assert run(*words, "960").exit_code == 0


def test_keys_that_the_plan_needs_come_first() -> None:
    words = ("plan", "llama-3-8b", "--gpus", "64")
    first = run(*words, "--search", "precision").stdout.splitlines()[0]
    assert first.split() == ["needs", "precision=fp8"]
    assert run(*words).stdout.startswith("64 h100-80g on 8 nodes")


def test_buffers_of_a_pipeline_are_a_cause_of_their_own() -> None:
    """Of 8,192 tokens and 4,096 values of 2 bytes: for micro-batches in flight, and two on their way.

    Rank 1 has 3 micro-batches in flight, whose activations lie where they were received; one more arrives
    while it computes, and so does a gradient. Ranks 0 and 3 receive from one side.
    """
    job = load_job("llama-3-8b", ["data.path=unread", "data.global_batch=512", "cluster.device=cuda"])
    layout, one = Layout(pp=4, micro_batch=1, schedule="1f1b"), 8192 * 4096 * 2
    assert [receive_bytes(job, layout, rank) / one for rank in range(4)] == [1, 5, 4, 2]
    assert receive_bytes(job, Layout(pp=4, micro_batch=1, schedule="gpipe"), 1) / one == 512 + 1
    assert receive_bytes(job, Layout(), 0) == 0
    causes = memory_by_cause(job, layout, 1)
    assert causes["received"] == receive_bytes(job, layout, 1)
    assert causes["activations"] > 0


def test_receives_are_early_on_devices_that_can() -> None:
    """One more buffer where they are."""
    job = load_job("llama-3-8b", ["data.path=unread", "data.global_batch=512", "cluster.device=cuda"])
    near = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "cpu"})})
    layout = Layout(pp=4, micro_batch=1, schedule="gpipe")
    assert receive_bytes(near, layout, 1) - receive_bytes(job, layout, 1) == 8192 * 4096 * 2
