"""Moments in 8 bits under every layout: what 8 bits change, no more, in and out of checkpoints, on and on.

Blocks are of what a rank holds, so that layouts that cut them otherwise round otherwise. What that may come
to is measured: a layout must be about as near to full moments as one process with 8 bits is, and where it
leaves the blocks as they are, near to that process too.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.optim import adamw
from picotron_ray.train.optim.quantized_state import QuantizedTensor
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, assemble, run_layout, train
from tests.support.gloo.parity import distance, thinned
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses
from tests.support.gloo.train_jobs.muon_jobs import leg
from tests.support.gloo.train_jobs.quantized_jobs import BATCH, MIXTURE, WIDE, job_of, with_zeros

pytest.importorskip("torchao")
State = dict[str, np.ndarray]
TIED = WIDE.model_copy(update={"tie_embeddings": True})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# --- engines ----------------------------------------------------------------------------------------------


def moment_bytes(engine: Engine) -> int:
    """Of live storage."""
    held = [x for values in engine._optimizer.moments.values() for x in values.values()]
    return sum(x.codes.nbytes + x.scales.nbytes if isinstance(x, QuantizedTensor) else x.nbytes for x in held)


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 0.26), ("muon", 0.97)])
def test_moments_take_a_quarter(optimizer: str, share: float) -> None:
    """Of adamw; muon's momentum of the matrices stays, and the embeddings here are small."""
    sizes = []
    for moments in ("full", "8bit"):
        engine = build_engine(job_of(moments, optimizer=optimizer), Layout(), 0, None, CPU)
        assert ("8 bits" in str(engine.applied)) is (moments == "8bit")
        sizes.append(moment_bytes(engine))
        assert {entry.shard.dtype for entry in engine.state()} == {"float32"}
        engine.close()
    assert sizes[1] < share * sizes[0]


