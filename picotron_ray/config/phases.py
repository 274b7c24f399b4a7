"""Names of what a worker can be doing, as its heartbeat page, hang limits and scripted faults use them."""

from __future__ import annotations

PHASES = (
    "idle",
    "rendezvous",  # joining the generation's process groups
    "build",  # model, mesh, optimizer
    "restore",  # reading state from slots or storage
    "data",  # waiting for the prefetched batch
    "forward",  # forward pass; under a pipeline schedule the whole of forward and backward
    "backward",
    "reduce",  # gradient reduction over data-parallel replicas
    "clip",  # global gradient norm
    "sync",  # the step's one exchange of loss, digests and flags between all ranks
    "optimizer",  # from before the first write to after the last one; then the ledger line
    "snapshot",  # copying to a slot (in the background of the next step)
    "evaluate",
    "flush",  # writing the clean live state to a slot on the way out
    "commit",  # coordinator only: between the manifest and its log entry
)
