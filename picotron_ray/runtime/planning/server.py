"""Planner as a process of its own: questions come as lines of JSON, and so do the answers.

    python -m picotron_ray.runtime.planning.server

The first line is ``{"job": {...}, "device": "cuda" | "cpu"}``, each later one a question ``{"workers": n,
"node_sizes": [...], "device_bytes": n, "limit_bytes": n, "settings": [[key, text], ...], "calibration":
{...}}``. Each is answered by one line: the ``Answer``'s
fields. The process ends when its input does, so it does not outlive whoever asks. It imports neither Ray nor
torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import IO, Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.planner.calibration import Calibration
from picotron_ray.planner.search import planner


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one question.

    Fields:
        layout: plain form of the layout; None: none fits, and ``reason`` says why.
        cost_s: estimated seconds per step.
        runner_up: the next of another kind and what it loses by.
        planned_s: seconds that the search took.
        reduce_s: part of ``cost_s`` that the reduction of gradients takes.
    """

    layout: dict[str, Any] | None
    cost_s: float
    reason: str
    runner_up: str
    planned_s: float
    reduce_s: float = 0.0


def serve(lines: Iterable[str], out: IO[str]) -> None:
    """Answer the questions in ``lines`` until they end."""
    rows = iter(lines)
    head = json.loads(next(rows))
    choose = planner(JobConfig.model_validate(head["job"]), head["device"])
    for row in rows:
        asked, began = json.loads(row), time.perf_counter()
        try:
            found = choose(
                asked["workers"],
                tuple(asked["node_sizes"]),
                asked["device_bytes"],
                asked["limit_bytes"],
                tuple((key, text) for key, text in asked.get("settings", ())),
                Calibration(**asked.get("calibration", {})),
            )
        except LayoutError as error:
            answer = Answer(None, 0.0, str(error).splitlines()[0], "", time.perf_counter() - began)
        else:
            took_s = time.perf_counter() - began
            said = found.cost_s, found.reason, found.runner_up, took_s, found.reduce_s
            answer = Answer(found.layout.to_dict(), *said)
        out.write(json.dumps(asdict(answer)) + "\n")
        out.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
