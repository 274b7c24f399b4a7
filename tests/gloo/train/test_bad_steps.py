"""Steps whose numbers are not finite: left out by all ranks alike, limited, and never kept."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint import torch_state
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import StateTensor, look_for_nonfinite
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import ScheduleConfig
from picotron_ray.coordinator.lineage import descend
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Outcome, Rewind, Source
from picotron_ray.coordinator.policies.restore_point import newest_slots, older_state
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger import check
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.train.engine import build_engine
from tests.gloo.runtime.test_recover import wait_for_state
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MIXTURE, MODEL, assemble, batch, make_job
from tests.support.gloo.parity import WEIGHTS_TOLERANCE, worst
from tests.support.gloo.pool import Pool, Worker
from tests.support.gloo.runs import NOBODY, losses, slots_in, terms
from tests.support.gloo.train_jobs.bad_step_jobs import (
    Bad,
    bad_generation,
    left_out_by_hand,
    loop_of,
    past_a_rewind,
    with_a_bad_step,
)
from tests.support.gloo.train_jobs.remesh_jobs import worker_name
from tests.support.selection import also_deep

BAD, STEPS, BATCH = 2, 4, 10
TWO = Layout(dp=2, micro_batch=2)


def job_with_a_schedule(optimizer: str, model: Any) -> JobConfig:
    """Rates differ from step to step, so that the schedule's step shows."""
    job = make_job(optimizer, BATCH, model, steps=STEPS)
    schedule = ScheduleConfig(kind="cosine", warmup_steps=2, final_ratio=0.1)
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"schedule": schedule})})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=4, micro_batch=2),
        Layout(dp=2, tp=2, zero=2, micro_batch=2),
        Layout(dp=2, pp=2, micro_batch=2),
        Layout(dp=4, ep=2, zero=2, micro_batch=2),
        *also_deep(
            Layout(dp=4, zero=3, micro_batch=2),
            Layout(dp=4, zero=1, micro_batch=2),
            Layout(dp=2, cp=2, zero=3, micro_batch=2),
            Layout(tp=2, pp=2, micro_batch=2),
        ),
    ],
    ids=str,
)
def test_a_skipped_step_is_a_run_by_hand_without_its_update(pool: Pool, layout: Layout) -> None:
    """NaN in the gradients of one replica only: every rank leaves the update out."""
    job = job_with_a_schedule("adamw", MIXTURE if layout.ep > 1 else MODEL)
    ranks = pool.run(4, with_a_bad_step, job, layout, BAD)
    far, name = worst(assemble([state for state, _ in ranks]), assemble([left_out_by_hand(job, BAD)]))
    assert far <= WEIGHTS_TOLERANCE, name
    for _, lines in ranks:
        told = [json.loads(line) for line in lines]
        assert [line.get("skipped", "") for line in told] == ["", "non-finite", "", ""]
        assert told[BAD - 1]["grad_norm"] is None
        assert told[BAD - 1]["samples"] == [BATCH, 2 * BATCH]


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_the_moments_do_not_see_a_skipped_step(pool: Pool, optimizer: str) -> None:
    job = job_with_a_schedule(optimizer, MODEL)
    ranks = pool.run(2, with_a_bad_step, job, TWO, BAD)
    far, name = worst(assemble([state for state, _ in ranks]), assemble([left_out_by_hand(job, BAD)]))
    assert far <= WEIGHTS_TOLERANCE, name


def test_steps_passed_over_are_steps_without_their_updates(pool: Pool) -> None:
    job = job_with_a_schedule("adamw", MODEL)
    ranks = pool.run(2, past_a_rewind, job, TWO, (2, 3))
    far, name = worst(assemble([state for state, _ in ranks]), assemble([left_out_by_hand(job, 2, 3)]))
    assert far <= WEIGHTS_TOLERANCE, name
    for _, lines in ranks:
        told = [json.loads(line) for line in lines]
        assert [line.get("passed_over", False) for line in told] == [False, True, True, False]
        assert [line["rows"] == [] for line in told] == [False, True, True, False]


def test_a_skipped_step_of_fp16_leaves_the_loss_scale() -> None:
    """NaN of the training's own lets the scaler halve down to 1; the next step begins as if it had not."""
    job = make_job("adamw", BATCH, steps=STEPS, precision="fp16")
    engine = build_engine(job, Layout(micro_batch=BATCH), 0, None, CPU)
    engine.initialise(0)
    scale = engine._scaling.tensors()[0]
    loop = loop_of(job, engine.layout, 0, engine, (batch(job, engine.layout, 0, n) for n in count(1)))
    loop._step(1)
    before = scale.clone()
    weight = engine.weights()[0].tensor
    assert isinstance(weight, torch.Tensor)
    kept = weight.detach().clone()
    weight.fill_(math.nan)
    loop._step(2)
    assert json.loads(loop.tail.lines()[-1])["loss"] is None
    weight.copy_(kept)
    assert torch.equal(scale, before)
    loop._step(3)
    assert torch.equal(scale, before + torch.tensor([0.0, 1.0]))
    assert [bool(json.loads(line).get("skipped")) for line in loop.tail.lines()] == [False, True, False]


