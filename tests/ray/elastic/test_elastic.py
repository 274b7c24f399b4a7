"""A run that loses workers goes on in the living processes, and nothing shows in its numbers."""

from __future__ import annotations

import csv
import itertools
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.base import get_json
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.heartbeat import process_alive
from tests.support.runs.core_waits import CoreWaits
from tests.support.runs.ray_runs import (
    Watched,
    check_ledger,
    in_one_process,
    kill,
    ledger,
    losses,
    run,
    start,
    tiny_job,
)
from tests.support.selection import also_deep

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]
NO_SPARE = {"replace_workers": False}  # a process that imports torch takes seconds
TWO_REPLICAS: dict[str, Any] = {
    "layout": {"dp": 2, "zero": 0, "micro_batch": 6},
    "cluster": {"max_workers": 2},
}


@pytest.fixture(scope="module")
def calm(local_ray: object, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the tiny job without any fault, fp64."""
    import ray

    from picotron_ray.runtime.ray_cluster.names import NAMESPACE

    ray.init(address=local_ray.address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    job = tiny_job("calm", tmp_path_factory.mktemp("calm"), **TWO_REPLICAS)
    summary = run(job)
    assert summary["status"] == "finished"
    assert summary["failures"] == []
    check_ledger(job)
    found = losses(job)
    ray.shutdown()
    return found


def test_kills_cost_nothing_down_to_the_last_worker(calm: list[float], tmp_path: Path) -> None:
    """Three kills, each in another phase (all phases: test_kill_points): worlds of 4, 3, 2 and 1."""
    phases = ("backward", "optimizer", "snapshot")
    faults = tuple(
        {"fault": "kill", "target": f"worker:{target}", "step": step, "phase": phase}
        for target, step, phase in zip((2, 1, 1), (8, 17, 26), phases, strict=True)
    )
    curves = ({"kind": "csv", "folder": str(tmp_path / "curves")},)
    slots = {"slots": 4}  # of which an upload may pin one while a worker dies in a copy
    job = tiny_job(
        "kill-all-but-one", tmp_path, chaos=faults, elastic=NO_SPARE, trackers=curves, snapshot=slots
    )
    summary = run(job)
    assert [failure["kind"] for failure in summary["failures"]] == ["worker-exited"] * 3
    assert max(failure["lost_steps"] for failure in summary["failures"]) <= 1, summary["failures"]
    assert [len(generation["members"]) for generation in summary["generations"]] == [4, 3, 2, 1]
    assert losses(job) == pytest.approx(calm, rel=1e-9)
    check_ledger(job)
    with (tmp_path / "curves" / "steps.csv").open() as file:
        rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == list(enumerate(losses(job), start=1))  # each step once, whatever was killed


@pytest.mark.parametrize(
    ("layout", "model", "phase"),
    [
        # under a schedule "forward" is the whole of both passes
        pytest.param({"tp": 2, "pp": 2}, {}, "forward", marks=pytest.mark.slow),  # test_remesh has pipelines
        ({"cp": 2, "ep": 2, "zero": 3}, {"moe": {"experts": 4, "intermediate_size": 32}}, "backward"),
    ],
    ids=str,
)
def test_a_kill_under_any_parallelism(
    layout: dict[str, int], model: dict[str, Any], phase: str, calm: list[float], tmp_path: Path
) -> None:
    faults = ({"fault": "kill", "target": "worker:1", "step": 15, "phase": phase},)
    name = "layout-" + "-".join(f"{key}{value}" for key, value in layout.items())
    # no degree is free, so that the dead worker must be replaced
    workers = {"max_workers": 2 if "cp" in layout else 4}
    job = tiny_job(name, tmp_path, layout=layout, model=model, chaos=faults, cluster=workers)
    summary = run(job)
    assert len(summary["generations"]) >= 2
    assert losses(job) == pytest.approx(in_one_process(job) if model else calm, rel=1e-9)
    check_ledger(job)


WIDER: dict[str, dict[str, Any]] = {
    "muon, sharded copies, documents": {
        "optimizer": {"name": "muon"},
        "layout": {"dp": 4, "zero": 1, "replicate": 2, "micro_batch": 3},
        "data": {"document_masks": True},
    },
    "fp16, parts in fp32": {
        "precision": "fp16",
        "adaptive_precision": {"error_bound": 1e-4},
        "layout": {"dp": 2, "zero": 0, "micro_batch": 6},
        "cluster": {"max_workers": 2},
    },
}


@pytest.mark.parametrize("wider", also_deep(*WIDER))
def test_a_kill_under_other_optimizers_precisions_and_masks(wider: str, tmp_path: Path) -> None:
    """What the pool's generations show without Ray (tests/gloo), once through coordinator and agents."""
    faults = ({"fault": "kill", "target": "worker:1", "step": 15, "phase": "optimizer"},)
    job = tiny_job(f"wider-{list(WIDER).index(wider)}", tmp_path, chaos=faults, steps=24, **WIDER[wider])
    summary = run(job)
    (failure,) = summary["failures"]
    assert failure["lost_steps"] <= 1
    check_ledger(job)
    exact = job.precision == "fp64"
    assert losses(job) == pytest.approx(in_one_process(job), rel=1e-9 if exact else 1e-3)


@pytest.mark.deep
def test_moments_become_8_bits_at_a_second_launch_and_survive_a_kill(tmp_path: Path) -> None:
    """From a commit with full moments; its restores and the kill's are those of tests/gloo, through Ray."""
    sections: dict[str, Any] = {
        "precision": "fp32",
        "model": {"hidden_size": 64, "intermediate_size": 128},
        "layout": {"dp": 2, "zero": 2, "micro_batch": 6},
        "cluster": {"max_workers": 2},
    }
    faults = ({"fault": "kill", "target": "worker:1", "step": 15, "phase": "optimizer"},)
    for steps, moments, chaos in ((8, "full", ()), (24, "8bit", faults)):
        more = {"steps": steps, "optimizer": {"moments": moments}, "chaos": chaos}
        job = tiny_job("moments", tmp_path, **sections, **more)
        summary = run(job)
    (failure,) = summary["failures"]
    assert failure["lost_steps"] <= 1
    check_ledger(job)
    exact = in_one_process(tiny_job("alone", tmp_path, **sections, steps=24))
    assert losses(job)[:8] == pytest.approx(exact[:8], rel=1e-5)
    assert losses(job) == pytest.approx(exact, rel=1e-2)
    assert losses(job)[12:] != pytest.approx(exact[12:], rel=1e-5), "it was 8 bits"


@pytest.mark.deep
def test_fp32_stays_close_for_a_hundred_steps_after_a_change(tmp_path: Path) -> None:
    """At the default rate: at thrice of it the loss has a spike, and rounding alone grows past the bound."""
    faults = ({"fault": "kill", "target": "worker:1", "step": 18, "phase": "backward"},)
    job = tiny_job(
        "fp32-kill", tmp_path, precision="fp32", steps=120, chaos=faults, elastic=NO_SPARE,
        cluster={"max_workers": 3}, optimizer={"learning_rate": 1e-3},
    )  # fmt: skip
    run(job)
    quiet = in_one_process(job)
    assert losses(job)[:118] == pytest.approx(quiet[:118], rel=1e-5)


@pytest.mark.deep
def test_losses_are_bitwise_equal_where_the_layout_never_changed(calm: list[float], tmp_path: Path) -> None:
    faults = ({"fault": "kill", "target": "worker:1", "step": 18, "phase": "backward"},)
    job = tiny_job("same-layout", tmp_path, chaos=faults, **TWO_REPLICAS)
    summary = run(job)
    assert {generation["layout"] for generation in summary["generations"]} == {"dp2-tp1-pp1-mb6"}
    assert len(summary["generations"]) == 2
    assert losses(job) == calm


def test_a_stuck_worker_is_found_and_left_behind(calm: list[float], tmp_path: Path) -> None:
    faults = (
        {"fault": "stop", "target": "worker:1", "step": 12, "phase": "forward"},
        {"fault": "hang", "target": "worker:1", "step": 26, "phase": "forward"},
    )
    quick = {**NO_SPARE, "hang_floor_s": 0.5, "first_step_timeout_s": 20.0}
    job = tiny_job("stuck", tmp_path, chaos=faults, elastic=quick, cluster={"max_workers": 3})
    summary = run(job)
    assert [failure["kind"] for failure in summary["failures"]] == ["hang", "hang"]
    assert losses(job) == pytest.approx(calm, rel=1e-9)
    storage = open_storage(job.storage, job.name)
    for failure, generation in zip(summary["failures"], summary["generations"], strict=False):
        ranks = get_json(storage, failure["evidence"])["ranks"]
        assert sorted(rank["worker"] for rank in ranks) == sorted(generation["members"])
        stuck = [rank for rank in ranks if rank["state"] == "T" or "in strike" in rank["stacks"]]
        assert len(stuck) == 1
        assert any("in _step" in rank["stacks"] for rank in ranks)
    check_ledger(job)


@pytest.mark.deep
def test_two_workers_killed_at_once_are_replaced_and_the_run_grows_again(
    calm: list[float], tmp_path: Path
) -> None:
    job = tiny_job(
        "grow", tmp_path, steps=6000, checkpoint={"interval_steps": 1000}, cluster={"max_workers": 3}
    )
    watched = start(job)
    watched.until(lambda s: s["step"] >= 10)
    for pid in list(watched.pids().values())[:2]:
        kill(pid)
    watched.until(lambda s: s["step"] > 12 and len(s["members"]) == 1)
    watched.until(lambda s: len(s["members"]) == 3)
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    worlds = [len(generation["members"]) for generation in summary["generations"]]
    assert (worlds[0], worlds[-1]) == (3, 3)
    assert 1 in worlds
    check_ledger(job)
    found = losses(job)
    assert len(found) == summary["steps"]  # the stop committed every step
    assert found[:40] == pytest.approx(calm, rel=1e-9)


def agent_of(job: JobConfig) -> int:
    """Pid of the agent of the only node; 0 where none serves."""
    from picotron_ray.runtime.ray_cluster.cleanup import SIGNATURE
    from picotron_ray.runtime.ray_cluster.names import run_folder

    (signature,) = run_folder(job.snapshot.folder, job.name).glob(f"*/{SIGNATURE}")
    pid, ticks = map(int, signature.read_text().split())
    return pid if process_alive(pid, ticks) else 0


def kill_agent(watched: Watched) -> int:
    """SIGKILL the agent; returns the pid that it had."""
    pid = agent_of(watched.job)
    kill(pid)
    return pid


def wait_for_agent(watched: Watched, before: int, times: int = 1) -> float:
    """Seconds until another agent than ``before`` serves the coordinator, which hears it a ``times`` time."""
    began = time.monotonic()
    watched.until(lambda s: sum(e["kind"] == "agent" for e in watched.events) == times)
    assert agent_of(watched.job) not in (0, before)
    return time.monotonic() - began


def test_the_coordinator_is_killed_and_adopts_and_then_so_does_the_agent(tmp_path: Path) -> None:
    import ray

    from picotron_ray.runtime.node_agent.rendezvous import RECORD
    from picotron_ray.runtime.ray_cluster.data_notes import SUFFIX
    from picotron_ray.runtime.ray_cluster.names import run_folder
    from picotron_ray.runtime.run_storage.data_record import recorded_data

    job = tiny_job(
        "adopt", tmp_path, steps=100_000, checkpoint={"interval_steps": 200}, cluster={"max_workers": 2}
    )
    watched = start(job)
    watched.until(lambda s: s["step"] >= 10)
    before = watched.pids()
    kill(ray.get(watched.coordinator.pid.remote()))
    watched.events.clear()
    watched.until(lambda s: s["term"] == 2 and s["step"] > 10)
    adopted = watched.look()
    assert watched.pids() == before
    assert adopted["failures"] == []

    notes = run_folder(job.snapshot.folder, job.name).glob(f"*/*{SUFFIX}")
    seen = recorded_data(open_storage(job.storage, job.name))
    assert {note.stem: note.read_text() for note in notes} == dict.fromkeys(before, seen)

    (record,) = run_folder(job.snapshot.folder, job.name).glob(f"*/{RECORD}")
    store = record.read_text()
    seconds = wait_for_agent(watched, kill_agent(watched))
    print(f"the agent served again after {seconds:.1f} s")
    served = watched.look()["step"]
    back = watched.until(lambda s: s["step"] > served + 10)
    assert (back["generation"], back["failures"]) == (adopted["generation"], []), "no step was lost"
    assert (watched.pids(), record.read_text()) == (before, store)

    victim, other = sorted(before)
    agent = kill_agent(watched)
    kill(before[victim])  # nobody watches the pages at that moment
    hurt = watched.until(lambda s: s["generation"] == "2.1" and s["step"] > back["step"] + 10)
    wait_for_agent(watched, agent, times=2)
    assert watched.pids()[other] == before[other]
    (failure,) = hurt["failures"]
    assert (failure["kind"], failure["restored_from"]) == ("worker-exited", "slots")
    assert failure["lost_steps"] <= 1
    assert record.read_text() == store, "the next generation met in the same store"
    watched.coordinator.request.remote("stop")
    summary = watched.finish()
    assert summary["status"] == "stopped"
    check_ledger(job)
    assert len(losses(job)) == summary["steps"]
    assert not record.parent.exists()


def steps_within(job: JobConfig, window: tuple[float, float], waits: CoreWaits) -> list[tuple[float, float]]:
    """(seconds, seconds without what the workers waited for a core) of the steps in a window of time."""
    times = [line["at_s"] for line in ledger(job)]
    steps = [(a, b) for a, b in itertools.pairwise(times) if window[0] <= a and b <= window[1]]
    return [(b - a, b - a - waits.between(a, b)) for a, b in steps]


@pytest.mark.deep
def test_an_agents_death_costs_no_step_and_a_worker_stopped_meanwhile_is_recovered(tmp_path: Path) -> None:
    """A new process takes a second of a core, here from workers that need both: that is no step's wait."""
    job = tiny_job(
        "no-agent",
        tmp_path,
        steps=100_000,
        checkpoint={"interval_steps": 100_000},
        cluster={"max_workers": 2},
        data={"global_batch": 240},  # a step that takes longer than a turn of the scheduler
    )
    watched = start(job)
    watched.until(lambda s: s["step"] >= 10)
    served_s, windows = [], []
    with CoreWaits(watched.pids().values()) as waits:
        calm = (time.time(), time.time() + 20.0)
        time.sleep(20.0)
        for times in (1, 2, 3):
            agent, began = kill_agent(watched), time.time()
            served_s.append(wait_for_agent(watched, agent, times))
            time.sleep(1.0)
            windows.append((began, time.time()))
    assert watched.look()["failures"] == []
    assert watched.status["generation"] == "1.1"

    before = watched.pids()
    victim, other = sorted(before)
    agent = kill_agent(watched)
    os.kill(before[victim], signal.SIGSTOP)  # nobody looks at its page
    step = watched.look()["step"]
    hurt_run = watched.until(lambda s: s["generation"] == "1.2" and s["step"] > step + 10, timeout_s=60)
    assert watched.pids()[other] == before[other]
    (failure,) = hurt_run["failures"]
    assert failure["kind"] == "hang"
    watched.coordinator.request.remote("stop")
    assert watched.finish()["status"] == "stopped"
    check_ledger(job)

    quiet = steps_within(job, calm, waits)
    disturbed = [step for window in windows for step in steps_within(job, window, waits)]
    median_s, own_median_s = (statistics.median(kind) for kind in zip(*quiet, strict=True))
    print(f"the agent served again after {', '.join(f'{s:.1f}' for s in served_s)} s")
    print(f"{len(quiet)} calm steps: median {median_s:.3f} s, longest {max(quiet)[0]:.3f} s")
    print(f"{len(disturbed)} steps without an agent: longest {max(disturbed)[0]:.3f} s")
    longest_s = max(own for _, own in disturbed)
    print(
        f"without waits for a core: median {own_median_s:.3f} s, longest without an agent {longest_s:.3f} s"
    )
    assert longest_s < max(2 * own_median_s, *(own for _, own in quiet)), "no step waited for the agent"
    assert min(served_s) < 5.0
