"""Which blocks forget their activations and compute them again in the backward pass. Torch-free.

A policy is a word, so that a layout stays a value: ``none``; ``full``: every block keeps its input alone;
``selective``: every block keeps what matrix products and attention gave and recomputes the cheap rest
(Korthikanti et al. 2022); ``every-N``: every N-th block in full; ``middle-P``: P percent of the blocks in
full, from the middle of the stage; ``blocks-K``: the first K blocks of every stage, what the planner's memory
budget comes to. Every rank of a stage derives the same blocks from it.
"""

from __future__ import annotations

import re
from typing import Literal

PATTERN = r"^(none|full|selective|every-[1-9][0-9]*|middle-(100|[1-9]?[0-9])|blocks-(0|[1-9][0-9]*))$"
Kind = Literal["kept", "full", "selective"]


def recomputed(policy: str, depth: int) -> tuple[Kind, ...]:
    """What becomes of each of the ``depth`` blocks of a stage, in order.

    Raises ValueError for a word that is no policy.
    """
    if not re.match(PATTERN, policy):
        raise ValueError(f"recompute: saw {policy!r}, expected a policy as config.recompute describes")
    if policy in ("full", "selective"):
        kind: Kind = "full" if policy == "full" else "selective"
        return (kind,) * depth
    word, _, number = policy.partition("-")
    if word == "every":
        chosen = set(range(int(number) - 1, depth, int(number)))
    elif word == "middle":
        count = round(depth * int(number) / 100)
        first = (depth - count) // 2
        chosen = set(range(first, first + count))
    else:  # none is blocks-0
        chosen = set(range(min(depth, int(number or 0))))
    return tuple("full" if block in chosen else "kept" for block in range(depth))
