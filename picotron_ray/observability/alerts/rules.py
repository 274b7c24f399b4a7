"""Rules: one table of what is judged, by which threshold, and what to do next.

The table is the one source of the detector, of the rules for Prometheus and of the documentation. A rule
looks at one figure of a window (`derived` adds shares to those of `observability.windows`):

- ``above``, ``below``: its value against the threshold;
- ``rise``: more than threshold x its baseline; ``drop``: less than (1 - threshold) x its baseline. Both must
  also leave the noise of the baseline (`conditions`);
- ``rising``: as many rises in a row as the threshold says, after the warm-up;
- ``counter``: it has grown by the threshold at least since the window before;
- ``burst``: it has grown by the threshold at least within `BURST_S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from picotron_ray.config.schema.alerts import AlertsConfig, Severity

Kind = Literal["above", "below", "rise", "drop", "rising", "counter", "burst"]
BURST_S = 600.0
OWN_WINDOWS = 3
"""Windows in a row of a rule of one's own."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table.

    Fields:
        figure: that it looks at; one that ends in ``.*`` stands for one of each axis.
        windows: in a row that must show it, and as many without it that end it.
        remesh: whether a re-mesh changes what is ordinary, so that baselines and counts begin anew.
        beside: a second figure that must be above its own baseline by half, and above `BESIDE` as a share.
        gpu: only where GPUs compute.
        from_zero: whether a counter's first value counts as growth.
    """

    name: str
    severity: Severity
    figure: str
    kind: Kind
    threshold: float
    means: str
    advice: str
    windows: int = 1
    remesh: bool = True
    beside: str = ""
    gpu: bool = False
    from_zero: bool = False


BESIDE = 0.05

TABLE: tuple[Rule, ...] = (
    Rule(
        "nan", "critical", "bad_steps_total", "counter", 1.0,
        "a loss or gradient was not finite, and its update was left out",
        "look at the samples that the run's events name; a lower learning rate, or alerts.act with rewind",
        remesh=False, from_zero=True,
    ),
    Rule(
        "loss-spike", "warning", "loss", "rise", 1.3,
        "the loss is far above what it was",
        "look at the data of these steps; elastic.on_spike=rewind goes back by itself",
        windows=2, remesh=False,
    ),
    Rule(
        "gradient-exploding", "warning", "grad_norm", "rise", 8.0,
        "the gradient norm is many times what it was",
        "a lower learning rate, or optimizer.max_grad_norm; watch the loss",
        windows=2, remesh=False,
    ),
    Rule(
        "gradient-vanishing", "warning", "grad_norm", "drop", 0.98,
        "nearly nothing is left of the gradient norm",
        "look for saturated layers, a loss that is masked out, or a learning rate that ended",
        windows=3, remesh=False,
    ),
    Rule(
        "throughput", "warning", "tokens_per_s", "drop", 0.2,
        "fewer tokens a second than before in this generation",
        "picotron-ray status --json shows the phase whose seconds grew",
        windows=4,
    ),
    Rule(
        "straggler", "warning", "straggler_ratio", "above", 1.3,
        "one rank computes longer than the others",
        "look at that rank's node: clocks, neighbours, memory; adapt.apply with rows feeds it less",
        windows=4,
    ),
    Rule(
        "data-stall", "warning", "data_ratio", "above", 0.3,
        "steps wait for data",
        "raise data.prefetch_steps, or bring the data nearer",
        windows=4,
    ),
    Rule(
        "host-cpu", "warning", "host_cpu_ratio", "above", 0.9,
        "the host's CPUs are busy while steps wait longer for data",
        "fewer processes beside the run, or more CPUs per worker",
        windows=3, beside="data_ratio",
    ),
    Rule(
        "host-memory", "critical", "host_memory_ratio", "above", 0.95,
        "the host's memory is nearly full: the kernel kills next",
        "free memory on that host; snapshot slots and neighbours count too",
        windows=2, remesh=False,
    ),
    Rule(
        "device-memory", "critical", "device_memory_ratio", "above", 0.9,
        "the device's memory is nearly full, beyond what was planned",
        "smaller layout.micro_batch, or layout.recompute; adapt.apply with micro-batch does it",
        beside="planned_memory_ratio",
    ),
    Rule(
        "disk", "warning", "disk_used_ratio", "above", 0.9,
        "a disk of the run is nearly full",
        "free space, or lower checkpoint.keep_last; a full disk stops commits",
        remesh=False,
    ),
    Rule(
        "leak", "warning", "allocated_bytes", "rising", 10.0,
        "memory has grown with every window",
        "look for tensors or objects that are kept from step to step",
    ),
    Rule(
        "fragmentation", "info", "fragmentation_ratio", "above", 0.5,
        "most free device memory is in pieces",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        windows=5, gpu=True,
    ),
    Rule(
        "bandwidth", "warning", "bandwidth_bytes_per_s.*", "drop", 0.3,
        "an axis moves fewer bytes a second than before",
        "picotron-ray bench comm measures the links; look at their counters",
        windows=3,
    ),
    Rule(
        "latency", "warning", "latency_s.*", "rise", 3.0,
        "an axis answers much later than before",
        "picotron-ray bench comm measures the links; look for a busy switch or host",
        windows=3,
    ),
    Rule(
        "pending-operations", "warning", "pending_operations", "rising", 6.0,
        "collectives are issued faster than they are waited for",
        "look for a rank that is late; a hang is called by itself",
    ),
    Rule(
        "utilization", "info", "utilization_ratio", "below", 0.5,
        "GPUs compute less than half of the time",
        "picotron-ray bench mfu --ablate names what costs most",
        windows=5, gpu=True,
    ),
    Rule(
        "throttling", "warning", "throttled_gpus", "above", 0.5,
        "GPUs run with lowered clocks",
        "look at temperature and power of the node's GPUs",
        windows=2, gpu=True, remesh=False,
    ),
    Rule(
        "ecc", "critical", "ecc_errors_total", "counter", 1.0,
        "a GPU had a memory error that it could not correct",
        "take the node out and reset the GPU; weights since then are in doubt",
        gpu=True, remesh=False,
    ),
    Rule(
        "xid", "critical", "xid_errors_total", "counter", 1.0,
        "a GPU reported a fault (XID)",
        "look the number up in the kernel's log of that node, and drain it",
        gpu=True, remesh=False,
    ),
    Rule(
        "durability-lag", "warning", "durability_lag_ratio", "above", 3.0,
        "commits are far behind the steps",
        "look at storage: a loss of all nodes would cost the steps since the newest commit",
        windows=3, remesh=False,
    ),
    Rule(
        "recovery-loop", "critical", "failures_total", "burst", 3.0,
        "failures follow each other",
        "picotron-ray status shows their kinds; a node that takes part in all of them should go",
        remesh=False,
    ),
)  # fmt: skip
"""The table of rules, with their defaults."""

BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in TABLE}


def derived(figures: Mapping[str, float], checkpoint_steps: int) -> dict[str, float]:
    """Return a window's figures and the shares that rules look at.

    >>> derived({"data_s": 1.0, "step_s": 4.0}, 10)["data_ratio"]
    0.25
    """
    found = dict(figures)
    for name, part, whole in (
        ("data_ratio", "data_s", "step_s"),
        ("device_memory_ratio", "peak_bytes", "device_bytes"),
        ("planned_memory_ratio", "peak_bytes", "planned_peak_bytes"),
    ):
        if figures.get(whole, 0.0) > 0 and part in figures:
            found[name] = figures[part] / figures[whole]
    if "durability_lag_steps" in figures:
        found["durability_lag_ratio"] = figures["durability_lag_steps"] / checkpoint_steps
    return found


def rules_of(config: AlertsConfig, *, gpu: bool) -> tuple[Rule, ...]:
    """Return the rules that are on, as a config has them; those of its own come last."""
    named = {each.rule: each for each in config.rules}
    found = []
    for rule in TABLE:
        own = named.get(rule.name)
        if (rule.gpu and not gpu) or (own is not None and not own.enabled):
            continue
        if own is not None:
            changed = {"threshold": own.threshold, "windows": own.windows, "severity": own.severity}
            rule = replace(rule, **{name: value for name, value in changed.items() if value is not None})  # type: ignore[arg-type]
        found.append(rule)
    for each in config.rules:
        if each.figure is not None and each.enabled:
            limit = each.above if each.above is not None else each.below
            assert limit is not None, "validation asks for one"
            found.append(
                Rule(
                    each.rule,
                    each.severity or "warning",
                    each.figure,
                    "above" if each.above is not None else "below",
                    limit,
                    "a rule of this run's config",
                    "see alerts.rules of the run's config",
                    windows=each.windows or OWN_WINDOWS,
                )
            )
    return tuple(found)
