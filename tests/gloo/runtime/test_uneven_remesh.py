"""From even shares to uneven ones and back, by slots in host memory and by a commit: the same fp64 losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import Source
from picotron_ray.coordinator.policies.restore_point import newest_slots
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.ledger import check
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.model_sizes import stage_bounds
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.gloo.runtime.test_hf_remesh import claim
from tests.gloo.runtime.test_remesh import STEPS, job_of, uninterrupted
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses, slots_in

# kind of model, an even layout, and an uneven one: (dp, pp), (dp, zero, tp), (virtual stages)
WAYS = {
    "rows-and-stages": (
        "tied",
        Layout(dp=2, pp=2, micro_batch=3),
        Layout(dp=2, pp=2, micro_batch=5, replica_rows=(10, 2), stage_blocks=(1, 4)),
    ),
    "shards": (
        "loss",
        Layout(dp=2, tp=2, zero=3, micro_batch=3),
        Layout(dp=3, zero=2, micro_batch=4, replica_rows=(1, 8, 3)),
    ),
    "virtual-stages": (
        "dense",
        Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=3),
        Layout(pp=2, schedule="zbv", virtual_stages=2, micro_batch=3, stage_blocks=(1, 1, 1, 2)),
    ),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[float]]:
    """Losses of one process that nothing disturbs, by kind of model."""
    return {}


def holds(run: Run, folder: Path, wanted: list[float], committed: Sequence[str] = ()) -> None:
    """Losses of one process, and every sample proven to be fed once."""
    lines = [*committed, *run.ledger()]
    assert losses(lines) == pytest.approx(wanted, rel=1e-9)
    splits = build_dataset(run.job.data, run.job.model.vocab_size, run.job.seed, folder)
    report = check(lines, splits.plan, splits.train)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (STEPS, 0, 0, ())


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if at else ()) for at, way in enumerate(WAYS)]
)
def test_from_even_to_uneven_and_back(
    pool: Pool, tmp_path: Path, expected: dict[str, list[float]], way: str
) -> None:
    kind, even, uneven = WAYS[way]
    uninterrupted(pool, tmp_path, expected, kind)
    run = Run(pool, job_of(kind, tmp_path), tmp_path)
    run.strike(even, (0, 3, "forward"))
    run.strike(uneven, (1, 6, "forward"))
    run.finish(even)
    first, second, third = (spec.resume_step for spec in run.specs)
    assert first == 0 < second < third, "each from the slots of the one before"
    holds(run, tmp_path, expected[kind])
    if uneven.replica_rows:
        fed = [json.loads(line)["rows"] for line in run.ledger()]
        assert tuple(last - first for first, last, *_ in fed[third - 1]) == uneven.replica_rows


def commit(run: Run, store: RunStore, step: int) -> Source:
    """Commit the last generation's slots of a step, and name them as the next one's source."""
    storage = open_storage(run.job.storage, run.job.name)
    store.append_generation(run.specs[-1])
    last = run.specs[-1].id
    paths = [path for path, header in list_slots(run.folder) if header.key == (last.term, last.n, step)]
    part = upload_slots(paths, storage, last.term, last.n, step, owner="node")
    done = store.commit(last, step, [part.encode()])
    assert not done.error, done
    (found,), _ = store.state(verify=False)
    return Source("commit", found.step, found.generation, manifest=found.manifest, digest=found.digest)


@pytest.mark.parametrize("back", [False, True], ids=["to uneven", "to even"])
def test_through_a_commit(pool: Pool, tmp_path: Path, expected: dict[str, list[float]], back: bool) -> None:
    """The slots are gone: chunks alone carry the state from one cut into the other."""
    kind, even, uneven = WAYS["rows-and-stages"]
    assert stage_bounds(job_of(kind, tmp_path).model, even.cut) != stage_bounds(
        job_of(kind, tmp_path).model, uneven.cut
    )
    uninterrupted(pool, tmp_path, expected, kind)
    storage = {"url": str(tmp_path / "runs")}
    whole = job_of(kind, tmp_path)
    job = JobConfig.model_validate({**whole.model_dump(), "storage": storage})
    store = RunStore(job, lambda _: None)
    first, second = (uneven, even) if back else (even, uneven)
    run = Run(pool, job, tmp_path, term=claim(store))
    run.strike(first, (3, 5, "forward"))
    newest = newest_slots(slots_in(tmp_path), run.layouts, run.last)
    assert newest is not None
    # a rank may have sealed a step more than all of them have
    committed = [line for line in run.ledger() if json.loads(line)["step"] <= newest.step]
    run.origin = commit(run, store, newest.step)
    pool.drop(pool.workers)  # which hold their slots open
    for path, _ in list_slots(tmp_path):
        path.unlink()
    run.finish(second)
    assert run.specs[-1].source.kind == "commit"
    holds(run, tmp_path, expected[kind], committed)
    store.executor.shutdown()
    store.committer.shutdown()
