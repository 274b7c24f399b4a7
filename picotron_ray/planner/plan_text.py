"""Plans and validations as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from picotron_ray.planner.analysis import Analysis
from picotron_ray.planner.cluster_size import ClusterSize
from picotron_ray.planner.goals import RunEstimate, said_hours
from picotron_ray.planner.hardware import said_devices
from picotron_ray.planner.model_sizes import parameter_count
from picotron_ray.planner.plan import PlannedStep, PlanReport
from picotron_ray.planner.published.memory import StageMemory, memory_dict
from picotron_ray.planner.published.sources import SOURCES
from picotron_ray.planner.published.validate import Prediction, Validation
from picotron_ray.planner.words import counted, said_bytes, short_name, unit_of

LEAST_GAIN = 0.001
"""Share of a step below which more GPUs or memory buy nothing."""
MOST_RANKS = 4
"""Different pipeline ranks whose memory is printed one by one."""
CAUSES = ("weights", "gradients", "optimizer", "activations", "received", "buffers", "update")


def plan_lines(plan: PlanReport) -> Iterator[str]:
    """A plan as lines: the best layout, where seconds and bytes go, the table, and what more would buy."""
    best = plan.best
    nodes = len(plan.hardware.node_sizes(plan.gpus))
    yield f"{plan.hardware.said(plan.gpus)} on {counted(nodes, 'node')} ({plan.hardware.origin})"
    yield f"layout     {best.layout}{_idle(plan, best)}"
    yield (
        f"step       {best.cost.total_s:.3g} s, {plan.tokens_per_s(best.cost.total_s):,.0f} tokens/s,"
        f" MFU {100 * plan.mfu(best):.1f} %{_range(plan)}"
    )
    causes = plan.to_dict()["breakdown"]["step_s"]
    total = best.cost.total_s
    parts = sorted(((seconds, name) for name, seconds in causes.items() if seconds), reverse=True)
    yield "by cause   " + ", ".join(
        f"{name} {seconds:.3g} s ({100 * seconds / total:.1f} %)" for seconds, name in parts
    )
    routes = plan.routes()
    if routes:
        yield f"routes     {'; '.join(map(str, routes))}"
    yield f"memory     of {plan.budget_bytes / 1e9:.3g} GB that an estimate may fill:"
    yield from _memory_lines(plan)
    yield from _table_lines(plan)
    yield from _purchase_lines(plan)
    yield f"searched   {plan.costed} candidates in {plan.seconds:.2f} s"


def _table_lines(plan: PlanReport) -> Iterator[str]:
    """The best layouts with why they lost, and some that do not fit."""
    yield "the best layouts:"
    unit, name = unit_of(max(step.memory_bytes for step in plan.table))
    for step, lost in zip(plan.table, (plan.reason, *(reason for _, reason in plan.rejected)), strict=False):
        yield (
            f"  {step.cost.total_s:9.4g} s  {step.memory_bytes / unit:6.1f} {name}  {short_name(step.layout)}"
            f"{_idle(plan, step)}{f'  ({lost})' if lost else ''}"
        )
    for layout, reason in plan.rejected[len(plan.table) - 1 :][:3]:
        yield f"  does not fit: {short_name(layout)} {reason}"


def _purchase_lines(plan: PlanReport) -> Iterator[str]:
    """Steps that more GPUs or memory would buy; a line for both where they buy nothing."""
    total = plan.best.cost.total_s
    bought = [one for one in plan.purchases if 1 - one.step_s / total >= LEAST_GAIN]
    for one in bought:
        gain = f"{100 * (1 - one.step_s / total):+.1f} %"
        yield f"{one.what} would make a step of {one.step_s:.3g} s ({gain}): {short_name(one.layout)}"
    if plan.purchases and not bought:
        yield f"more {'GPUs' if plan.hardware.device == 'cuda' else 'workers'} or memory would not help"


def _idle(plan: PlanReport, step: PlannedStep) -> str:
    idle = plan.gpus - step.layout.world_size
    return f" ({idle} idle)" if idle else ""


def _range(plan: PlanReport) -> str:
    found = plan.tokens_range()
    return "" if found is None else f"; {found[0]:,.0f} to {found[1]:,.0f} by how published clusters differ"


def run_lines(run: RunEstimate | None) -> Iterator[str]:
    """Hours and price of the whole run, where its tokens are known."""
    if run is not None:
        price = f", {run.price:,.0f} for all devices" if run.price else ""
        yield f"the run    {said_hours(run.hours)}{price}"


def cluster_lines(size: ClusterSize, device: str) -> Iterator[str]:
    """The cluster that a plan needs."""
    gib, kind = 2**30, "GPU" if device == "cuda" else "worker"
    spare = f" and {size.spares} spare" if size.spares else ""
    nodes = f"{counted(size.nodes, 'node')} of {counted(size.workers_per_node, kind)}"
    yield f"cluster    {nodes}{spare}, each with {size.cpus} CPUs"
    yield (
        f"           ({size.cpus_per_worker} a worker), {size.host_bytes / gib:,.0f} GiB of memory, of it"
        f" {size.shm_bytes / gib:,.0f} GiB in /dev/shm"
    )
    yield f"network    {size.network_s:.3g} s of a step are waited for ({100 * size.network_share:.1f} %)"
    yield (
        f"storage    {size.commit_bytes / 1e9:,.3g} GB a commit, {size.storage_bytes_day / 1e9:,.0f} GB a"
        f" day, {size.storage_held_bytes / 1e9:,.0f} GB held"
    )


def _memory_lines(plan: PlanReport) -> Iterator[str]:
    """Memory by cause, equal pipeline ranks in one line, with the formula of the state."""
    layout, job = plan.best.layout, plan.job
    seen: list[tuple[list[int], dict[str, float]]] = []
    for rank, causes in enumerate(plan.by_rank):
        if seen and seen[-1][1] == causes:
            seen[-1][0].append(rank)
        else:
            seen.append(([rank], causes))
    fullest = max(range(len(seen)), key=lambda place: seen[place][1]["total"])
    shown = range(len(seen)) if len(seen) <= MOST_RANKS else sorted({0, fullest, len(seen) - 1})
    for place in shown:
        yield f"  pp rank {_said_rank(*seen[place])}{' (the fullest)' * (len(seen) > 1 and place == fullest)}"
    others = [one for place, one in enumerate(seen) if place not in shown]
    if others:
        sizes, count = [causes["total"] for _, causes in others], sum(len(ranks) for ranks, _ in others)
        between = f"{min(sizes) / 1e9:.3g} to {max(sizes) / 1e9:.3g} GB"
        yield f"  {counted(count, 'other pp rank')} between them: {between}"
    count = parameter_count(job.model)
    said = f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M"
    yield (
        f"  {said} parameters; a rank holds 1/{layout.tp} (tp) of 1/{layout.pp} (pp) of them,"
        f" 1/{layout.shards} (ZeRO) of the state: weights, gradients and moments of 4 bytes each"
    )


def _said_rank(ranks: list[int], causes: dict[str, float]) -> str:
    stages = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    unit, _ = unit_of(causes["total"])
    parts = ", ".join(f"{name} {causes[name] / unit:.3g}" for name in CAUSES if causes[name])
    return f"{stages}: {said_bytes(causes['total'])} = {parts}"


def analysis_lines(found: Analysis) -> Iterator[str]:
    """An analysis as lines."""
    active = "" if found.active == found.parameters else f", {found.active:,} of them for a token"
    yield f"parameters  {found.parameters:,}{active}; {found.trainable:,} are trained"
    sizes = ", ".join(f"{size / 1e9:.3g} GB in {dtype}" for dtype, size in found.bytes.items())
    yield f"weights     {sizes}"
    yield f"state       {found.state_bytes / 1e9:.3g} GB of weights, gradients and moments, not sharded"
    yield f"FLOPs       {found.flops_per_token:.3g} a token, {found.flops_per_step:.3g} a step"
    yield (
        f"on {said_devices(found.gpus, found.hardware)}, one row of {found.sequence_length} tokens a"
        f" micro-batch, steps of {found.global_batch} rows, in {found.precision}:"
    )
    for zero, size in found.memory_bytes.items():
        rows = found.largest_micro_batch[zero]
        yield (
            f"  ZeRO-{zero}: {size / 1e9:8.3g} GB a rank; rows that fit: {rows['none']},"
            f" {rows['full']} with full recomputation"
        )


def validation_lines(found: Validation) -> Iterator[str]:
    """Every row with its error, by source, and the figures by which the model is judged."""
    for source, summary in found.by_source.items():
        rows = [one for one in found.predictions if one.run.source == source]
        yield f"{source} ({len(rows)} rows; counts {SOURCES[source].counts})"
        for one in rows:
            yield f"  {_row(one)}"
        mape, rank = summary["mape"], summary["rank_correlation"]
        figures = (
            []
            if mape is None
            else [f"MAPE {100 * mape:.1f} %", f"worst {100 * (summary['worst'] or 0):.1f} %"]
        )
        if summary["efficiency"] is not None:
            figures.append(f"efficiency {summary['efficiency']:.3f}")
            figures.append(f"MAPE {100 * (summary['plain_mape'] or 0):.1f} % without it")
        figures += [] if rank is None else [f"rank correlation {rank:.3f}"]
        yield f"  {summary['judged']} judged" + (f": {', '.join(figures)}" if figures else ", no prediction")
    yield (
        f"Megatron leaving one row out: MAPE {100 * found.megatron_held_out_mape:.1f} %; other sources by one"
        f" row of each: MAPE {100 * found.others_mape:.1f} %, worst {100 * found.others_worst:.1f} %; rank"
        f" correlation within a judged source {found.least_rank_correlation:.3f} or more"
    )


def memory_validation_lines(found: list[StageMemory]) -> Iterator[str]:
    """Published memory of fullest stages with its estimate, and layouts that had no room."""
    yield "memory of the fullest stage (BLOOM; four constants fitted to these rows)"
    for one in found:
        said = f"{one.published_bytes / 1e9:.0f} GB" if one.published_bytes else "out of memory"
        error = f" ({100 * one.error:+.1f} %)" if one.error is not None else ""
        verdict = "refused" if one.refused else "accepted"
        predicted = f"predicted {one.predicted_bytes / 1e9:.1f} GB{error}"
        yield f"  {one.run.name} {one.run.layout} {said}, {predicted}, {verdict}"
    figures = memory_dict(found)
    yield (
        f"  MAPE {100 * figures['memory_mape']:.1f} %, worst {100 * figures['memory_worst']:.1f} %; of"
        f" {figures['out_of_memory']} that ran out of memory {figures['out_of_memory_refused']} are refused,"
        f" of those that ran {figures['ran_and_refused']}: the planner fills 0.81 of a device at most"
    )


def _row(one: Prediction) -> str:
    run = one.run
    predicted = "not predicted: the source states too little"
    if one.predicted is not None and one.error is not None:
        predicted = f"predicted {one.predicted:.4g} ({100 * one.error:+.1f} % of the step)"
    text = f"{run.name} {run.hardware} x{run.gpus or '?'} {run.layout or ''} {run.unit} {run.figure:.4g}"
    return f"{text}, {predicted} [{one.role}]"
