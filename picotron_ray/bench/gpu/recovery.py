"""Parts of ``bench gpu`` that train by the real loop, with exchange, ledger and snapshots, but without Ray.

``kill``: a rank is killed in the middle of a generation, the others leave it by an abort (of NCCL's
communicators on GPUs), and go on in the same processes from the newest snapshots. Where there is one card
alone, a fresh process goes on.

``snapshots``: the same steps with a snapshot after each, at the interval that is chosen from measurement, and
with none but the last.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from picotron_ray.bench.common.copy_figures import copy_figures
from picotron_ray.bench.common.statistics import quartiles
from picotron_ray.bench.gpu.ranks import Answer, Ranks
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.search import choose_layout

Say = Callable[[str], None]
NEVER = 1_000_000
KILL_AT = 8
"""Step whose snapshot is sealed everywhere before a rank is killed."""
LEFT = ("interrupted", str(FailureKind.PEER_LOST))
"""Outcomes of those that survive."""
FLAT = "optimizer.schedule={kind: constant}"
"""A recipe's warm-up is longer than a benchmark."""
WARM = 3
"""First steps of a generation that are not counted."""


@contextmanager
def ranks_of(
    config: str, overrides: Sequence[str], kind: str, *, steps: int
) -> Iterator[tuple[JobConfig, Ranks]]:
    """Make ranks of a config in host memory; their slots go at the end."""
    folder = Path(tempfile.mkdtemp(prefix="picotron-bench-gpu-", dir="/dev/shm"))
    fixed = [
        *(f"steps={steps}", "chaos=[]", "evaluate.samples=8", f"cluster.device={kind}", FLAT),
        *(f"evaluate.interval_steps={NEVER}", f"checkpoint.interval_steps={NEVER}"),
        *(f"snapshot.folder={folder}", f"storage.url={folder / 'storage'}"),
    ]
    job = load_job(config, [*overrides, *fixed])
    ranks = Ranks(job, kind, folder / "run")
    try:
        yield job, ranks
    finally:
        ranks.close()
        shutil.rmtree(folder, ignore_errors=True)


def layout_of(job: JobConfig, ranks: int) -> Layout:
    """Choose the layout of so many ranks, as the coordinator does; it may use fewer."""
    return choose_layout(job, ranks, profile_of(job.cluster.device)).layout


def finished(answers: Sequence[Answer]) -> None:
    """Raise PicotronError where a rank did not reach the end."""
    for answer in answers:
        if answer["kind"] != "finished":
            raise PicotronError(f"bench gpu: a rank ended with {answer['kind']}: {answer['detail'][:300]}")


def bench_kill(
    config: str, overrides: Sequence[str], kind: str, count: int, kills: int, say: Say
) -> dict[str, Any]:
    """Kill a rank ``kills`` times, each time in a run of its own.

    Returns the seconds from each kill to the end of the next new step, the slowest survivor's.
    """
    found = []
    for number in range(kills):
        with ranks_of(config, overrides, kind, steps=3 * KILL_AT) as (job, ranks):
            found.append(one_kill(job, ranks, count))
        say(f"kill {number + 1} of {kills}: {found[-1]['total_s']:.3f} s to the next new step")
    low, middle, high = quartiles([kill["total_s"] for kill in found])
    return {"config": config, "total_s": {"median": middle, "low": low, "high": high}, "kills": found}


def one_kill(job: JobConfig, ranks: Ranks, count: int) -> dict[str, Any]:
    """Kill the last rank once a snapshot is sealed everywhere; the others, or a fresh process, go on."""
    first = layout_of(job, count)
    ranks.fill(first.world_size)
    ranks.begin(first)
    ranks.wait_for_step(KILL_AT)
    killed_s = ranks.kill(ranks.members[first.world_size - 1])
    ranks.order_abort()
    left = ranks.answers(ranks.members)
    wrong = [answer for answer in left if answer["kind"] not in LEFT]
    if wrong:
        raise PicotronError(
            f"bench gpu: a survivor ended with {wrong[0]['kind']}: {wrong[0]['detail'][:300]}"
        )
    alone = not ranks.members
    ranks.fill(1)
    second = layout_of(job, len(ranks.members))
    ranks.begin(second)
    assert ranks.last is not None
    if ranks.last.resume_step < KILL_AT - 1:
        raise PicotronError(f"bench gpu: went back to step {ranks.last.resume_step}, sealed was {KILL_AT}")
    answers = ranks.answers(ranks.members[: second.world_size])
    finished(answers)
    return {
        "layouts": [str(first), str(second)],
        "fresh_process": alone,
        "resume_step": ranks.last.resume_step,
        "restored_s": max(answer["restored_at_s"] for answer in answers) - killed_s,
        "total_s": max(answer["first_step_at_s"] for answer in answers) - killed_s,
    }


INTERVALS = {"none": NEVER, "auto": "auto", "every": 1}
"""Ways to take snapshots that are compared: how often."""


def bench_snapshots(
    config: str, overrides: Sequence[str], kind: str, count: int, steps: int, say: Say
) -> dict[str, Any]:
    """Time the same steps with snapshots in each of `INTERVALS`; of all ranks the slowest."""
    found = {}
    for name, interval in INTERVALS.items():
        asked = [*overrides, f"snapshot.interval_steps={interval}"]
        with ranks_of(config, asked, kind, steps=steps + WARM) as (job, ranks):
            layout = layout_of(job, count)
            ranks.fill(layout.world_size)
            ranks.begin(layout)
            answers = ranks.answers(ranks.members)
            finished(answers)
        found[name] = {"layout": str(layout), **step_figures(answers)}
        say(f"snapshots, {name}: {found[name]['step_s']:.4g} s a step")
    base = found["none"]["step_s"]
    return {"config": config, "steps": steps, "ways": found, **slower(found, base)}


def slower(found: dict[str, dict[str, Any]], base_s: float) -> dict[str, Any]:
    """Step times over those without snapshots."""
    return {"over_none": {name: one["step_s"] / base_s for name, one in found.items()}}


def step_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Median step, waits for copies, and what a snapshot took beside it; of the slowest rank."""
    times = []
    for answer in answers:
        began = [at_s for _, at_s in answer["began_s"]][WARM:]
        times.append([after - before for before, after in pairwise(began)])
    return {
        "step_s": max(median(each) for each in times),
        "wait_s": max(answer["wait_s"] for answer in answers),
        "snapshot_s": max(answer["snapshot_s"] for answer in answers),
        "skipped": max(answer["skipped"] for answer in answers),
        "copies": copy_figures([times for answer in answers for times in answer["copies"]]),
    }
