"""``debug NAME deadlock|comm``: why the ranks of a run stand still, asked of them, or as it was kept."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from picotron_ray.checkpoint.storage.base import get_bounded
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.debug.hang_verdict import HangVerdict, judge_hang
from picotron_ray.debug.rank_record import RankRecord, read_rank
from picotron_ray.errors import ConfigError, NotFoundError, PicotronError
from picotron_ray.runtime.driver import breakpoints, find_stored, run_agents
from picotron_ray.runtime.node_agent.evidence import STOPPED

log = logging.getLogger(__name__)
A_RANK_BYTES = 512 << 10
MOST_BYTES = 128 << 20
"""Of all ranks' answers together."""
PLACES_S = 5.0
"""Longest further wait for the places of operations, which ranks read out for the first time in seconds."""
KEPT_BYTES = 64 << 20


def verdict(run: str, kept: bool = False) -> dict[str, Any]:
    """Say why ranks of a run stand still; JSON values of `HangVerdict`, and what they rest on.

    Args:
        kept: judge what was kept of the newest failure, in place of asking the ranks. That is done too where
            the run recovers, and has no ranks to ask.

    Raises:
        ConfigError: no run of that name goes on; or nothing was kept.
        LostRunError: its coordinator does not answer.
    """
    coordinator, seen = run_agents.connected(run)
    if seen["done"]:
        raise ConfigError(f"run: {run!r} is over: no rank of it can be asked (`picotron-ray report {run}`)")
    entries = [] if kept else _asked(run, seen)
    if entries:
        found = _named(judge_hang(read_ranks(entries)), run)
        if found["held"]:
            found["held"]["breakpoints"] = _holding(run)
        return {"run": run, "generation": seen["generation"], "failure": None, **found}
    failure = next((one for one in reversed(seen["failures"]) if one.get("evidence")), None)
    if failure is None:
        none = "no failure of this run has kept what its ranks told"
        now = "" if kept else f"run {run} does not train now ({seen['state']}), and "
        raise ConfigError(f"{now}{none}")
    evidence = _kept(run, coordinator, failure["evidence"])
    records = read_ranks(evidence["ranks"])
    found = _named(judge_hang(records, kept_least_s(records)), run)
    judged = {name: failure[name] for name in ("kind", "target", "step", "evidence")}
    told = {**judged, "why": evidence["why"], "at_s": evidence["at_s"]}
    return {"run": run, "generation": evidence["generation"], "failure": told, **found}


def _holding(run: str) -> list[int]:
    """Numbers of the breakpoints that hold a run; none where it has just gone on, or another tool does."""
    try:
        return sorted({hit["number"] for hit in breakpoints.listed(run)["hits"]})
    except PicotronError as error:
        log.debug("what holds run %s is not known: %s", run, error)
        return []


def read_ranks(entries: Sequence[Mapping[str, Any]]) -> list[RankRecord]:
    """Read what agents heard; entries of nodes that did not answer have no rank."""
    return [read_rank(entry) for entry in entries if "rank" in entry]


def kept_least_s(ranks: Sequence[RankRecord]) -> float:
    """Least age of an operation that counts, of ranks judged to hang: a part of how long they did."""
    return min(2.0, 0.3 * max((record.for_s for record in ranks), default=0.0))


def _asked(run: str, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask all ranks of the generation that runs; again, where one did not tell, or places are yet unknown."""
    deadline = time.monotonic() + PLACES_S
    while True:
        entries = ask_agents(run, seen)
        told = [
            str(entry["collectives"])
            for entry in entries
            if "rank" in entry and entry["state"] not in STOPPED
        ]
        placed = all('"places":true' in text for text in told)
        calm = all(told) and not judge_hang(read_ranks(entries)).findings
        if placed or calm or time.monotonic() > deadline:
            return entries
        time.sleep(0.5)


def ask_agents(run: str, seen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask the agents of a run where its ranks are; nothing where none tells of a rank."""
    most = min(A_RANK_BYTES, MOST_BYTES // max(1, len(seen["members"])))
    found = run_agents.ask_evidence(run, seen, most)
    return found if any("rank" in entry for entry in found) else []


def _kept(run: str, coordinator: Any, name: str) -> dict[str, Any]:
    """Read what was kept of a failure; it may be on its way to storage yet."""
    import ray

    job = JobConfig.model_validate(ray.get(coordinator.config.remote(), timeout=run_agents.ANSWER_S))
    storage = find_stored.storage_of(job)
    deadline = time.monotonic() + PLACES_S
    while True:
        try:
            found: dict[str, Any] = json.loads(get_bounded(storage, name, KEPT_BYTES))
            return found
        except NotFoundError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"run {run}: {name} is not in {storage.where}; see `picotron-ray debug bundle {run}`"
                ) from error
            time.sleep(0.2)


def _named(found: HangVerdict, run: str) -> dict[str, Any]:
    """JSON values of a verdict, with the run's name in the commands that it suggests."""
    plain = found.plain()
    plain["suggestions"] = [text.replace(" NAME", f" {run}") for text in plain["suggestions"]]
    return plain
