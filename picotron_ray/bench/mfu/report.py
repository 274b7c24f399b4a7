"""Report of ``bench mfu``, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from picotron_ray.bench.common.report import machine_line

NAME, LOOP = 54, 20


def lines(found: Mapping[str, Any]) -> list[str]:
    """Rates, MFU with its formula, the breakdown, and a table each of switches and peers."""
    return [*_base(found), *_utilisation(found), *_breakdown(found), *_loop(found), *_compared(found)]


def _base(found: Mapping[str, Any]) -> Iterator[str]:
    job = found["job"]
    yield (
        f"{found['formula']['parameters']:,} parameters, {job['precision']}, global batch"
        f" {job['global_batch']} x {job['sequence_length']:,} tokens, {job['layout']},"
        f" {job['attention']} attention, {job['norms']} norms"
    )
    if job["applied"]:
        yield f"computes with {'; '.join(job['applied'])}"
    yield f"{job['workers']} {_plural('worker', job['workers'])} of {job['device']} {machine_line(found)}"
    rate, step, rounds = found["tokens_per_s"], found["step_s"], found["options"]["rounds"]
    yield (
        f"tokens/s      {rate['median']:,.0f}  ({rate['low']:,.0f} to {rate['high']:,.0f} over {rounds}"
        f" {_plural('round', rounds)}), all workers together"
    )
    yield (
        f"step          {1e3 * step['median']:.4g} ms  ({1e3 * step['low']:.4g} to {1e3 * step['high']:.4g}"
        f" over {found['steps']} steps)"
    )
    yield f"peak memory   {_gib(found)}, {_memory_kind(found)}"
    if found.get("memory"):
        classes = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in found["memory"]["by_class"].items())
        yield f"of a step     {found['memory']['peak_bytes'] / 1e6:,.1f} MB of tensors at the peak: {classes}"
    if found.get("sent_bytes"):
        yield f"sent          {_sent(found)} a step, by the rank that sends most"


def _utilisation(found: Mapping[str, Any]) -> Iterator[str]:
    formula, peak = found["formula"], found["peak"]
    yield (
        f"MFU           {100 * found['mfu']:.1f} %  = tokens/s x FLOP per token"
        f" / ({found['job']['workers']} x peak FLOP/s)"
    )
    yield f"  FLOP/token  {formula['flops_per_token']:.4g} = {formula['words']}"
    yield "              (6N + 12 L h s; attention counted in full, not halved for the causal mask)"
    yield f"  peak        {peak['flops_per_s'] / 1e12:.4g} TFLOP/s per worker, {peak['source']}"


def _breakdown(found: Mapping[str, Any]) -> Iterator[str]:
    split = found["breakdown"]
    yield (
        f"step by phase (a pass of its own that waits for the device at each; rank {split['rank']}, which"
        " computes most)"
    )
    for name, phase in split["phases"].items():
        note = NOTES.get(name, "")
        yield f"  {name:12}{1e3 * phase['s']:10.3f} ms {100 * phase['share']:5.1f} %  {note}".rstrip()


def _loop(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["loop"]:
        return
    tokens = found["job"]["global_batch"] * found["job"]["sequence_length"]
    yield "mean step of the base, and by the loop of workers; over the base's within a round:"
    yield f"  {'bare':{LOOP}}{1e3 * tokens / found['tokens_per_s']['median']:10.4g} ms"
    for name, way in found["loop"].items():
        over, more = way["over_base"], ""
        if way["snapshots"]:
            more = f"  one each {way['interval_steps']:.3g} steps, {way['snapshot_s']:.3g} s beside them"
            if again := way["over_exchange"]:
                more += f"; x {again['median']:.3f} of those without"
        yield (
            f"  {name:{LOOP}}{1e3 * tokens / way['tokens_per_s']['median']:10.4g} ms  x {over['median']:.3f}"
            f"  ({over['low']:.3f} to {over['high']:.3f}){more}"
        )


NOTES = {
    "data": "loader, and copy to the device",
    "bubble": "waits for other pipeline stages, measured",
    "reduce": "exposed communication; tp, cp and ZeRO communicate inside forward and backward",
}


def _compared(found: Mapping[str, Any]) -> Iterator[str]:
    titles = {
        "ablation": "one switch at a time, tokens/s over the base's within a round; memory, and a step's"
        " tensors over the base's; bytes sent",
        "peers": "the base's tokens/s over the peer's within a round",
    }
    for part, title in titles.items():
        if found[part]:
            yield f"{title}:"
        for name, one in found[part].items():
            ratio = one["ratio"]
            yield (
                f"  {name:{NAME}}{ratio['median']:.3f}  ({ratio['low']:.3f} to {ratio['high']:.3f})"
                f"  {one['tokens_per_s']['median']:12,.0f} tokens/s  {_gib(one)}  {_share(one)}{_sent(one)}"
                f"  {_over_base(one)}".rstrip()
            )
    for name, reason in found["refused"].items():
        yield f"  {name:{NAME}}refused: {reason}"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _gib(one: Mapping[str, Any]) -> str:
    return f"{one['peak_bytes'] / 2**30:.3f} GiB"


def _sent(one: Mapping[str, Any]) -> str:
    """Megabytes sent a step; nothing where they are not counted."""
    return "" if one.get("sent_bytes") is None else f"{one['sent_bytes'] / 1e6:.2f} MB"


def _share(one: Mapping[str, Any]) -> str:
    """Peak of a step's tensors over the base's; nothing where it is not known."""
    return "" if one.get("memory_ratio") is None else f"x {one['memory_ratio']:.2f}  "


def _over_base(one: Mapping[str, Any]) -> str:
    """Loss towards the end, and how far it, bytes and memory are from the base's; nothing of a peer."""
    names = {"loss": "loss", "sent_bytes": "bytes", "peak_bytes": "memory"}
    told = [f"{names[name]} {100 * (ratio - 1):+.1f} %" for name, ratio in one.get("over_base", {}).items()]
    return ", ".join(told)


def _memory_kind(found: Mapping[str, Any]) -> str:
    if found["job"]["device"] == "cpu":
        return "resident memory (peak RSS) of the largest process"
    return "CUDA memory allocated on the fullest worker"
