"""Best commit of a run's history, by a figure of the evaluation at its own step. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from picotron_ray.checkpoint.store.lineage import Id, commits_on
from picotron_ray.checkpoint.store.run_log import Entry, RunLog

FIGURES = "figures"
"""Key in a commit entry's body: figures of the evaluation at its step, by name."""


def best_commit(log: RunLog, commits: Sequence[Entry], generation: Id, metric: str) -> Entry | None:
    """The commit on a generation's lineage with the lowest figure; of equal ones the newest; None: none has.

    A commit that a rewind has made void is on no lineage, and so never the best.
    """
    judged = [
        entry
        for entry in commits_on(log.entries(), commits, generation)
        if metric in entry.body.get(FIGURES, {})
    ]
    return min(judged, key=lambda entry: (entry.body[FIGURES][metric], -entry.seq), default=None)
