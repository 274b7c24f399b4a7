"""Event logs of real runs: proof that they replay, and how they are kept for the pure tier.

``PICOTRON_KEEP_LOGS=1`` with a Ray test copies its logs to tests/pure/coordinator/event_logs (paths of this
machine taken out). With the pure tier it writes the commands of the present machine into them: do that, and
read the difference, where its behaviour was changed on purpose.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode
from picotron_ray.coordinator.plan_book import Choose, Default
from picotron_ray.coordinator.replay import event_line, heard, machine_of, replay, unseal
from picotron_ray.planner import search
from picotron_ray.planner.default_layout import default_planner
from picotron_ray.runtime.coordinator.event_log.files import term_logs

KEPT = Path(__file__).resolve().parents[2] / "pure" / "coordinator" / "event_logs"
KEEP = bool(os.environ.get("PICOTRON_KEEP_LOGS"))


def planner(job: JobConfig, facts: dict[str, Any]) -> tuple[Choose, Default]:
    """What the coordinator's shell asks, and what it gives its machine."""
    device = facts.get("device", "cpu")
    return search.planner(job, device), default_planner(job, device)


def check_replay(folder: Path) -> int:
    """Replay the logs of all terms of a run; returns the number of terms. Fails at the first difference."""
    logs = term_logs(folder)
    assert logs, f"no event log in {folder}"
    for parts in logs:
        log, lines = parts[0], [line for part in parts for line in part.read_text().splitlines()]
        if KEEP:
            KEPT.mkdir(exist_ok=True)
            (KEPT / f"{folder.parent.name}-{log.name}").write_text(_without_paths(lines))
        found = replay(lines, planner)
        assert found.difference is None, f"{log.name}: {found.difference}"
        assert found.events == len(lines) - len(parts)
    return len(logs)


def _without_paths(lines: list[str]) -> str:
    plain = [unseal(line) or "" for line in lines]
    head = json.loads(plain[0])
    head["job"]["storage"]["url"] = "./runs"
    return "\n".join([json.dumps(head, separators=(",", ":"), sort_keys=True), *plain[1:]]) + "\n"


def rewritten(lines: list[str]) -> list[str]:
    """A log of the same events with the commands of the present machine."""
    head = json.loads(lines[0])
    machine = machine_of(head, planner)()
    out = [lines[0]]
    for line in lines[1:]:
        data = json.loads(line)
        event = decode(data["event"])
        machine.absorb(heard(data))
        commands = machine.handle(event, data["now"], data.get("slept"))
        more = {key: data[key] for key in ("i", "slept", "heard") if key in data}
        out.append(event_line(data["now"], event, commands, **more))
    return out
