"""Result of ``bench mfu``, from the events of its processes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from picotron_ray.bench.common.copy_figures import copy_figures
from picotron_ray.bench.common.event_log import Event
from picotron_ray.bench.mfu.figures import breakdown, formula, measured, mfu, speed_up
from picotron_ray.bench.mfu.settings import EXCHANGE, Setting
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.kernels import norm_kernel
from picotron_ray.errors import PicotronError
from picotron_ray.planner.peaks import rated_precision


def refusals(settings: Sequence[Setting], events: Sequence[Event]) -> dict[str, str]:
    """Collect the reasons of refused settings, by name; raises PicotronError where the base is one.

    A rank that has only lost a peer does not know the reason.
    """
    told = sorted((event for event in events if "refused" in event), key=lambda event: not event["by_peer"])
    found = {settings[event["index"]].name: event["refused"] for event in told}
    if settings[0].name in found:
        raise PicotronError(f"bench mfu: {found[settings[0].name]}")
    return found


def peak_of(events: Sequence[Event], given_tflops: float | None, precision: str) -> dict[str, Any]:
    """FLOP/s that one worker could do, and where the figure is from.

    Given, else of the data sheet, else measured: on each rank the fastest product of the whole benchmark
    (a slow moment of the machine must not make a small peak), and the mean over ranks.
    """
    if given_tflops is not None:
        return {"flops_per_s": given_tflops * 1e12, "source": "given by --peak-tflops"}
    place = next(event for event in events if event["what"] == "place")
    if place["data_sheet"] is not None:
        return {"flops_per_s": place["data_sheet"], "source": "dense bf16 by its data sheet"}
    fastest: dict[int, float] = defaultdict(float)
    for event in events:
        if event["what"] == "product":
            size, rank = event["size"], event["rank"]
            fastest[rank] = max(fastest[rank], event["flops_per_s"])
    source = f"measured: the fastest {size} x {size} {precision} matrix product in the same process"
    return {"flops_per_s": mean(fastest.values()), "source": source}


def result(
    settings: Sequence[Setting], refused: Mapping[str, str], events: Sequence[Event], given: float | None
) -> dict[str, Any]:
    """Compute the base's figures, and the ratio of every other setting that ran to it.

    Args:
        refused: by name, what was not even started, and why.
        given: peak in TFLOP/s of one worker; None: find it.
    """
    base, job = settings[0], settings[0].job
    refused = {**refused, **refusals(settings, events)}
    runs = {settings[index].name: run for index, run in runs_of(events).items()}
    memory = memory_of(events)
    ran = [setting for setting in settings[1:] if setting.name not in refused]
    figures, flops = measured(runs[base.name], _tokens(job)), formula(job)
    peak, rate = peak_of(events, given, rated_precision(job)), figures["tokens_per_s"]["median"]
    return {
        "job": {
            "model": job.model.model_dump(mode="json"),
            "global_batch": job.data.global_batch,
            "sequence_length": job.data.sequence_length,
            "precision": job.precision,
            "attention": job.kernels.attention,
            "norms": norm_kernel(job, job.cluster.device),
            "applied": next((event["applied"] for event in events if "applied" in event), []),
            "layout": str(base.layout),
            "workers": base.layout.world_size,
            "device": next(event["device"] for event in events if event["what"] == "place"),
        },
        **figures,
        "formula": {**asdict(flops), "words": str(flops)},
        "peak": peak,
        "mfu": mfu(rate, flops.flops_per_token, base.layout.world_size, peak["flops_per_s"]),
        "memory": _by_class(memory.get(0)),
        "breakdown": breakdown([event["phases_s"] for event in events if "phases_s" in event]),
        "ablation": {
            s.name: {**_beside(s, runs, base), **_beside_memory(memory.get(settings.index(s)), memory.get(0))}
            for s in ran
            if s.kind == "engine"
        },
        "loop": of_the_loop([s for s in ran if s.kind == "loop"], runs, base),
        "peers": {s.name: _beside(s, runs, base) for s in ran if s.kind not in ("engine", "loop")},
        "refused": refused,
        "rounds": runs,
    }


def _tokens(job: JobConfig) -> int:
    """Tokens per step."""
    return job.data.global_batch * job.data.sequence_length


def _beside(setting: Setting, runs: Mapping[str, list[dict[str, Any]]], base: Setting) -> dict[str, Any]:
    """Figures, and ``ratio``: of a switch its speed over the base's, of a peer the base's over its.

    Of a switch also ``over_base``: its loss, bytes sent and peak memory over the base's.
    """
    mine, other = runs[setting.name], runs[base.name]
    ratio = speed_up(mine, other) if setting.kind == "engine" else speed_up(other, mine)
    figures, of_base = measured(mine, _tokens(setting.job)), measured(other, _tokens(base.job))
    over = {
        name: figures[name] / of_base[name]
        for name in ("loss", "sent_bytes", "peak_bytes")
        if setting.kind == "engine" and figures[name] and of_base[name]
    }
    return {**figures, "ratio": ratio, "over_base": over}


def of_the_loop(
    ways: Sequence[Setting], runs: Mapping[str, list[dict[str, Any]]], base: Setting
) -> dict[str, Any]:
    """Figures of the loop of workers; its mean step over the base's, and over the loop's without snapshots.

    Of snapshots ``interval_steps``, the mean between two; ``wait_s``, ``snapshot_s`` and ``skipped`` of the
    rank with most; ``copies`` by the device's events (None: no device).
    """
    found = {}
    for way in ways:
        mine, figures = runs[way.name], measured(runs[way.name], _tokens(way.job))
        costs = [segment["loop"] for segment in mine]
        taken = sum(cost["snapshots"] for cost in costs)
        found[way.name] = {
            **{name: figures[name] for name in ("tokens_per_s", "step_s", "steps", "peak_bytes")},
            "over_base": speed_up(runs[base.name], mine),
            "over_exchange": speed_up(runs[EXCHANGE], mine) if EXCHANGE in runs else None,
            "snapshots": taken,
            "interval_steps": figures["steps"] / taken if taken else None,
            **{name: max(cost[name] for cost in costs) for name in ("wait_s", "snapshot_s", "skipped")},
            "copies": copy_figures([times for cost in costs for times in cost["copies"]]),
        }
    return found


def memory_of(events: Sequence[Event]) -> dict[int, dict[str, Any] | None]:
    """Per setting the account of a step on the rank that takes most; None where it cannot be traced."""
    found: dict[int, dict[str, Any] | None] = {}
    for event in events:
        if "memory" in event:
            best, mine = found.get(event["index"]), event["memory"]
            fuller = best is None or (mine is not None and mine["peak_bytes"] > best["peak_bytes"])
            found[event["index"]] = mine if fuller else best
    return found


def _by_class(account: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Account of a step without its timeline."""
    return {key: account[key] for key in ("peak_bytes", "by_class", "most")} if account else None


