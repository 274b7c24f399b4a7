"""Book of a run's findings: signs that last become findings, once each, and findings end.

A rule fires once its signs came in as many windows in a row as it asks for, and is over after as many
without one. What fires is told once, however long it lasts, and again where a silence over it ends. Where a
rule begins and ends again and again, only the first `MOST_TOLD` findings of an hour are told; the others are
counted. What a finding asks for is asked again for as long as it fires and nothing was done: in each new
generation, and after `AGAIN_S`, twice that, and so on up to an hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from picotron_ray.config.schema.alerts import AlertAct
from picotron_ray.observability.alerts.detectors import WindowDetector
from picotron_ray.observability.alerts.finding import AlertFinding, Sign
from picotron_ray.observability.alerts.rules import Rule, derived
from picotron_ray.observability.windows import TelemetryWindow

MOST_TOLD = 6
HOUR_S = 3600.0
AGAIN_S = 120.0
"""First wait for an answer to what a finding asks for."""
MOST_KEPT = 256
"""Findings that are over and that are remembered."""
MOST_SILENCES = 64
EVERY_RULE = "*"
BAD_STEPS = "bad_steps_total"
"""Figure whose rule names the step itself, which the window tells apart."""
Place = Callable[[int], str]
"""Node of a rank; "" where it is not known."""


@dataclass(frozen=True, slots=True)
class Silence:
    """A rule that is not listened to.

    Fields:
        until_s: in seconds since the epoch; None: for as long as the run goes on.
    """

    rule: str
    until_s: float | None = None
    why: str = ""

    def covers(self, rule: str, now_s: float) -> bool:
        """Whether a finding of this rule is silenced."""
        return self.rule in (rule, EVERY_RULE) and (self.until_s is None or now_s < self.until_s)


@dataclass(slots=True)
class _Track:
    """Windows in a row that showed a rule at one place, or did not.

    Fields:
        asked: the finding that was last asked to be acted on, as it was then.
        wait_s: time after which it asks again.
        obeyed: something was done on the finding that fires.
    """

    shown: int = 0
    clear: int = 0
    since_s: float = 0.0
    firing: AlertFinding | None = None
    told: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_TOLD))
    asked: AlertFinding | None = None
    wait_s: float = AGAIN_S
    obeyed: bool = False


class AlertBook:
    """Findings of one run; for one thread."""

    def __init__(
        self,
        detectors: Sequence[WindowDetector],
        rules: Mapping[str, Rule],
        *,
        acts: Mapping[str, AlertAct],
        checkpoint_steps: int,
        silences: Iterable[Silence] = (),
    ) -> None:
        """
        Args:
            acts: by rule, what is asked for when it fires.
            checkpoint_steps: steps from one commit to the next.
        """
        self._detectors, self.rules, self._acts = detectors, rules, acts
        self._checkpoint_steps = checkpoint_steps
        self.silences = list(silences)
        self._tracks: dict[tuple[str, str], _Track] = {}
        self._generation = ""
        self.past: deque[AlertFinding] = deque(maxlen=MOST_KEPT)
        self.again: list[AlertFinding] = []
        """Findings that ask again since the newest window, and are not told again."""
        self.windows = self.untold = 0

    @property
    def firing(self) -> list[AlertFinding]:
        """Findings that hold now."""
        return [track.firing for track in self._tracks.values() if track.firing is not None]

    def silence(self, new: Silence, now_s: float) -> None:
        """Add a silence; those that are over go."""
        held = [each for each in self.silences if each.until_s is None or each.until_s > now_s]
        self.silences = [*held[1 - MOST_SILENCES :], new]

    def unsilence(self, rule: str, now_s: float) -> bool:
        """End silences that were given for a rule, or for all by ``*``; False where none held."""
        held = [each for each in self.silences if each.until_s is None or each.until_s > now_s]
        self.silences = [each for each in held if each.rule != rule]
        return len(self.silences) < len(held)

    def obeyed(self, rule: str) -> None:
        """Hear that something was done on what a rule found: what fires of it asks no more."""
        for (name, _), track in self._tracks.items():
            track.obeyed = track.obeyed or (name == rule and track.firing is not None)

    def observe(self, window: TelemetryWindow, node_of: Place = lambda rank: "") -> list[AlertFinding]:
        """Judge a window; returns what is to be told, what is over first."""
        over = self._enter(window)
        figures = derived(window.figures, self._checkpoint_steps)
        self.windows += 1
        self.again = []
        signs: dict[tuple[str, str], Sign] = {}
        for detector in self._detectors:
            signs |= {(sign.rule, sign.key): sign for sign in detector.signs(figures, window.at_s)}
        fired = [self._shown(sign, window, node_of) for sign in signs.values()]
        over += [
            self._cleared(place, track, window.at_s)
            for place, track in self._tracks.items()
            if place not in signs
        ]
        return [each for each in (*over, *fired) if each is not None]

    def _enter(self, window: TelemetryWindow) -> list[AlertFinding | None]:
        """Begin anew what another generation changes: its findings end with the one before."""
        if window.generation == self._generation:
            return []
        first, self._generation = not self._generation, window.generation
        if first:
            return []
        for detector in self._detectors:
            detector.remeshed()
        over = []
        for place, track in self._tracks.items():
            if self.rules[place[0]].remesh:
                over.append(self._end(track, window.at_s))
        return over

    def _shown(self, sign: Sign, window: TelemetryWindow, node_of: Place) -> AlertFinding | None:
        rule = self.rules[sign.rule]
        track = self._tracks.setdefault((sign.rule, sign.key), _Track())
        track.clear = 0
        track.shown += 1
        if track.shown == 1:
            track.since_s = window.at_s
        if track.firing is None and track.shown < rule.windows:
            return None
        if track.firing is not None and not (track.firing.silenced and not self._silenced(rule, window)):
            self._ask_again(track, sign, window, node_of)
            return None
        track.firing = self._finding(rule, sign, track.since_s, window, node_of)
        track.asked, track.wait_s, track.obeyed = track.firing, AGAIN_S, False
        while track.told and window.at_s - track.told[0] > HOUR_S:
            track.told.popleft()
        if len(track.told) == MOST_TOLD:
            self.untold += 1
            return None
        track.told.append(window.at_s)
        return track.firing

    def _ask_again(self, track: _Track, sign: Sign, window: TelemetryWindow, node_of: Place) -> None:
        fired, last = track.firing, track.asked
        assert fired is not None
        if last is None or not last.act or track.obeyed or fired.at_s not in track.told:
            return
        same = last.generation == window.generation
        if same and window.at_s - last.at_s < track.wait_s:
            return
        again = self._finding(self.rules[sign.rule], sign, track.since_s, window, node_of)
        if again.act:  # else it is silenced by now
            # the step where it began: older weights are those from before that
            track.asked = replace(again, step=last.step) if same else again
            track.wait_s = min(2 * track.wait_s, HOUR_S) if same else AGAIN_S
            self.again.append(track.asked)

    def _silenced(self, rule: Rule, window: TelemetryWindow) -> bool:
        return any(each.covers(rule.name, window.at_s) for each in self.silences)

    def _cleared(self, place: tuple[str, str], track: _Track, at_s: float) -> AlertFinding | None:
        track.shown = 0
        track.clear += 1
        rule = self.rules[place[0]]
        return self._end(track, at_s) if track.clear >= rule.windows else None

    def _end(self, track: _Track, at_s: float) -> AlertFinding | None:
        fired, track.firing, track.shown = track.firing, None, 0
        if fired is None:
            return None
        over = replace(fired, resolved=True, at_s=at_s)
        self.past.append(over)
        return over if fired.at_s in track.told else None  # what was not told when it began

    def _finding(
        self, rule: Rule, sign: Sign, since_s: float, window: TelemetryWindow, node_of: Place
    ) -> AlertFinding:
        slow = window.slowest[0] if window.slowest and rule.figure == "straggler_ratio" else None
        rank = slow.rank if slow is not None else sign.rank
        node = node_of(rank) if rank is not None else ""
        where = f"axis {sign.key}" if rule.figure.endswith(".*") else "the run"
        said = sign.said
        if rank is not None:
            where = f"rank {rank}" + (f" on node {node[:8]}" if node else "")
        if slow is not None and slow.phase:
            said += f", most of it in {slow.phase}"
        silenced = self._silenced(rule, window)
        return AlertFinding(
            rule=rule.name,
            key=sign.key,
            severity=rule.severity,
            said=said,
            where=where,
            since_s=since_s,
            at_s=window.at_s,
            generation=window.generation,
            step=int(window.figures.get("bad_step" if rule.figure == BAD_STEPS else "step", 0)),
            evidence=sign.evidence,
            advice=rule.advice,
            rank=rank,
            node=node,
            silenced=silenced,
            act="" if silenced else self._acts.get(rule.name, ""),
        )