class Training:
    """A run of two ranks, generation after generation."""

    def __init__(self, pool: Pool, folder: Path, **elastic: Any) -> None:
        tokens = np.random.default_rng(0).integers(0, 24, 3000).astype(np.uint16)
        (folder / "tokens.bin").write_bytes(tokens.tobytes())
        data = {"source": "memmap", "path": str(folder / "tokens.bin"), "sequence_length": 8}
        self.job = JobConfig.model_validate(
            {
                "name": folder.name.replace("_", "-").lower(),
                "steps": 8,
                "precision": "fp64",
                "model": MODEL.model_dump(),
                "data": {**data, "global_batch": BATCH},
                "checkpoint": {"interval_steps": 1000},
                "evaluate": {"interval_steps": 1000, "samples": 4},
                "snapshot": {"interval_steps": 1, "folder": str(folder)},
                "elastic": elastic,
            }
        )
        self.pool, self.folder, self.term = pool, folder, next(terms)
        self.layouts: dict[GenerationId, Layout] = {}
        self.spec: GenerationSpec | None = None

    def begin(
        self,
        bad: Bad,
        kill: tuple[int, int, str] = NOBODY,
        source: Source | None = None,
        rewinds: tuple[Rewind, ...] = (),
    ) -> list[Worker]:
        """Start a generation from the newest state that is sealed, or from ``source``."""
        source = source or newest_slots(slots_in(self.folder), self.layouts, self.spec) or Source("init")
        workers = self.pool.need(2)
        members = tuple(Member(worker_name(worker.pid), "node") for worker in workers)
        identity = GenerationId(self.term, len(self.layouts) + 1)
        self.spec = GenerationSpec(
            identity, members, TWO, source, "test", descend(self.spec, source), rewinds=rewinds
        )
        self.layouts[identity] = TWO
        self.pool.start(workers, bad_generation, self.job, self.spec, str(self.folder), kill, bad)
        return workers

    def abort(self) -> None:
        """Order the end of the generation, as a coordinator does at the first bad word."""
        (self.folder / f"abort-{len(self.layouts)}").touch()

    def generation(self, bad: Bad) -> list[Outcome]:
        """Run a generation to its end, of which rank 1 knows."""
        workers = self.begin(bad)
        last = workers[1].receive()
        self.abort()
        return [workers[0].receive(), last]

    def all_finite(self) -> bool:
        """Whether every value of every sealed slot is."""
        for path, _ in list_slots(self.folder):
            source = SlotSource([(path.name, path)])
            for found in source.pieces([kept.shard.name for kept in source.views[0].shards]).values():
                for piece in found:
                    values = np.frombuffer(source.read(piece), piece.shard.dtype)
                    if not np.isfinite(values).all():
                        return False
        return True


def test_a_bad_step_is_in_the_ledger_and_the_limit_outlives_a_recovery(pool: Pool, tmp_path: Path) -> None:
    """One bad step is allowed. A later generation, which restores the state, remembers it."""
    run = Training(pool, tmp_path, max_skipped_steps=1)
    alive, killed = run.begin(Bad(gradients=(3,)), kill=(1, 5, "forward"))
    wait_for_state(killed.pid, "Z")
    run.abort()
    assert alive.receive().step == 4
    pool.drop([killed])
    outcomes = run.generation(Bad(gradients=(7,)))
    assert [(o.kind, o.step) for o in outcomes] == [(FailureKind.NUMERICS, 6)] * 2
    for part in ("step 7 (samples 60 to 69)", "step 3 (samples 20 to 29) non-finite", "max_skipped_steps=1"):
        assert part in outcomes[0].detail
    ledger = max((header for _, header in list_slots(tmp_path)), key=lambda header: header.step).ledger
    data = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, tmp_path)
    report = check(ledger, data.plan, data.train, [(run.term, 2, 4)])
    assert (report.ok, report.steps, report.samples, report.skipped) == (True, 6, 60, BATCH)
    assert run.all_finite()
    (tmp_path / "calm").mkdir()
    calm = Training(pool, tmp_path / "calm")
    calm.generation(Bad(gradients=(3, 7)))
    slots = list_slots(tmp_path / "calm")
    told = max((header for _, header in slots), key=lambda header: header.step).ledger
    assert losses([line for line in ledger if '"step":3' not in line]) == pytest.approx(
        losses([line for line in told if '"step":3' not in line])[:5], rel=1e-12
    ), "the restored moments have not seen step 3 either"


