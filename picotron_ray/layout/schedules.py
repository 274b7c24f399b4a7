"""Pipeline schedules: what each asks of a layout, and what it costs. Torch-free.

Sources: GPipe (Huang et al. 2019: afab), 1F1B and interleaved 1F1B (Narayanan et al. 2021), looped BFS
(Lamy-Poirier 2023), zero bubble: interleaved ZB1P and ZBV (Qi et al. 2024), DualPipeV (DeepSeek-AI 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from picotron_ray.layout.schedule_actions import Action, Rows, action_list

Schedule = Literal[
    "afab", "1f1b", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev", "custom"
]
Placement = Literal["loop", "v", "list"]
Need = Callable[[int, int], str]
"""(micro-batches, stages per pipeline rank x ranks) -> what is wrong, or an empty string."""


def _any(micro_batches: int, stages: int) -> str:
    return ""


def _one_per_stage(micro_batches: int, stages: int) -> str:
    return "" if micro_batches >= stages else f"needs one micro-batch per stage, {stages} or more"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a schedule asks and costs.

    Fields:
        virtual: least and most stages per rank.
        placement: ``loop``: rank r has stages r, r + pp, ...; ``v``: the second half runs back, so that rank
            0 has the first and the last; ``list``: as the list of actions says.
        rounds: whether micro-batches must divide into rounds of as many as there are ranks, or a little more.
        need: further demand on (micro-batches, stages).
        splits: whether backward is split into gradients of inputs and of weights. Under ZeRO-3 torch then
            gives wrong gradients without a word (weights are resharded between the two).
        bubble: share of (pp - 1) x (forward and backward of one micro-batch on a rank) that is waited; with
            a loop, stages per rank divide it.
    """

    virtual: tuple[int, int]
    placement: Placement = "loop"
    rounds: bool = False
    need: Need = _any
    splits: bool = False
    bubble: float = 1.0


MANY = 1 << 16
# all but custom, whose rules are its list's (rules_of)
RULES: dict[Schedule, Rules] = {
    "afab": Rules((1, 1)),
    "1f1b": Rules((1, 1), need=_one_per_stage),
    "looped-bfs": Rules((2, MANY)),
    "interleaved-1f1b": Rules((2, MANY), rounds=True),
    # of forward, input gradient and weight gradient the last fills the wait
    "interleaved-zero-bubble": Rules((2, MANY), rounds=True, splits=True, bubble=1 / 3),
    "zbv": Rules((2, 2), "v", splits=True, bubble=1 / 3),
    "dualpipev": Rules((2, 2), "v", need=_one_per_stage, splits=True, bubble=1 / 3),
}


def rules_of(schedule: Schedule, actions: tuple[str, ...] = ()) -> Rules:
    """The rules of a schedule; of ``custom``, what its list (``layout.actions``) comes to.

    Raises ConfigError where that list cannot run.
    """
    if schedule != "custom":
        return RULES[schedule]
    listed = action_list(actions)
    virtual, count = len(listed.placement[0]), listed.micro_batches

    def exactly(micro_batches: int, stages: int) -> str:
        return "" if micro_batches == count else f"needs {count}, as many as layout.actions has"

    bubble = listed.waits / (len(listed.rows) - 1)
    return Rules((virtual, virtual), "list", need=exactly, splits=listed.splits, bubble=bubble)


def schedule_problem(rules: Rules, pp: int, virtual: int, micro_batches: int) -> str:
    """Why ``micro_batches`` cannot run under a schedule, in words; empty where they can."""
    rounds = max(1, micro_batches // pp)
    if rules.rounds and micro_batches % rounds:
        return f"needs a multiple of {rounds} micro-batches ({pp} or a little more per round)"
    return rules.need(micro_batches, pp * virtual)


def rank_stages(schedule: Schedule, pp: int, virtual: int, rank: int) -> tuple[int, ...]:
    """The stages of one pipeline rank, ascending."""
    if virtual > 1 and RULES[schedule].placement == "v":
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * virtual, pp))


def last_stage_rank(schedule: Schedule, pp: int, virtual: int) -> int:
    """The pipeline rank that has the last stage."""
    return 0 if virtual > 1 and RULES[schedule].placement == "v" else pp - 1


def waits(rules: Rules, pp: int, virtual: int) -> float:
    """Micro-batches' worth of time that the pipeline takes to fill and drain."""
    return (pp - 1) * rules.bubble / (virtual if rules.placement == "loop" else 1)


def in_flight(schedule: Schedule, pp: int, virtual: int, rank: int, micro_batches: int) -> float:
    """Micro-batches whose activations a rank keeps at most, of all its layers together; not of ``custom``.

    Of the papers above: 1F1B keeps one per rank that follows, interleaving adds (pp - 1) / (pp x virtual) of
    pp, zero-bubble schedules and DualPipeV keep pp and pp + 1/2.
    """
    most = {
        "afab": micro_batches,
        "looped-bfs": micro_batches,
        "1f1b": pp - rank,
        "interleaved-1f1b": pp + (pp - 1) / virtual,
        "interleaved-zero-bubble": pp + (pp - 1) / virtual,
        "zbv": pp,
        "dualpipev": pp + 0.5,
    }[schedule]
    return min(micro_batches, most)


def one_stage_rows(schedule: str, pp: int, micro_batches: int) -> Rows:
    """What every rank computes, in order.

    Args:
        schedule: ``afab``, all forward and then all backward passes (Huang et al. 2019, GPipe); or ``1f1b``
            (Narayanan et al. 2021, PipeDream-Flush): as many forward passes ahead as there are stages behind,
            then one of each in turn.
    """
    return tuple(
        _row(stage, micro_batches if schedule == "afab" else pp - 1 - stage, micro_batches)
        for stage in range(pp)
    )


def _row(stage: int, ahead: int, micro_batches: int) -> tuple[Action, ...]:
    ahead = min(ahead, micro_batches)
    row = [Action(stage, "F", number) for number in range(ahead)]
    for number in range(micro_batches):
        if ahead + number < micro_batches:
            row.append(Action(stage, "F", ahead + number))
        row.append(Action(stage, "B", number))
    return tuple(row)
