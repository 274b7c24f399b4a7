"""Right of a launch to claim a term: only after those terms that its door knew to be over.

A door that finds a run's coordinator silent for long enough calls it dead, and launches. Two doors may do so
at once, and some seconds later each has a coordinator: the second one's claim would fence the first, which
trains by then. A coordinator that Ray starts again after another launch has taken the run over would fence
that one in turn. So a coordinator's claim names its launch, and is refused where another one claimed since.

What commands claim (a collection of garbage, an import) names no launch: it is over as it ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import FencedError

if TYPE_CHECKING:
    from picotron_ray.checkpoint.store.run_log import Entry


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch whose coordinator claims terms, the first one and one more at each of its restarts.

    Fields:
        id: differs from that of any other launch.
        follows: newest term that its door knew to be over (0: there was none); None: it may end whatever
            goes on, as the user told it to, or nobody looked.
    """

    id: str
    follows: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """Part of its claims that tells it from others."""
        return {"launch": self.id}

    def refuse_after_another(self, entries: Iterable[Entry]) -> None:
        """Return where no other launch has claimed a term since.

        Raises:
            FencedError: one has; its coordinator may live.
        """
        claims = [entry for entry in entries if entry.kind == "term" and entry.body.get("launch")]
        own = [claim.term for claim in claims if claim.body["launch"] == self.id]
        after = min(own) if own else self.follows
        if after is None:
            return
        others = [claim for claim in claims if claim.term > after and claim.body["launch"] != self.id]
        if not others:
            return
        newest = max(others, key=lambda claim: claim.term)
        owner = str(newest.body.get("owner", ""))
        since = "has taken the run over" if own else "was begun first"
        error = FencedError(
            f"another launch {since}: its coordinator {owner} claimed term {newest.term}; this one stops"
        )
        error.owner = owner
        raise error


def launch_of(name: str, follows: int | None) -> Launch | None:
    """Launch of that id; None: of none, as where a program starts the coordinator by itself."""
    return Launch(name, follows) if name else None