def test_a_rewound_run_is_one_that_never_fed_the_samples(pool: Pool, tmp_path: Path) -> None:
    """Ranks report the step; a generation from an older state passes over what lies between."""
    run = Training(pool, tmp_path, on_nonfinite="rewind")
    outcomes = run.generation(Bad(gradients=(6,)))
    assert [(o.kind, o.step, o.bad_step, o.bad_reason) for o in outcomes] == [
        (FailureKind.NUMERICS, 5, 6, "non-finite")
    ] * 2
    source = older_state(slots_in(tmp_path), run.layouts, (), run.spec, wanted=4, below=6)[0]
    assert source.step == 4
    workers = run.begin(Bad(), source=source, rewinds=(Rewind(4, 6, "non-finite"),))
    assert [worker.receive().kind for worker in workers] == ["finished"] * 2
    newest = max((header for _, header in list_slots(tmp_path)), key=lambda header: (header.step, header.n))
    data = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, tmp_path)
    report = check(
        newest.ledger,
        data.plan,
        data.train,
        [(run.term, 2, 4)],
        8,
        [range(5, 7)],
    )
    assert report.wrong == ()
    assert (report.ok, report.samples, report.passed_over, report.skipped) == (True, 60, 2 * BATCH, 0)
    assert newest.extra["update_policy"]["skipped"] == 2, "the optimizer's bias correction knows"


def test_stop_ends_every_rank_before_the_update(pool: Pool, tmp_path: Path) -> None:
    run = Training(pool, tmp_path, on_nonfinite="stop")
    outcomes = run.generation(Bad(gradients=(3,)))
    assert [(o.kind, o.step) for o in outcomes] == [(FailureKind.NUMERICS, 2)] * 2
    assert "samples 20 to 29" in outcomes[0].detail
    assert max(slot.step for slot in slots_in(tmp_path)) == 2


def test_weights_that_are_not_finite_reach_no_slot(pool: Pool, tmp_path: Path) -> None:
    """Whoever would write such a weight refuses to, in the background or when it leaves."""
    run = Training(pool, tmp_path)
    outcomes = run.generation(Bad(weights=4))
    (found,) = {(o.step, o.detail) for o in outcomes if o.kind is FailureKind.NUMERICS}
    assert found[0] == -1, "what is live there is no state to go on from"
    assert "embed.weight after step 4 (samples 30 to 39): saw NaN or infinity" in found[1]
    assert run.all_finite()
    kept = newest_slots(slots_in(tmp_path), run.layouts, run.spec)
    assert kept is not None
    assert kept.step == 3


def test_a_run_does_not_finish_with_a_loss_of_nan(pool: Pool, tmp_path: Path) -> None:
    run = Training(pool, tmp_path)
    for bad, why in ((Bad(gradients=(8,)), "it is the last step"), (Bad(evaluation=True), "a held-out loss")):
        outcomes = run.generation(bad)
        assert [(o.kind, why in o.detail) for o in outcomes] == [(FailureKind.NUMERICS, True)] * 2
        assert max(slot.step for slot in slots_in(tmp_path)) == 7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_in_a_thousand_is_found(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the sum of squares, which overflows here, or by the largest value, as on a device."""

    def tensor(name: str, values: torch.Tensor) -> StateTensor:
        shape = tuple(values.shape)
        return StateTensor(Shard(name, "float32", shape, Box((0,) * len(shape), shape)), values)

    state = [
        tensor("empty", torch.zeros(0)),
        tensor("whole", torch.ones(3, dtype=torch.int64)),
        tensor("large", torch.full((10, 100), 3e38)),
        tensor("half", torch.ones(7, dtype=torch.bfloat16)),
    ]
    for on_host in (True, False):
        monkeypatch.setattr(torch_state, "_on_host", lambda device, found=on_host: found)
        assert look_for_nonfinite([])() is None
        assert look_for_nonfinite(state)() is None
        was = float(state[2].tensor[7, 31])  # type: ignore[arg-type]
        state[2].tensor[7, 31] = value  # type: ignore[index]
        look = look_for_nonfinite(state)
        if not on_host:
            state[2].tensor[7, 31] = was  # type: ignore[index]
        assert look() == "large", "a device says what it was when it was asked"
        state[2].tensor[7, 31] = was  # type: ignore[index]
