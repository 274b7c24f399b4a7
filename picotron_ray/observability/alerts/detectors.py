"""Detectors: three ways to judge a window, behind one interface.

- ``thresholds``: the table of rules, each with its own condition;
- ``robust``: figures that are far from their median, in median absolute deviations;
- ``learned``: an isolation forest (Liu, Ting and Zhou 2008) over all figures of a generation's first windows.

The last two know no causes: they tell of what is unusual. None of them looks at ranks one by one, so that a
window costs as much at 1,000 ranks as at 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from picotron_ray.config.schema.alerts import AlertsConfig, Detector
from picotron_ray.errors import ConfigError, install_extra
from picotron_ray.observability.alerts.baseline import Baseline
from picotron_ray.observability.alerts.conditions import WARM_UP, Condition
from picotron_ray.observability.alerts.finding import Sign
from picotron_ray.observability.alerts.rules import Rule, rules_of

UNUSUAL = Rule(
    "unusual",
    "info",
    "",
    "above",
    0.0,
    "figures are unlike those of earlier windows",
    "compare them in the run's windows; a rule of the table says more where one fires too",
    windows=3,
)
"""Rule of the detectors that know no causes."""
STEADY = ("grad_norm", "steps_per_s", "step_s", "data_ratio", "straggler_ratio", "allocated_bytes")
"""Figures that vary about a value, as far as nothing is wrong."""
FAR, FAR_SHARE = 10.0, 0.25
"""Deviations, and share of the median, beyond which a figure is far from it."""
FIT = 128
"""Windows that the forest learns from."""
TREES = 64
MARGIN = 0.05
"""Distance of a window's score below the lowest one of those learned from, from which it is unusual."""


class WindowDetector(Protocol):
    """Detector of one run, fed with each window in turn."""

    def signs(self, figures: Mapping[str, float], at_s: float) -> Iterator[Sign]:
        """Judge a window."""
        ...

    def remeshed(self) -> None:
        """Hear that another generation runs: what depends on its layout begins anew."""
        ...


class Thresholds:
    """The table of rules."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self._conditions = [Condition(rule) for rule in rules]

    def signs(self, figures: Mapping[str, float], at_s: float) -> Iterator[Sign]:
        for each in self._conditions:
            for key, said, evidence in each.shown(figures, at_s):
                yield Sign(each.rule.name, key, f"{each.rule.means}: {said}", evidence)

    def remeshed(self) -> None:
        for each in self._conditions:
            each.remeshed()


class Robust:
    """Figures of `STEADY` against their medians."""

    def __init__(self) -> None:
        self._seen, self._usual = 0, {name: Baseline() for name in STEADY}

    def signs(self, figures: Mapping[str, float], at_s: float) -> Iterator[Sign]:
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        far = {name: figures[name] for name in STEADY if name in figures and self._far(name, figures[name])}
        if far:
            words = ", ".join(f"{name} {value:.3g}" for name, value in far.items())
            yield Sign(UNUSUAL.name, "robust", f"far from their medians: {words}", far)

    def _far(self, name: str, value: float) -> bool:
        usual = self._usual[name]
        if usual.ready:
            away, median = abs(value - usual.median), usual.median
            if away > FAR * usual.spread and away > FAR_SHARE * abs(median):
                return True
        usual.add(value)
        return False

    def remeshed(self) -> None:
        self._seen = 0
        for usual in self._usual.values():
            usual.clear()


class Learned:
    """Isolation forest over `STEADY`, learned from the first `FIT` windows of a generation."""

    def __init__(self) -> None:
        try:
            from sklearn.ensemble import IsolationForest
        except ImportError as error:
            text = f"alerts.detectors: learned needs scikit-learn: {install_extra('alerts')}"
            raise ConfigError(text) from error
        self._make = IsolationForest
        self.remeshed()

    def remeshed(self) -> None:
        self._seen = 0
        self._rows: list[list[float]] = []
        self._names: tuple[str, ...] = ()
        self._forest: Any = None
        self._lowest = 0.0

    def signs(self, figures: Mapping[str, float], at_s: float) -> Iterator[Sign]:
        self._seen += 1
        if self._seen <= WARM_UP:
            return
        self._names = self._names or tuple(name for name in STEADY if name in figures)
        row = [_compressed(figures.get(name, 0.0)) for name in self._names]
        if self._forest is None:
            self._rows.append(row)
            if len(self._rows) >= FIT:
                self._learn()
            return
        score = float(self._forest.score_samples([row])[0])
        if score < self._lowest - MARGIN:
            said = f"an isolation forest scores this window {score:.3f}, none that it learned from below"
            evidence = {"score": score, "lowest": self._lowest}
            yield Sign(UNUSUAL.name, "learned", f"{said} {self._lowest:.3f}", evidence)

    def _learn(self) -> None:
        self._forest = self._make(n_estimators=TREES, random_state=0).fit(self._rows)
        self._lowest = float(min(self._forest.score_samples(self._rows)))
        self._rows = []


def _compressed(value: float) -> float:
    """A value on a scale on which bytes and seconds vary alike."""
    return math.copysign(math.log1p(abs(value) * 1e3), value)


def open_detectors(config: AlertsConfig, *, gpu: bool) -> tuple[list[WindowDetector], dict[str, Rule]]:
    """Make the detectors of a config; returns them, and all rules by name.

    Raises:
        ConfigError: the library of one is not installed.
    """
    rules = rules_of(config, gpu=gpu)
    made: dict[Detector, Callable[[], WindowDetector]] = {
        "thresholds": lambda: Thresholds(rules),
        "robust": Robust,
        "learned": Learned,
    }
    found = [made[kind]() for kind in dict.fromkeys(config.detectors)]
    return found, {**{rule.name: rule for rule in rules}, UNUSUAL.name: UNUSUAL}
