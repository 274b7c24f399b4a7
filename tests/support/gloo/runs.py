"""Runs in the pool's processes, generation by generation: `Run` decides what a coordinator would."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.lineage import descend
from picotron_ray.coordinator.messages import (
    Fragment,
    GenerationId,
    GenerationSpec,
    Member,
    Outcome,
    Rewind,
    SlotInfo,
    Source,
)
from picotron_ray.coordinator.policies.restore_point import newest_slots
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.gloo.runtime.test_recover import wait_for_state
from tests.support.gloo.pool import Pool, Worker
from tests.support.gloo.train_jobs.remesh_jobs import generation, worker_name

NOBODY = (-1, 0, "")
FRESH = Source("init")
terms = count(1)


def slots_in(folder: Path) -> list[SlotInfo]:
    found = []
    for path, header in list_slots(folder):
        parts = tuple(Fragment(*part) for part in header.fragments)
        identity = GenerationId(header.term, header.n)
        found.append(SlotInfo("node", path.name, identity, header.step, header.rank, parts))
    return found


class Run:
    """One run in the pool; this class decides what a coordinator would."""

    generation = staticmethod(generation)
    """What a worker does."""

    def __init__(
        self,
        pool: Pool,
        job: JobConfig,
        folder: Path,
        origin: Source = FRESH,
        term: int | None = None,
        kind: str = "cpu",
        rewinds: tuple[Rewind, ...] = (),
    ) -> None:
        """
        Args:
            origin: what the first generation starts from.
            term: where a log has claimed one.
            kind: of the workers' devices.
            rewinds: of which all generations know.
        """
        self.kind, self.rewinds = kind, rewinds
        self.pool, self.job, self.folder, self.origin = pool, job, folder, origin
        self.term = next(terms) if term is None else term
        self.layouts: dict[GenerationId, Layout] = {}
        self.specs: list[GenerationSpec] = []
        self.last: GenerationSpec | None = None

    def begin(self, layout: Layout, kill: tuple[int, int, str] = NOBODY) -> list[Worker]:
        """Start a generation from the newest state there is."""
        source = newest_slots(slots_in(self.folder), self.layouts, self.last) or self.origin
        workers = self.pool.need(layout.world_size)
        members = tuple(Member(worker_name(worker.pid), "node") for worker in workers)
        identity = GenerationId(self.term, len(self.layouts) + 1)
        lineage = descend(self.last, source)
        self.last = GenerationSpec(identity, members, layout, source, "test", lineage, rewinds=self.rewinds)
        self.layouts[identity] = layout
        self.specs.append(self.last)
        told = str(self.folder / f"abort-{identity.n}")
        self.pool.start(
            workers, self.generation, self.job, self.last, str(self.folder), kill, told, self.kind
        )
        return workers

    def finish(self, layout: Layout) -> None:
        outcomes = [worker.receive() for worker in self.begin(layout)]
        assert [(o.kind, o.detail) for o in outcomes] == [("finished", "")] * layout.world_size

    def strike(self, layout: Layout, kill: tuple[int, int, str]) -> list[Outcome]:
        """Run until a rank is killed and the others have left; returns what they say."""
        workers = self.begin(layout, kill)
        assert self.last is not None
        victim = workers[kill[0]]
        wait_for_state(victim.pid, "Z")
        (self.folder / f"abort-{self.last.id.n}").touch()
        outcomes = [worker.receive(20) for worker in workers if worker is not victim]
        assert {outcome.kind for outcome in outcomes} <= {FailureKind.PEER_LOST, "interrupted"}, outcomes
        self.pool.drop([victim])
        return outcomes

    def ledger(self) -> list[str]:
        """The lines that the last step's slots carry."""
        headers = [header for _, header in list_slots(self.folder)]
        return list(max(headers, key=lambda header: (header.step, header.n)).ledger)


def losses(lines: list[str]) -> list[float]:
    return [json.loads(line)["loss"] for line in lines]
