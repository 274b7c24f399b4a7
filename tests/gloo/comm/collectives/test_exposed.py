"""Time that a step waits: CUDA events are made once and taken again, and none where nobody asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from picotron_ray.comm.collectives.exposed import ExposedTime
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.mesh import Mesh
from picotron_ray.train.reduction_plan import selection_of

CUDA = torch.device("cuda", 0)


class Event:
    """Stand-in for a CUDA event: its time is the number of records until then, in milliseconds."""

    made: int = 0
    records: int = 0

    def __init__(self, enable_timing: bool) -> None:
        type(self).made += 1
        self.at = 0

    def record(self) -> None:
        type(self).records += 1
        self.at = self.records

    def synchronize(self) -> None:
        """Be done."""

    def elapsed_time(self, other: Event) -> float:
        return float(other.at - self.at)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    counted = type("CountedEvent", (Event,), {})
    monkeypatch.setattr(torch.cuda, "Event", counted)
    return counted


def test_events_are_made_once_and_taken_again(events: type[Event]) -> None:
    """Seen: four new timing events for each bucket and step, with the selector off too."""
    exposed = ExposedTime(CUDA)
    for step in range(50):
        exposed.begin()
        for _ in range(3):
            with exposed.waiting():
                pass
        if step % 2:  # one that nobody reads gives its events back too
            assert exposed.seconds == pytest.approx(3e-3)
            assert exposed.seconds == pytest.approx(3e-3)
    assert (events.made, events.records) == (6, 300)


def test_nothing_is_recorded_where_nothing_is_asked_for(events: type[Event]) -> None:
    exposed = ExposedTime(CUDA)
    exposed.on = False
    exposed.begin()
    with exposed.waiting():
        pass
    assert (exposed.seconds, events.made) == (0.0, 0)


@pytest.mark.parametrize(
    ("own", "shown", "selector", "zero", "expected"),
    [
        (True, False, False, 0, True),  # the host's clock costs nothing
        (False, True, False, 0, True),
        (False, False, True, 0, True),
        (False, False, False, 0, False),
        (False, True, True, 1, False),  # FSDP2's sums are not seen
    ],
)
def test_sums_are_timed_for_a_choice_or_for_figures(
    own: bool, shown: bool, selector: bool, zero: Any, expected: bool
) -> None:
    asked: list[bool] = []

    class Gradients:
        cost = (0, 0.0)
        time = asked.append

        def use(self, plan: object) -> None:
            """Take a plan."""

    mesh = Mesh(Layout(dp=2, zero=zero), 0, None)
    comm = CommConfig(selector=selector)
    found = selection_of(comm, mesh, Gradients(), own=own, shown=shown)  # type: ignore[arg-type]
    assert asked == [expected]
    assert found._things["gradients"].timed == expected
