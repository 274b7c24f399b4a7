"""Runs for the page: a small one in storage, and the facts of one of thousands of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.export import public_dict
from picotron_ray.config.load import load_job
from picotron_ray.coordinator import messages as m
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.event_log.files import encode_record
from picotron_ray.runtime.dashboard.curves import Curves
from picotron_ray.runtime.dashboard.facts import RunFacts
from picotron_ray.runtime.run_storage.generation_entries import generation_body

BEGAN_S = 1_790_000_000.0
SCRIPT = "<script>alert(1)</script>\u202e"
"""Text that a run may hold, and no page may run."""


def store_run(folder: Path, name: str = "told", steps: int = 20, record: bool = True) -> LocalStorage:
    """Store a run of two generations of two workers that was cut off after ``steps`` steps."""
    storage = LocalStorage(str(folder), name)
    config = {"config": public_dict(load_job("tiny", [f"name={name}", f"steps={2 * steps}"]))}
    for key in ("run.json", "launch.json"):
        storage.put(key, json.dumps(config).encode())
    log = RunLog(storage)
    log.claim_term("host:1")
    members = (m.Member("w1-0", "a" * 56), m.Member("w1-1", "b" * 56))
    half = steps // 2
    for n, source in (
        (1, m.Source("init")),
        (2, m.Source("slots", step=half, generation=m.GenerationId(1, 1))),
    ):
        layout = Layout(dp=2, micro_batch=n)
        spec = m.GenerationSpec(m.GenerationId(1, n), members, layout, source, f"reason {n} {SCRIPT}")
        log.append("generation", generation_body(spec))
        _commit(storage, log, n, 1 + half * (n - 1), half * n)
    if record:
        storage.put("records/000001-000001.json", encode_record(_record(members, half, steps)))
    return storage


def _commit(storage: LocalStorage, log: RunLog, n: int, first: int, last: int) -> None:
    lines = [
        {
            "step": step, "term": 1, "n": n, "samples": [0, 8], "rows": [], "tokens": 256, "loss": 5.0 / step,
            "grad_norm": 1.0, "learning_rate": 0.001, "at_s": BEGAN_S + 2 * n + step,
        }
        for step in range(first, last + 1)
    ]  # fmt: skip
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    key = f"ledger/1-{n}-{first}-{last}.jsonl"
    storage.put(key, data)
    segment = [key, first, last, blake3(data).hexdigest()]
    body = {"term": 1, "n": n, "step": last, "manifest": f"manifests/{last}.json", "digest": "0"}
    log.append("commit", {**body, "segment": segment})


def _record(members: tuple[m.Member, ...], half: int, steps: int) -> dict[str, Any]:
    generations = [
        {
            "term": 1, "n": n, "layout": f"dp2-tp1-pp1-mb{n}", "start_step": half * (n - 1),
            "end_step": half * n,
            "source": "slots", "reason": "start", "workers": 2, "members_digest": "", "settings": [],
            "names": [member.worker for member in members], "nodes": [member.node for member in members],
            "on": [0, 1],
        }
        for n in (1, 2)
    ]  # fmt: skip
    failure = {
        "kind": "worker-exited", "target": "w1-1", "step": half, "detected_s": 3.0, "recovered_s": 0.5,
        "lost_steps": 0, "restored_from": "slots", "struck": "1.1",
    }  # fmt: skip
    event = {"seq": 1, "t": BEGAN_S + 3, "level": "warning", "kind": "failure", "text": SCRIPT, "data": {}}
    facts = {
        "generations": generations, "failures": [failure], "events": [event], "baseline_loss": 2.0,
        "checkpoints": [{"step": steps, "stall_s": 0.0, "bytes": 1000, "commit_s": 0.1}],
        "evaluations": [[half, 2.5], [steps, float("nan")]],
    }  # fmt: skip
    return {"began_s": BEGAN_S, "wall_s": 30.0, "goodput": 0.8, "facts": facts}


def many_ranks(ranks: int = 4096, each: int = 8, text: str = "") -> RunFacts:
    """Facts of a live run of so many ranks, with all that a status can hold of it."""
    workers = [f"w1-{rank}" for rank in range(ranks)]
    nodes = [f"{rank // each:056x}"[::-1] for rank in range(ranks)]
    pages = {
        worker: {"worker": worker, "rank": rank, "step": 999, "phase": "forward", "step_time_s": 1.0 / 3}
        for rank, worker in enumerate(workers)
    }
    slow = [
        {"rank": rank, "own_s": 2.0, "ratio": 2.0, "phase": "forward", "excess_s": 1.0, "step_s": 2.1}
        for rank in range(32)
    ]
    event = {"level": "warning", "kind": "failure", "text": text or "x" * 5000, "data": {}}
    status = {
        "run": "large", "state": "running", "done": False, "step": 1000, "steps": 5000, "committed": 900,
        "layout": f"dp{ranks // 64}-tp8-pp8-zero1-1f1b-mb1", "generation": "1.2", "pages": pages,
        "events": [{**event, "seq": seq, "t": BEGAN_S + seq} for seq in range(1000)],
        "failures": [
            {"kind": "hang", "target": f"w0-{at}", "step": at, "recovered_s": 1.0, "restored_from": "x"}
            for at in range(1000)
        ],
        "loss": float("nan"), "began_s": BEGAN_S, "telemetry": None, "windows": {},
    }  # fmt: skip
    curves = Curves()
    for step in range(1, 5000):
        curves.add(step, {"loss": 1.0 / 3 * step, "tokens_per_s": 7e6 / 3, "at_s": BEGAN_S + step})
    generations = [
        {
            "id": f"1.{n}", "layout": status["layout"], "workers": ranks, "start_step": n, "end_step": n + 1,
            "reason": "lost " + "y" * 900, "source": "slots", "from_s": BEGAN_S + n, "to_s": None,
        }
        for n in range(200)
    ]  # fmt: skip
    memory = {
        "workers": {
            worker: {"node": nodes[rank], "classes": {"weights": 1e9}, "peak_bytes": 2e9}
            for rank, worker in enumerate(workers[:128])
        },
        "gpus": [{"node": nodes[0], "gpu": str(at), "utilization_ratio": 0.5} for at in range(128)],
    }
    commits = [{"step": step, "bytes": 10**12, "commit_s": 1.0} for step in range(200)]
    return RunFacts(
        "large", "live", status, curves, workers, nodes, generations, commits, slow, memory=memory
    )
