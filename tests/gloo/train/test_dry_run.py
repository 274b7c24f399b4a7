"""The dry run: its bytes are those of the same engine with real tensors, and what a rank must send."""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.model_sizes import parameter_count
from picotron_ray.train.dry_run.run import dry_run
from tests.support.gloo.parallel_jobs.matrix_jobs import MIXTURE, make_job

MODEL = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=176, layers=2, heads=4, kv_heads=2)
JOB = make_job("adamw", 8, MODEL, precision="fp32", length=64)
WEIGHTS = 4 * parameter_count(MODEL)


def test_fake_tensors_take_what_real_ones_do() -> None:
    layout = Layout(micro_batch=2)
    fake, real = dry_run(JOB, layout), dry_run(JOB, layout, fake=False)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    assert fake.by_class["weights"] == fake.by_class["gradients"] == WEIGHTS
    assert fake.by_class["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert fake.by_class["activations"] > 0


def test_a_rank_of_two_replicas_sends_its_gradients_once() -> None:
    found = dry_run(JOB, Layout(dp=2, micro_batch=2), 1)
    assert found.sent_bytes_by_axis["data"] == pytest.approx(WEIGHTS, rel=0.01)  # 2 x (2-1)/2


def test_zero_3_holds_its_part_and_frees_what_it_gathers() -> None:
    whole, cut = (
        dry_run(JOB, Layout(dp=4, zero=2, micro_batch=2)),
        dry_run(JOB, Layout(dp=4, zero=3, micro_batch=2)),
    )
    assert cut.by_class["weights"] == pytest.approx(WEIGHTS / 4, rel=0.02)
    assert cut.peak_bytes < whole.peak_bytes


def test_a_pipeline_sends_hidden_states() -> None:
    found = dry_run(JOB, Layout(pp=2, micro_batch=2), 0)
    hidden = 4 * 8 * 64 * MODEL.hidden_size
    assert found.sent_bytes_by_axis["pp"] == pytest.approx(hidden, rel=0.01)


def test_a_mixtures_routes_are_even_without_being_computed() -> None:
    """A router with random weights is nearly as even: what is held hardly differs."""
    job, layout = make_job("adamw", 8, MIXTURE), Layout(micro_batch=2)
    fake, real = dry_run(job, layout), dry_run(job, layout, fake=False)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)
    assert fake.by_class["weights"] == real.by_class["weights"] == 8 * parameter_count(MIXTURE)
