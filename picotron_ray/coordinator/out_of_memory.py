"""Out of memory: the layout is struck, and the next one needs clearly less.

Memory runs out in three ways: an allocation fails on a worker (its outcome says so), the kernel kills a
worker of a control group, or Ray kills one on a full node (its exit says so). The layout that ran is struck
for devices of that size (``policies.memory_limit``), so the next generation never runs it again there, nor
one that is thought to need as much. Strikes travel in every generation's spec, and with it in the log: a
restarted coordinator and the next launch know them. One that no generation has followed yet is in the run's
record alone, from which ``Begin`` brings it.

Host memory is not the layout's to decide where GPUs compute and nothing is offloaded. A worker that is killed
for want of it there counts as any other exit.
"""

from __future__ import annotations

from dataclasses import asdict

from picotron_ray.config.settings import with_settings
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import WorkerExited
from picotron_ray.coordinator.policies.memory_limit import strike
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate

STRUCK = "memory"
"""Kind of the alert of a strike; its data are the strike's fields and the node."""
OOM = "oom"
"""How outcomes and exits for want of memory begin."""
MOST_GONE = 64


def exit_kind(memory: MachineMemory, worker: RosterWorker, cause: str) -> FailureKind:
    """Judge the exit of a member, and strike its layout where that ran out of memory."""
    assert memory.spec is not None
    if len(memory.lately_gone) >= MOST_GONE:
        del memory.lately_gone[next(iter(memory.lately_gone))]
    memory.lately_gone[worker.name] = (memory.spec.layout, worker.node)
    if cause.startswith(OOM) and strike_layout(memory, memory.spec.layout, worker.node, on_device=False):
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.WORKER_EXITED


def late_verdict(memory: MachineMemory, event: WorkerExited) -> None:
    """Hear of a worker that is gone already why it went: Ray tells it later than the agent sees the end."""
    if not event.cause.startswith(OOM) or event.worker not in memory.lately_gone:
        return
    layout, node = memory.lately_gone.pop(event.worker)
    if not strike_layout(memory, layout, node, on_device=False):
        return
    incident = memory.incident
    if incident is not None and incident.target == event.worker and not incident.counted:
        incident.kind, incident.cause = FailureKind.OUT_OF_MEMORY, OOM


def strike_layout(memory: MachineMemory, layout: Layout, node: str, *, on_device: bool) -> bool:
    """Strike a layout that ran out of memory on a node; False where the layout could not help it.

    Args:
        on_device: memory of the device that computes ran out, rather than the host's.
    """
    known = memory.roster.nodes.get(node)
    gpus = known is not None and known.has_gpus
    offloads = memory.job.optimizer.offload or layout.offload_activations
    if gpus and not on_device and not offloads:
        return False
    device_bytes = 0 if known is None else known.device_bytes
    before = memory.struck
    need = memory_estimate(with_settings(memory.job, memory.settings), layout).total_bytes
    memory.struck = strike(before, device_bytes, need, str(layout))
    memory.exhausted, memory.plans.fresh = True, True
    if memory.struck != before:
        new = memory.struck[-1]
        limit = new.limit_bytes
        text = (
            f"{layout} ran out of memory on node {node}, where it was thought to need {need / 1e9:.3g} GB a"
            f" worker: no layout that needs more than {limit / 1e9:.3g} GB is taken on such devices any more"
        )
        memory.alert("warning", STRUCK, text, node=node, **asdict(new))
    return True


def given_up(memory: MachineMemory) -> str:
    """Reason to end a run whose layouts have all run out of memory; empty: there may still be one.

    Where fewer than the most workers are ready, more are awaited for ``cluster.start_timeout_s``.
    """
    if not memory.exhausted or memory.job.cluster.autoscale:
        return ""
    usable, most = memory.roster.usable(), memory.job.cluster.max_workers
    question = memory.question(usable, min(len(usable), most))
    if not usable or memory.plans.answers.get(question, question) is not None:
        return ""  # not answered yet, or there is one
    if memory.exhausted_until is None:
        memory.exhausted_until = memory.now + memory.job.cluster.start_timeout_s
    if len(usable) < most and memory.now < memory.exhausted_until:
        return ""
    gpus = any(node.has_gpus for node in memory.roster.nodes.values())
    more = "add workers or larger devices" if gpus else "add memory or nodes, which CPU workers share"
    return (
        f"out of memory: saw {', '.join(each.layout for each in memory.struck)} run out, expected a layout on"
        f" {len(usable)} workers that needs less; {more}, or leave layout.recompute, layout.micro_batch and"
        " the degrees to auto"
    )