def _beside_memory(mine: Mapping[str, Any] | None, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Bytes of a step's tensors (``memory``), and their peak over the base's; None: not known."""
    ratio = mine["peak_bytes"] / base["peak_bytes"] if mine and base else None
    return {"memory": _by_class(mine), "memory_ratio": ratio}


def runs_of(events: Sequence[Event]) -> dict[int, list[dict[str, Any]]]:
    """Per setting its segments in order: steps as rank 0 timed them, most memory and bytes of a rank."""
    ranks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if "steps_s" in event:
            ranks[event["index"], event["number"]].append(event)
    runs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for (index, _), noted in sorted(ranks.items()):
        steps = next(event["steps_s"] for event in noted if event["rank"] == 0)
        sent = [event["sent_bytes"] for event in noted if event.get("sent_bytes") is not None]
        losses = [event["loss_sum"] for event in noted if event.get("loss_sum") is not None]
        runs[index].append(
            {
                "steps_s": steps,
                "peak_bytes": max(event["peak_bytes"] for event in noted),
                "sent_bytes": max(sent, default=None),
                "loss_sum": sum(losses) if losses else None,
            }
        )
        if costs := [event["loop"] for event in noted if "loop" in event]:
            largest = ("snapshots", "wait_s", "snapshot_s", "skipped")
            runs[index][-1]["loop"] = {
                **{name: max(cost[name] for cost in costs) for name in largest},
                "copies": [times for cost in costs for times in cost["copies"]],
            }
    return dict(runs)
