"""Conditions: what a rule of the table remembers, and whether a window shows it.

A condition keeps at most one baseline for each axis of a layout, however many ranks there are. A value that
shows the rule does not enter its baseline: what is wrong for long does not become ordinary by that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from picotron_ray.config.schema.telemetry import AXES
from picotron_ray.observability.alerts.baseline import Baseline
from picotron_ray.observability.alerts.rules import BESIDE, BURST_S, Rule

DEVIATIONS = 6.0
"""Distance from the baseline's median that noise does not reach, in its standard deviations."""
WARM_UP = 5
"""First windows of a generation whose growth of memory, and whose speed, say nothing."""
LEAST_RISE = 0.005
"""Share of its first value by which a figure must have grown in all to be called rising."""
LEAST_BESIDE = 2.0
PLANNED_OVER = 1.03
"""Factor to the planned peak from which memory is beyond what was planned."""
MOST_TIMES = 64
Said = tuple[str, dict[str, float]] | None
"""What is wrong, and figures beside the value itself; None: nothing is."""


class Condition:
    """State of one rule."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._seen = 0
        self._baselines: dict[str, Baseline] = {}
        self._last: dict[str, float] = {}
        self._rises: dict[str, tuple[int, float]] = {}  # in a row, and from which value
        self._stood: set[str] = set()  # rose, and then stood still for one window
        self._grown: deque[tuple[float, float]] = deque(maxlen=MOST_TIMES)  # when, by how much
        self._beside = Baseline()

    def remeshed(self) -> None:
        """Begin anew where the rule's figure depends on the layout and its members."""
        if self.rule.remesh:
            self._seen = 0
            self._beside.clear()
            for memory in (self._baselines, self._last, self._rises, self._stood):
                memory.clear()

    def shown(self, figures: Mapping[str, float], at_s: float) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Judge a window; yields (key, words, evidence) of each axis, or of the run, that shows the rule."""
        rule, found = self.rule, False
        for key, name in _places(rule.figure):
            if name in figures:
                found = True
                said = JUDGES[rule.kind](self, key, name, figures[name], at_s)
                if said is not None and self._confirmed(figures):
                    yield key, said[0], {name: figures[name], **said[1]}
        if rule.beside in figures and figures[rule.beside] > 0:
            self._beside.add(figures[rule.beside])
        self._seen += found

    def _confirmed(self, figures: Mapping[str, float]) -> bool:
        """Whether the second figure agrees, where the rule has one."""
        name = self.rule.beside
        if not name:
            return True
        if name == "planned_memory_ratio":  # not known on every device
            return figures.get(name, PLANNED_OVER) >= PLANNED_OVER
        value = figures.get(name, 0.0)
        usual = self._beside.median if self._beside.ready else 0.0
        return value > BESIDE and value > LEAST_BESIDE * usual

    # --- kinds -----------------------------------------------------------------------------------------

    def above(self, key: str, name: str, value: float, at_s: float) -> Said:
        limit = self.rule.threshold
        return (f"{name} is {value:.3g}, above {limit:.3g}", {"threshold": limit}) if value > limit else None

    def below(self, key: str, name: str, value: float, at_s: float) -> Said:
        limit = self.rule.threshold
        return (f"{name} is {value:.3g}, below {limit:.3g}", {"threshold": limit}) if value < limit else None

    def rise(self, key: str, name: str, value: float, at_s: float) -> Said:
        return self._against(key, name, value, self.rule.threshold, up=True)

    def drop(self, key: str, name: str, value: float, at_s: float) -> Said:
        return self._against(key, name, value, 1.0 - self.rule.threshold, up=False)

    def _against(self, key: str, name: str, value: float, factor: float, *, up: bool) -> Said:
        if self.rule.remesh and self._seen < WARM_UP:
            return None
        usual = self._baselines.setdefault(key, Baseline())
        if usual.ready:
            median, noise = usual.median, DEVIATIONS * usual.spread
            limit = max(factor * median, median + noise) if up else min(factor * median, median - noise)
            vanishing = not up and value < factor * median and self.rule.threshold > 0.9
            if (value > limit if up else value < limit) or vanishing:
                change = f"{value / median:.2f} x" if median else "not"
                said = f"{name} is {value:.3g}, {change} its median {median:.3g} of {usual.count} windows"
                return said, {"median": median, "deviation": usual.spread}
        usual.add(value)
        return None

    def rising(self, key: str, name: str, value: float, at_s: float) -> Said:
        if self._seen < WARM_UP:
            return None
        before = self._last.get(key)
        self._last[key] = value
        count, first = self._rises.get(key, (0, value))
        if count and value == before and key not in self._stood:
            self._stood.add(key)  # a window may bring the reading of the one before once more
        else:
            self._stood.discard(key)
            grew = before is not None and value > before
            count, first = self._rises[key] = (count + 1, first) if grew else (0, value)
        if count < self.rule.threshold or value - first < LEAST_RISE * abs(first):
            return None
        said = f"{name} grew {count} windows in a row, from {first:.4g} to {value:.4g}"
        return said, {"first": first, "rises": float(count)}

    def counter(self, key: str, name: str, value: float, at_s: float) -> Said:
        before = self._last.get(key, 0.0 if self.rule.from_zero else value)
        self._last[key] = value
        before = before if before <= value else 0.0  # it began anew
        if value - before < self.rule.threshold:
            return None
        return f"{name} went from {before:.0f} to {value:.0f}", {"before": before}

    def burst(self, key: str, name: str, value: float, at_s: float) -> Said:
        before = self._last.get(key, value)
        self._last[key] = value
        if value > before:
            self._grown.append((at_s, value - before))
        while self._grown and at_s - self._grown[0][0] > BURST_S:
            self._grown.popleft()
        grown = sum(by for _, by in self._grown)
        if grown < self.rule.threshold:
            return None
        return f"{name} grew by {grown:.0f} within {BURST_S / 60:.0f} minutes", {"grown": grown}


JUDGES: Mapping[str, Callable[[Condition, str, str, float, float], Said]] = {
    "above": Condition.above,
    "below": Condition.below,
    "rise": Condition.rise,
    "drop": Condition.drop,
    "rising": Condition.rising,
    "counter": Condition.counter,
    "burst": Condition.burst,
}


def _places(figure: str) -> Iterator[tuple[str, str]]:
    """Yield (key, figure) of each place that a rule looks at."""
    if not figure.endswith(".*"):
        yield "", figure
        return
    for axis in AXES:
        yield axis, f"{figure[:-1]}{axis}"
