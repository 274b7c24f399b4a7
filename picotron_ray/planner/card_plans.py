"""Plans of models on several numbers and kinds of cards: what each would run, hold, send and reach.

Every figure is an estimate: rates are peaks of data sheets times the shares of them that published runs
reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.planner.datasheet import (
    DATA_SHEETS,
    KERNEL_S,
    LATENCY_S,
    LINK_SHARE,
    MEMORY_SHARE,
    NODE_LINK_SHARE,
    REACHED,
)
from picotron_ray.planner.hardware import NAMES, Hardware, hardware
from picotron_ray.planner.plan import PlanReport, plan
from picotron_ray.planner.sent_bytes import AXES, sent_bytes
from picotron_ray.planner.words import short_name

BY_GB = {"40": "a100-40g", "80": "h100-80g", "141": "h200-141g", "180": "b200-180g"}
"""Cards that a memory in GB stands for."""
USUAL = "8x40,64x40,512x40,8x80,64x80,512x80,8x141,64x141,512x141"
MOST_CARDS = 1 << 17
SHARES_FROM = "shares fitted to published runs, see picotron-ray plan --validate"


class Cards(NamedTuple):
    """So many of one kind of card, eight to a node."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class CardPlan:
    """A model on some cards.

    Fields:
        layout, short_name: names of the chosen one; empty where none fits, which ``refused`` explains.
        values: of the layout, by field.
        predicted_peak_bytes: of the fullest rank, over the whole step.
        sent_bytes: of a step, by axis, of the pipeline rank that sends most over each.
        mfu: share of the data sheet's dense bf16 peak, of all cards, idle ones included; ``mfu_range`` by how
            published clusters differ.
        dry_run: of a proof with fake tensors; None: not asked for.
    """

    model: str
    cards: int
    hardware: str
    layout: str = ""
    short_name: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    idle: int = 0
    step_s: float = 0.0
    mfu: float = 0.0
    mfu_range: tuple[float, float] = (0.0, 0.0)
    predicted_peak_bytes: float = 0.0
    budget_bytes: float = 0.0
    sent_bytes: dict[str, float] = field(default_factory=dict)
    dry_run: dict[str, Any] | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "estimate": True}


def cards_of(words: str) -> list[Cards]:
    """Read numbers of cards with commas between, such as ``8x80,64xh100-80g``.

    Raises:
        ConfigError: for anything else; the line names what is expected.

    >>> cards_of("8x80,64xa100-80g")
    [Cards(number=8, name='h100-80g'), Cards(number=64, name='a100-80g')]
    """
    found = []
    for word in words.split(","):
        count, _, kind = word.strip().partition("x")
        name = BY_GB.get(kind, kind)
        if not (count.isdecimal() and 1 <= int(count) <= MOST_CARDS and name in NAMES):
            raise ConfigError(
                f"--cards: saw {word.strip() or 'nothing'}, expected a number, x, and GB of memory"
                f" ({', '.join(BY_GB)}) or a name ({', '.join(NAMES)}), such as 8x80,64xa100-80g"
            )
        found.append(Cards(int(count), name))
    return list(dict.fromkeys(found))


def card_plan(
    model: str,
    job: JobConfig,
    cards: Cards,
    prove: Callable[[PlanReport], dict[str, Any]] | None = None,
) -> CardPlan:
    """Plan a job on cards; where no layout fits, the plan says why.

    Args:
        prove: steps the chosen layout with fake tensors.
    """
    devices = hardware(cards.name, job.precision)
    try:
        found = plan(job, cards.number, devices, buys=False)
    except ConfigError as error:
        return CardPlan(model, cards.number, cards.name, refused=str(error))
    best = found.best
    mfu, (least, most) = found.mfu(best), devices.reached
    sent = [sent_bytes(found.job, best.layout, rank) for rank in range(best.layout.pp)]
    return CardPlan(
        model=model,
        cards=cards.number,
        hardware=cards.name,
        layout=str(best.layout),
        short_name=short_name(best.layout),
        values=best.layout.to_dict(),
        idle=cards.number - best.layout.world_size,
        step_s=best.cost.total_s,
        mfu=mfu,
        mfu_range=(least * mfu, most * mfu),
        predicted_peak_bytes=best.memory_bytes,
        budget_bytes=found.budget_bytes,
        sent_bytes={axis: max(each[axis] for each in sent) for axis in AXES},
        dry_run=None if prove is None else prove(found),
    )


def rates(names: Sequence[str]) -> list[dict[str, Any]]:
    """List the figures behind estimates for each kind of card: peak, share reached, and their sources."""
    return [_rates(hardware(name)) for name in dict.fromkeys(names)]


def _rates(devices: Hardware) -> dict[str, Any]:
    sheet = DATA_SHEETS[devices.name]
    peaks = {
        "matmul_flops": (sheet.flops, sheet.matmul_share),
        "attention_flops": (sheet.flops, sheet.attention_share),
        "attention_backward_flops": (sheet.flops, sheet.attention_backward_share),
        "memory_bytes_s": (sheet.memory_bytes_s, MEMORY_SHARE),
        "link_bytes_s": (sheet.link_bytes_s, LINK_SHARE),
        "node_link_bytes_s": (sheet.node_link_bytes_s, NODE_LINK_SHARE),
    }
    return {
        "hardware": devices.name,
        "memory_bytes": sheet.memory_bytes,
        "peak_source": sheet.source,
        "share_source": SHARES_FROM,
        "rates": {name: {"peak": peak, "share": share} for name, (peak, share) in peaks.items()},
        "latency_s": LATENCY_S,
        "kernel_s": KERNEL_S,
        "range": REACHED,
    }


def card_lines(plans: Sequence[CardPlan]) -> Iterator[str]:
    """Plans as lines, by model, and the rates behind them."""
    for model in dict.fromkeys(each.model for each in plans):
        yield f"{model}: estimates, no card was measured"
        for each in (one for one in plans if one.model == model):
            yield from _plan_lines(each)
    for sheet in rates([each.hardware for each in plans]):
        yield f"{sheet['hardware']}: peaks of {sheet['peak_source']}; {SHARES_FROM}"
        yield "  " + ", ".join(
            f"{name} {rate['share']:.2f} of {rate['peak']:.4g}" for name, rate in sheet["rates"].items()
        )


def _plan_lines(one: CardPlan) -> Iterator[str]:
    where = f"  {one.cards:>4} x {one.hardware:9}"
    if one.refused:
        yield f"{where}  none: {one.refused}"
        return
    idle = f" ({one.idle} idle)" if one.idle else ""
    low, high = one.mfu_range
    sent = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in one.sent_bytes.items() if size)
    yield (
        f"{where}  {one.short_name}{idle}: {one.predicted_peak_bytes / 1e9:.3g} GB of"
        f" {one.budget_bytes / 1e9:.3g}, step {one.step_s:.3g} s, MFU about {100 * one.mfu:.0f} %"
        f" ({100 * low:.0f} to {100 * high:.0f})"
    )
    yield f"{'':20}sent in a step and by a rank: {sent or 'nothing'}"
    if one.dry_run is not None:
        proof = one.dry_run
        yield f"{'':20}dry run of {proof['micro_batches']} of {proof['of_micro_batches']} micro-batches:"
        for rank in proof["ranks"]:
            yield (
                f"{'':22}pp rank {rank['rank']}: {rank['predicted_peak'] / 1e9:.3g} GB predicted /"
                f" {rank['traced_peak'] / 1e9:.3g} GB traced = {1 + rank['error']:.3f}"
            )
