"""Recomputation policies: what each block does with its activations until the backward pass. Torch-free.

A policy is a string, so that a layout stays a value: one word for every pipeline stage, or a word per stage,
in their order, with commas between. Words:

- ``none``; ``full``: every block keeps its input alone; ``selective``: every block keeps what matrix products
  and attention gave and computes the cheap rest again (Korthikanti et al. 2022);
- ``every-N``: every N-th block in full; ``middle-P``: P percent of the blocks in full, from the middle;
- ``blocks-K``: the first K blocks in full; ``blocks-K-S``: the first K in full and the next S selectively;
- ``int8``: every block computes nothing again, but keeps its activations in 8 bits; ``blocks-K-S-Q``: as
  ``blocks-K-S``, and the next Q in 8 bits. Gradients are no longer exact, so only a job asks for it.

``blocks-K-S`` can say whatever a memory budget asks for, because the blocks of a stage are alike and only
their numbers count (``planner.recompute_search``). Every rank of a stage derives the same blocks from a
policy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

_NUMBER = "(0|[1-9][0-9]*)"
_WORD = f"(none|full|selective|every-[1-9][0-9]*|middle-(100|[1-9]?[0-9])|blocks-{_NUMBER}(-{_NUMBER})?)"
_EACH = f"({_WORD}|int8|blocks-{_NUMBER}-{_NUMBER}-{_NUMBER})"
EXACT_PATTERN = f"^{_WORD}(,{_WORD})*$"
PATTERN = f"^{_EACH}(,{_EACH})*$"
RecomputeKind = Literal["kept", "full", "selective", "int8"]
ORDER: tuple[RecomputeKind, ...] = ("full", "selective", "int8", "kept")
"""Of the blocks of a stage, by ``blocks-K-S-Q``."""


class RecomputedBlocks(NamedTuple):
    """Numbers of blocks computed again in full and selectively, of all blocks, and of those in 8 bits.

    Fields:
        in_order: whether they stand in each stage as in `ORDER`.
    """

    full: int
    selective: int
    depth: int
    int8: int = 0
    in_order: bool = True

    @property
    def repeated(self) -> int:
        return self.full + self.selective

    @property
    def kept(self) -> int:
        return self.depth - self.repeated - self.int8

    @classmethod
    def of(cls, kinds: Sequence[RecomputeKind]) -> RecomputedBlocks:
        """Count the blocks of each kind of one stage."""
        in_order = list(kinds) == sorted(kinds, key=ORDER.index)
        return cls(kinds.count("full"), kinds.count("selective"), len(kinds), kinds.count("int8"), in_order)

    @classmethod
    def of_stages(cls, stages: Iterable[RecomputedBlocks]) -> RecomputedBlocks:
        """Sum those of a rank's stages."""
        full, selective, depth, int8, in_order = zip(*stages, strict=True)
        return cls(sum(full), sum(selective), sum(depth), sum(int8), all(in_order))


@lru_cache(maxsize=64)
def stage_words(policy: str) -> tuple[str, ...]:
    """The words of a policy: one for all stages, or one per stage.

    Raises ValueError for a string that is no policy.
    """
    if not re.match(PATTERN, policy):
        raise ValueError(f"recompute: saw {policy!r}, expected a policy as layout.recompute_policy describes")
    return tuple(policy.split(","))


def is_selective(policy: str) -> bool:
    """Whether a policy keeps the products of any block's forward pass. Raises ValueError as `stage_words`."""
    return any(_counts(word)[1] if "blocks" in word else word == "selective" for word in stage_words(policy))


def is_quantized(policy: str) -> bool:
    """Whether a policy keeps any block's activations in 8 bits. Raises ValueError as `stage_words`."""
    return any(_counts(word)[2] if "blocks" in word else word == "int8" for word in stage_words(policy))


def _counts(word: str) -> tuple[int, int, int]:
    """Blocks in full, selectively and in 8 bits of a word ``blocks-...``."""
    full, selective, int8 = (int(number) for number in (*word.split("-")[1:], "0", "0")[:3])
    return full, selective, int8


def recomputed(policy: str, depth: int, stage: int = 0) -> tuple[RecomputeKind, ...]:
    """The treatment of each of the ``depth`` blocks of a stage, in order.

    >>> recomputed("every-2", depth=4)
    ('kept', 'full', 'kept', 'full')

    Raises ValueError for a string that is no policy, or a list that has no such stage.
    """
    words = stage_words(policy)
    if len(words) > 1 and stage >= len(words):
        raise ValueError(
            f"recompute: saw a list of {len(words)} stages, expected one with a stage {stage + 1}"
        )
    whole = words[stage if len(words) > 1 else 0]
    word, *numbers = whole.split("-")
    full: Sequence[int] = range(0)
    selective: Sequence[int] = range(depth if word == "selective" else 0)
    int8: Sequence[int] = range(depth if word == "int8" else 0)
    if word == "full":
        full = range(depth)
    elif word == "blocks":
        first, after, packed = _counts(whole)
        full, selective = range(first), range(first, first + after)
        int8 = range(first + after, first + after + packed)
    elif word == "every":
        full = range(int(numbers[0]) - 1, depth, int(numbers[0]))
    elif word == "middle":
        count = round(depth * int(numbers[0]) / 100)
        full = range((depth - count) // 2, (depth - count) // 2 + count)
    kinds: dict[RecomputeKind, Sequence[int]] = {"full": full, "selective": selective, "int8": int8}
    return tuple(
        next((kind for kind, blocks in kinds.items() if block in blocks), "kept") for block in range(depth)
    )


def policy_of(stages: Sequence[RecomputedBlocks]) -> str:
    """The shortest policy that recomputes as many blocks of every stage as ``stages`` says."""
    words = [_word(again) for again in stages]
    return words[0] if len(set(words)) == 1 else ",".join(words)


def _word(again: RecomputedBlocks) -> str:
    words = {"none": again.kept, "full": again.full, "selective": again.selective, "int8": again.int8}
    for word, count in words.items():
        if count == again.depth:
            return word
    numbers = [again.full, again.selective, again.int8]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return "-".join(["blocks", *map(str, numbers)])
