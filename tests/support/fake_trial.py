"""As much of Ray Tune's trials as is read of them, for tests without a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class FakeTrial:
    trial_id: str
    config: dict[str, Any]
    status: str = "RUNNING"
    last_result: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def __str__(self) -> str:
        return self.trial_id

    def get_error(self) -> str:
        return self.error
