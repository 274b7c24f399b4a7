"""Ledger line, read with distrust: it may have been cut, edited or damaged.

A line does not grow with the run: of more than ``MOST_ROWS`` replicas, neighbours share a row, whose digest
is that of their digests. Where they are not fed evenly, such a row also says how many rows each has, as runs
``[rows, replicas]`` of equal ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import xxhash

_HEX = re.compile(r"[0-9a-f]{32}")
MOST_ROWS = 16
MOST_REPLICAS = 1 << 20
Row = tuple[int, int, str, int, tuple[int, ...]]


def shared_digest(digests: Sequence[bytes]) -> bytes:
    """Digest of 16 bytes over the token digests of neighbouring replicas; of a single one its own."""
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))


def line_rows(replicas: Sequence[tuple[int, int, str]]) -> list[list[Any]]:
    """Rows of a line: at most ``MOST_ROWS``, whatever the number of replicas.

    Args:
        replicas: (first, last, digest in hex) of each DP replica, in order.

    >>> line_rows([(0, 2, "00" * 16), (2, 4, "11" * 16)])[1][:2]
    [2, 4]
    >>> [row[3] for row in line_rows([(at, at + 1, "00" * 16) for at in range(40)])][-2:]
    [3, 1]
    >>> line_rows([(max(0, at - 1), at, "00" * 16) for at in range(40)])[0][3:]
    [3, [[0, 1], [1, 2]]]
    """
    size = -(-len(replicas) // MOST_ROWS)
    runs = size > 1 and not _even([last - first for first, last, _ in replicas])
    rows: list[list[Any]] = []
    for at in range(0, len(replicas), size):
        group = replicas[at : at + size]
        digest = shared_digest([bytes.fromhex(each) for _, _, each in group]).hex()
        rows.append([group[0][0], group[-1][1], digest, *([len(group)] if size > 1 else [])])
        if runs:
            equal = groupby(last - first for first, last, _ in group)
            rows[-1].append([[count, len(list(same))] for count, same in equal])
    return rows


def _even(counts: Sequence[int]) -> bool:
    """Whether this is how `Layout.rows` splits a batch without ``replica_rows``."""
    share, extra = divmod(sum(counts), len(counts))
    return all(count == share + (index < extra) for index, count in enumerate(counts))


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Ledger line as the check needs it.

    ``rows``: (first, last, digest, replicas, rows of each) per DP replica, or per group of neighbours; no
    rows of each: an even split.
    """

    step: int
    generation: tuple[int, int]
    samples: tuple[int, int]
    rows: tuple[Row, ...]
    tokens: int
    skipped: bool = False  # the update was left out
    passed_over: bool = False  # a rewind passed over the samples: none was fed
    unproven: bool = False  # the step's own line was lost before it was committed
    loss: float | None = None
    stages: tuple[int, ...] | None = None  # steps before the stages begun, of a curriculum that decides them
    windows: Mapping[str, Any] | None = None  # `StageRecord` before the step, where a window had just ended

    @property
    def name(self) -> str:
        return f"step {self.step} of generation {self.generation[0]}.{self.generation[1]}"


def parse_line(raw: str | Mapping[str, Any], at: int, wrong: list[str]) -> LedgerLine | None:
    """Parse one line; None and a finding where it is no valid ledger line."""
    try:
        record = json.loads(raw) if isinstance(raw, str) else raw
        return LedgerLine(
            step=_whole(record["step"], 1),
            generation=(_whole(record["term"]), _whole(record["n"])),
            samples=(_whole(record["samples"][0]), _whole(record["samples"][1])),
            rows=tuple(
                (_whole(first), _whole(last), _digest(hexes), *_replicas(*replicas))
                for first, last, hexes, *replicas in record["rows"]
            ),
            tokens=_whole(record["tokens"]),
            skipped=bool(record.get("skipped", "")),
            passed_over=bool(record.get("passed_over", False)),
            unproven=bool(record.get("unproven", False)),
            loss=_loss(record.get("loss")),
            stages=tuple(map(_whole, record["stages"])) if "stages" in record else None,
            windows=_windows(record.get("windows")),
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        wrong.append(f"line {at} is not a ledger line ({type(error).__name__}: {error})")
        return None


def _whole(value: Any, least: int = 0, most: int = (1 << 62) - 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"expected a whole number of at least {least}, saw {value!r}")
    return value


def _loss(value: Any) -> float | None:
    if value is not None and (not isinstance(value, (int, float)) or isinstance(value, bool)):
        raise ValueError(f"expected a loss, saw {value!r}")
    return value


def _windows(value: Any) -> Mapping[str, Any] | None:
    if value is None:
        return None
    starts, means = tuple(map(_whole, value["starts"])), [_loss(mean) for mean in value["means"]]
    if not starts or None in means or value["count"] != 0:
        raise ValueError(f"expected the record of a curriculum's windows, saw {value!r}")
    return {"at": _whole(value["at"]), "starts": starts, "sum": 0.0, "count": 0, "means": means}


def _replicas(value: Any = 1, runs: Any = ()) -> tuple[int, tuple[int, ...]]:
    """Number of replicas, and the rows of each."""
    count = _whole(value, least=1, most=MOST_REPLICAS)
    found: list[int] = []
    for rows, times in runs:
        found += [_whole(rows)] * _whole(times, least=1, most=count - len(found))
    if runs and len(found) != count:
        raise ValueError(f"expected rows of {count} replicas, saw those of {len(found)}")
    return count, tuple(found)


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"expected 32 hex digits, saw {value!r}")
    return value