def test_no_step_is_far_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements whose square would be lost move by as many learning rates as with full moments, almost."""
    found = {}
    for kind in ("full", "8bit", "zeros"):
        if kind == "zeros":
            monkeypatch.setattr(adamw, "codebook_of", with_zeros)
        job = job_of("full" if kind == "full" else "8bit")
        ranks = [train(job, Layout(micro_batch=BATCH), 0, None)]
        found[kind] = assemble([rank.state for rank in ranks])["embed.weight"] / job.optimizer.learning_rate
    far = {kind: np.abs(values - found["full"]).max() for kind, values in found.items()}
    print(f"learning rates apart: {far}")
    assert far["8bit"] < 2 < 10 < far["zeros"]


def curve(moments: str, optimizer: str = "adamw") -> list[float]:
    """50 steps of one process that learns the same few rows."""
    job = job_of(moments, optimizer=optimizer)
    job = job.model_copy(update={"data": DataConfig(sequence_length=16, global_batch=8)})
    engine = build_engine(job, Layout(micro_batch=8), 0, None, CPU)
    engine.initialise(0)
    tokens = np.random.default_rng(0).integers(0, WIDE.vocab_size, (1, 8, 17))
    found = []
    for step in range(1, 51):
        feed = StepBatch(step, tokens, np.ones((1, 8)), 8 * 16, (0, 8), bytes(16))
        found.append(float(engine.gradients_of(feed)[0]) / (8 * 16))
        engine.optimizer_step(1e-3)
    engine.close()
    return found


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_it_learns_as_with_full_moments(optimizer: str) -> None:
    ours, exact = curve("8bit", optimizer), curve("full", optimizer)
    assert exact[-1] < 0.5 * exact[0]
    far = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
    print(f"largest difference of the loss {far:.2g}, from {exact[0]:.3f} to {exact[-1]:.3f}")
    assert 0 < far < 0.01 * exact[0]


# --- layouts ----------------------------------------------------------------------------------------------


@functools.cache
def alone(moments: str, model: ModelConfig = WIDE) -> State:
    """Weights and moments of one process."""
    return assemble([train(job_of(moments, model), Layout(micro_batch=BATCH), 0, None).state])


@functools.cache
def start(model: ModelConfig) -> State:
    engine = build_engine(job_of("full", model), Layout(), 0, None, CPU)
    engine.initialise(0)
    found = {entry.shard.name: entry.values().numpy().copy() for entry in engine.weights()}
    engine.close()
    return found


def apart(a: State, b: State, model: ModelConfig, prefix: str) -> float:
    """Relative difference of what became of all weights, or of a moment, as one vector."""
    names = sorted(name for name in b if name.rpartition("/")[0] == prefix)
    at = start(model)
    return distance(*(np.concatenate([(x[n] - at.get(n, 0.0)).ravel() for n in names]) for x in (a, b)))


def wrong(found: State, cut: bool, model: ModelConfig = WIDE) -> list[str]:
    """In what a state is not as 8 bits make it; empty: it is.

    Rounding to 8 bits has an error E, found in one process. A state with the same blocks differs from that
    process by the codes that fp32's own roundings r move: a share r / gap of them, by a gap each, which is
    sqrt(12 r / gap) E, or 6 % at r = 4e-6 and a gap of 1.4 %. With other blocks roundings are others, at most
    independent (1.4 E), but their errors as large.
    """
    lines = []
    for prefix in ("", "exp_avg", "exp_avg_sq"):
        full, here = alone("full", model), alone("8bit", model)
        usual = apart(here, full, model, prefix)
        error, other = apart(found, full, model, prefix), apart(found, here, model, prefix)
        print(
            f"{prefix or 'weights'}: E {usual:.2g}, here {error / usual:.3f} E, apart {other / usual:.2g} E"
        )
        if not 0.9 < error / usual < 1.1:
            lines.append(f"{prefix}: {error / usual:.3g} E from full moments")
        if other > (1.5 if cut else 0.1) * usual:
            lines.append(f"{prefix}: {other / usual:.3g} E from one process")
    return lines


# fmt: off
LAYOUTS = [  # and whether it has other blocks: tp cuts columns of some
    (WIDE, Layout(dp=2, micro_batch=3), False),
    (WIDE, Layout(dp=2, zero=1, micro_batch=3), False),
    (WIDE, Layout(dp=3, zero=3, micro_batch=2), False),  # rows that do not divide
    (WIDE, Layout(dp=4, zero=2, replicate=2, micro_batch=3), False),
    (WIDE, Layout(pp=2, schedule="1f1b", micro_batch=3), False),
    (TIED, Layout(pp=2, schedule="1f1b", micro_batch=3), False),  # both ends have moments of the embedding
    (WIDE, Layout(cp=2, zero=1, micro_batch=3), False),
    (WIDE, Layout(tp=2, micro_batch=6), True),
    (WIDE, Layout(dp=2, tp=2, zero=2, micro_batch=3), True),
    (MIXTURE, Layout(dp=2, ep=2, zero=3, micro_batch=3), False),
    (MIXTURE, Layout(dp=2, tp=2, ep=2, micro_batch=3), True),
]
# fmt: on
KINDS = {WIDE: "", TIED: "tied-", MIXTURE: "mixture-"}
CASES = thinned(LAYOUTS, (2, 4, 5, 7, 9), lambda model, layout, _: f"{KINDS[model]}{layout}")


@pytest.mark.parametrize(("model", "layout", "cut"), CASES)
def test_layout_rounds_as_one_process(pool: Pool, model: ModelConfig, layout: Layout, cut: bool) -> None:
    job = job_of("8bit", model)
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert all("in 8 bits" in str(rank.applied) for rank in ranks)
    assert all(rank.stable for rank in ranks)
    assert wrong(assemble([rank.state for rank in ranks]), cut, model) == []


@pytest.mark.parametrize(
    ("layout", "plant"),
    [(Layout(dp=2, zero=3, micro_batch=3), "scales"), (Layout(tp=2, micro_batch=6), "tp-partial")],
)
def test_a_planted_fault_shows(pool: Pool, layout: Layout, plant: str) -> None:
    ranks = pool.run(layout.world_size, run_layout, [job_of("8bit")], layout, plant)
    assert wrong(assemble([results[0].state for results in ranks]), layout.tp > 1) != []


# --- from layout to layout --------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [("8bit", "8bit"), ("8bit", "full"), ("full", "8bit")])
def test_moments_go_on_in_another_layout_and_another_form(
    pool: Pool, tmp_path: Path, first: str, second: str
) -> None:
    """Two steps and one; being rounded in other blocks is another rounding, no larger than the others."""
    before, after = Layout(dp=3, zero=3, micro_batch=2), Layout(tp=2, micro_batch=6)
    pool.run(before.world_size, leg, job_of(first), before, (0, 2), tmp_path)
    found = assemble(pool.run(after.world_size, leg, job_of(second), after, (2, 3), tmp_path))
    for prefix in ("", "exp_avg", "exp_avg_sq"):
        usual = apart(alone("8bit"), alone("full"), WIDE, prefix)
        error = apart(found, alone("full"), WIDE, prefix)
        print(f"{prefix or 'weights'}: {error / usual:.3g} E")
        assert 0.01 * usual < error < 1.5 * usual


@pytest.mark.parametrize(
    "layout", [Layout(dp=3, zero=3, micro_batch=2), Layout(tp=2, micro_batch=6)], ids=str
)
def test_in_the_same_layout_no_bit_changes(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    found = []
    for name, legs in (("at-once", [(0, 3)]), ("in-two", [(0, 2), (2, 3)])):
        folder = tmp_path / name
        folder.mkdir()
        for steps in legs:
            state = pool.run(layout.world_size, leg, job_of("8bit"), layout, steps, folder)
        found.append(assemble(state))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


def run_of(folder: Path) -> JobConfig:
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, WIDE.vocab_size, 6000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    data = {
        "source": "memmap",
        "path": str(folder / "tokens.bin"),
        "sequence_length": 8,
        "global_batch": BATCH,
    }
    return JobConfig.model_validate(
        {
            "name": folder.name,
            "steps": 8,
            "precision": "fp32",
            "model": WIDE.model_dump(),
            "data": data,
            "optimizer": {"moments": "8bit"},
            "checkpoint": {"interval_steps": 1000},
            "evaluate": {"interval_steps": 1000, "samples": 4},
            "snapshot": {"interval_steps": 1, "folder": str(folder)},
        }
    )


def test_a_kill_and_a_re_mesh_in_living_processes(pool: Pool, tmp_path: Path) -> None:
    """The same losses bit for bit where the layout stays; near them where it changes."""
    layout, other = Layout(dp=2, zero=3, micro_batch=3), Layout(tp=2, micro_batch=6)
    runs = {name: Run(pool, run_of(tmp_path / name), tmp_path / name) for name in ("calm", "same", "other")}
    runs["calm"].finish(layout)
    for name, then in (("same", layout), ("other", other)):
        runs[name].strike(layout, (1, 4, "optimizer"))
        runs[name].finish(then)
        last = runs[name].last
        assert last is not None
        assert last.resume_step > 0, "from the snapshots, not from the beginning"
    calm, same, changed = (losses(runs[name].ledger()) for name in ("calm", "same", "other"))
    assert len(calm) == 8
    assert same == calm
    assert changed == pytest.approx(calm, rel=1e-4)
    assert changed != calm
