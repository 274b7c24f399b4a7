"""A ledger is checked by intervals: they count what counting one by one finds, in little memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.data.ledger import check
from picotron_ray.data.plan.sample_plan import UniformPlan

BATCH = 6
DIGEST = "0" * 32


def line(step: int, n: int, rows: list[tuple[int, int]], skipped: bool = False) -> dict[str, Any]:
    base = (step - 1) * BATCH
    return {
        "step": step,
        "term": 1,
        "n": n,
        "samples": [base, base + BATCH],
        "rows": [[base + first, base + last, DIGEST] for first, last in rows],
        "tokens": BATCH,
        **({"skipped": "non-finite"} if skipped else {}),
    }


CUT = st.sampled_from([[(0, 3), (3, 6)], [(0, 6)], [(0, 2), (2, 4), (4, 6)]])  # how right runs cut a step
WRONG = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda ends: (min(ends), max(ends))))
LINES = st.lists(
    st.builds(
        line,
        step=st.integers(1, 12),
        n=st.integers(1, 3),
        rows=CUT | WRONG,
        skipped=st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(
    lines=LINES,
    resumes=st.lists(st.tuples(st.just(1), st.integers(1, 3), st.integers(0, 12)), max_size=2),
    last_step=st.none() | st.integers(0, 13),
)
def test_intervals_count_what_counting_one_by_one_finds(
    lines: list[dict[str, Any]], resumes: list[tuple[int, int, int]], last_step: int | None
) -> None:
    valid = [
        each
        for each in lines
        if not any((1, each["n"]) < (term, n) and each["step"] > step for term, n, step in resumes)
    ]
    steps = max((each["step"] for each in valid), default=0) if last_step is None else last_step
    inside = [each for each in valid if each["step"] <= steps]
    fed = Counter(
        number for each in inside for first, last, _ in each["rows"] for number in range(first, last)
    )
    report = check(iter(lines), UniformPlan(0, BATCH, 0), None, resumes, last_step)
    assert (report.steps, report.samples, report.void) == (steps, len(fed), len(lines) - len(valid))
    assert (report.lost, report.repeated) == (steps * BATCH - len(fed), fed.total() - len(fed))
    assert report.skipped == BATCH * len({each["step"] for each in inside if "skipped" in each})

    of_step = {step: [each["n"] for each in inside if each["step"] == step] for step in range(1, steps + 1)}
    several = [
        f"step {step} was fed {len(ns)} times, by generations {', '.join(f'1.{n}' for n in ns)}"
        for step, ns in of_step.items()
        if len(ns) > 1
    ]
    assert [text for text in report.wrong if "was fed" in text] == several
    missing: set[int] = set()
    for text in (text for text in report.wrong if text.startswith("no line")):
        first, *last = (int(word) for word in text.split() if word.isdigit())
        missing |= set(range(first, (last[0] if last else first) + 1))
    assert missing == {step for step, ns in of_step.items() if not ns}
    beyond = {each["step"] for each in valid if each["step"] > steps}
    assert sum("lies beyond the last step" in text for text in report.wrong) == len(beyond)
    assert len(report.wrong) == len(several) + len(beyond) + sum("no line" in text for text in report.wrong)


def long_ledger(steps: int, batch: int, one_in: int) -> Iterator[dict[str, Any]]:
    """Lines of a long run, of which one in so many is missing, repeated or skipped in turn."""
    for step in range(1, steps + 1):
        base = (step - 1) * batch
        rows = [[base + batch * at // 8, base + batch * (at + 1) // 8, DIGEST] for at in range(8)]
        each = {"step": step, "term": 1, "n": 1, "samples": [base, base + batch], "rows": rows, "tokens": 9}
        kind = step // one_in % 3 if step % one_in == 0 else -1
        if kind == 0:
            continue
        yield {**each, "skipped": "spike"} if kind == 1 else each
        if kind == 2:
            yield each


def peak_bytes(steps: int, batch: int) -> int:
    tracemalloc.start()
    try:
        report = check(
            long_ledger(steps, batch, steps // 12), UniformPlan(0, batch, 0), None, last_step=steps
        )
        assert (report.lost, report.repeated, report.skipped) == (batch * 4, batch * 4, batch * 4)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("batch", [8, 4096])
def test_memory_grows_with_what_is_wrong_and_not_with_the_run(batch: int) -> None:
    # the least of two: what another thread of the process takes meanwhile is counted, too
    short, long = (min(peak_bytes(steps, batch) for _ in range(2)) for steps in (240, 1920))
    assert long < short + 200_000, "it took 3 MB more, or 58"
