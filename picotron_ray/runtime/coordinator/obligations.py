"""What a launch is owed over restarts of its coordinator: the stop it was asked for, the end it decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, encode


@dataclass(slots=True)
class Obligations:
    """Newest stop and newest end, each with the launch that it belongs to.

    Between the decision that a run is over and the end of the coordinator's process lie minutes: workers are
    ended, the ledger is checked, drivers are told. Ray starts a coordinator that dies meanwhile again, and
    that one has to end the run too, and not to train on.
    """

    stop_of: str | None = None
    end_of: str | None = None
    end: m.Finish | None = None

    def observe(self, launch: str, event: m.Event, commands: Sequence[m.Command]) -> None:
        """Follow the machine. A term that began has ended nothing yet, whatever an overtaken one decided."""
        if isinstance(event, m.Begin):
            self.end_of = self.end = None
        elif isinstance(event, m.UserRequest) and event.what == "stop":
            self.stop_of = launch
        for command in commands:
            if isinstance(command, m.Finish):
                self.stop_of = None
                self.end_of, self.end = launch, None if command.status == "fenced" else command

    def plain(self) -> dict[str, Any]:
        """Return them as JSON values."""
        end = None if self.end is None else encode(self.end)
        return {"stop_of": self.stop_of, "end_of": self.end_of, "end": end}

    @classmethod
    def read(cls, data: dict[str, Any]) -> Obligations:
        """Read what ``plain`` returned; a record of an earlier version has the stop alone."""
        end = data.get("end")
        return cls(data["stop_of"], data.get("end_of"), None if end is None else decode(end))
