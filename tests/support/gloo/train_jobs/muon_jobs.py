"""What processes do for Muon's tests: a leg of a training between two layouts, and planted faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.snapshot.replica_split import split_for_replica
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.checkpoint.torch_state import buffers, restore
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from tests.support.gloo.faults import replace
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, Piece, batch, pieces, spoil
from tests.support.gloo.pool import Job


def leg(job: Job, config: JobConfig, layout: Layout, steps: tuple[int, int], folder: Path) -> list[Piece]:
    """From the slots of step ``steps[0]`` in ``folder`` to step ``steps[1]``; leaves slots, returns state."""
    groups = job.groups()
    groups.connect()
    engine = build_engine(config, layout, job.rank, groups, CPU)
    first, last = steps
    if first:
        for entry in engine.state():
            spoil(entry)
        restore(engine.state(), SlotSource([(path.name, path) for path in folder.glob(f"*.{first}.slot")]))
        engine.set_step(first)
    else:
        engine.initialise(config.seed)
    for step in range(first + 1, last + 1):
        engine.forward_backward(batch(config, layout, layout.coordinates(job.rank).dp, step))
        engine.reduce()
        engine.clip()
        engine.optimizer_step(config.optimizer.learning_rate)
    mine = split_for_replica(engine.state(), 0, 1)
    shards = tuple(entry.shard for entry in mine)
    slot = SlotFile.create(folder / f"{job.rank}.{last}.slot", slot_bytes(shards))
    slot.write(SlotHeader(1, 1, last, job.rank), shards, buffers(mine))
    slot.close()
    found = pieces(engine.state())
    engine.close()
    groups.close()
    return found


def double_messages() -> Any:
    """What other ranks send arrives doubled."""
    import picotron_ray.train.optim.muon as muon

    kept = muon.exchange

    def doubled(outgoing: Any, incoming: Any, rank: int, like: Any) -> Any:
        found = kept(outgoing, incoming, rank, like)
        return {peer: flat if peer == rank else flat * 2.0 for peer, flat in found.items()}

    return replace(muon, "exchange", doubled)


def orthogonalise_shards() -> Any:
    """Every rank takes its own box of a matrix for the matrix."""
    import picotron_ray.train.optim.optimizer as optimizer
    from picotron_ray.train.optim.matrix_exchange import Matrix

    kept = optimizer.assign_owners

    def shards(*arguments: Any) -> Any:
        return [
            [
                Matrix(matrix.name, box, rank, ((rank, box),), ((rank, box),))
                for matrix in matrices
                for rank, box in matrix.holders
            ]
            for matrices in kept(*arguments)
        ]

    return replace(optimizer, "assign_owners", shards)


PLANTS = {"messages": double_messages, "shards": orthogonalise_shards}
