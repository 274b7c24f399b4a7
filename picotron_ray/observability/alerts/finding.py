"""Findings: what a rule saw, where, since when, by which figures, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.schema.alerts import Severity

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")
"""The least first."""
LEVELS: dict[Severity, str] = {"info": "info", "warning": "warning", "critical": "error"}
"""Levels of the run's events."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What one window shows of a rule, before it is known whether it lasts.

    Fields:
        key: axis of the layout where the rule looks at each; "": of the run.
        said: what is wrong, with figures.
        rank: that it names; None: the run as a whole.
    """

    rule: str
    key: str
    said: str
    evidence: Mapping[str, float]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that fires, or one that fired and holds no longer.

    Fields:
        where: rank, node or axis, in words.
        since_s: of the first window in a row that showed it, in seconds since the epoch.
        at_s: when it fired, or was resolved.
        step: newest step of the window that made it fire.
        advice: what to do next.
        silenced: it is noted, and neither told nor acted on.
        act: what the coordinator is asked to do; "": nothing.
    """

    rule: str
    key: str
    severity: Severity
    said: str
    where: str
    since_s: float
    at_s: float
    generation: str
    step: int
    evidence: Mapping[str, float]
    advice: str
    rank: int | None = None
    node: str = ""
    resolved: bool = False
    silenced: bool = False
    act: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        if self.resolved:
            return f"{self.rule} ({self.where}) is over after {self.at_s - self.since_s:.0f} s"
        return f"{self.rule} ({self.where}): {self.said}; {self.advice}"

    def plain(self) -> dict[str, Any]:
        """JSON values of a finding, as events, webhooks and the command show them."""
        return {
            "rule": self.rule,
            "key": self.key,
            "severity": self.severity,
            "state": "resolved" if self.resolved else "firing",
            "said": self.said,
            "where": self.where,
            "rank": self.rank,
            "node": self.node,
            "since_s": self.since_s,
            "at_s": self.at_s,
            "generation": self.generation,
            "step": self.step,
            "evidence": dict(self.evidence),
            "advice": self.advice,
            "silenced": self.silenced,
            "act": self.act,
        }
