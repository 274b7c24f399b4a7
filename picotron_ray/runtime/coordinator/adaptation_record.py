"""Adaptation in a run's record, for the next term: the newest verdict, and when changes were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.policies.adaptation import HOUR_S, REASON

MOST_TIMES = 256
"""Changes whose times are kept: more than the budget of an hour."""
Verdict = Literal["kept", "back", "void"]


@dataclass(slots=True)
class AdaptationRecord:
    """Newest verdict, and times of changes in seconds since the epoch."""

    judged: m.Judged | None = None
    changed_at_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TIMES))

    def entered(self, reason: str, at_s: float) -> None:
        """Note when a generation began, where a change was its reason; ``at_s`` is since the epoch."""
        if reason.startswith(REASON):
            self.changed_at_s.append(at_s)

    def past(self, now_s: float) -> dict[str, Any]:
        """Arguments of ``begin_event``: the verdict, and how long ago changes of the last hour were made."""
        ages = tuple(now_s - at for at in self.changed_at_s if now_s - at < HOUR_S)
        return {"judged": self.judged, "changed_s_ago": ages}

    def plain(self) -> dict[str, Any]:
        """JSON values, as `read` takes them."""
        return {"judged": plain(self.judged), "changed_at_s": list(self.changed_at_s)}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> AdaptationRecord:
        """Read the values of `plain`; of an older record there are none."""
        told = data.get("judged")
        judged = told and m.Judged(**{**told, "began": m.GenerationId(**told["began"])})
        return cls(judged or None, deque(data.get("changed_at_s", ()), maxlen=MOST_TIMES))

    def copied(self) -> AdaptationRecord:
        """A copy that later commands do not change."""
        return AdaptationRecord(self.judged, self.changed_at_s.copy())


def judged_by(alert: m.Alert) -> m.Judged | None:
    """The verdict that an alert tells; None for one that tells of none, and those of older logs."""
    data = alert.data
    began, action = str(data.get("began") or ""), str(data.get("action"))
    if alert.kind != ADAPT or not began or action not in get_args(Verdict):
        return None
    term, n = (int(number) for number in began.split("."))
    return m.Judged(m.GenerationId(term, n), cast(Verdict, action), float(data.get("after_s", 0.0)))
