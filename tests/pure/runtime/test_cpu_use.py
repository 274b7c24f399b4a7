"""A stall is excused by work that goes on, and never for ever."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.runtime.node_agent import cpu_use
from picotron_ray.runtime.node_agent.cpu_use import CpuUse


def page(pid: int, n: int = 1, since_s: float = 0.0, phase: str = "forward", spins: int = 0) -> Any:
    return SimpleNamespace(
        pid=pid, term=1, n=n, phase_since_s=since_s, phase_limit_s=2.0, phase=phase, progress=0, spins=spins
    )


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """CPU seconds by pid."""
    found: dict[int, float] = {1: 10.0, 2: 20.0, 3: 30.0}
    monkeypatch.setattr(cpu_use, "cpu_seconds", lambda pid: found[pid])
    monkeypatch.setattr(cpu_use, "runnable_seconds", lambda pid: {})
    return found


def test_what_is_not_judged_yet_excuses(used: dict[int, float]) -> None:
    use, idle = CpuUse(), page(1)
    assert use.excuses(idle, [idle], 1.0)
    use.look([idle], 1.0)
    assert use.excuses(idle, [idle], 1.0), "one look tells nothing"
    use.look([idle], 1.39)
    assert use.excuses(idle, [idle], 1.39), "too soon"
    use.look([idle], 1.41)
    assert not use.excuses(idle, [idle], 1.41)


def test_a_mate_that_computes_excuses_and_others_do_not(used: dict[int, float]) -> None:
    use, pages = CpuUse(), [page(1), page(2), page(3, n=2)]
    use.look(pages, 1.0)
    used[2] += 0.051 * 0.5
    used[3] += 0.5
    use.look(pages, 1.5)
    assert use.excuses(pages[0], pages, 1.5)
    assert not use.excuses(pages[0], [pages[0], pages[2]], 1.5), "of another generation"
    used[2] += 0.049 * 0.5
    use.look(pages, 2.0)
    assert not use.excuses(pages[0], pages, 2.0)
    used[2] += 0.5
    use.look(pages, 4.1)
    assert use.excuses(pages[0], pages, 4.1), "the last look was too long ago: judged anew"
    use.look(pages, 4.6)
    assert not use.excuses(pages[0], pages, 4.6)


def test_a_look_at_the_edge_of_what_is_recent(used: dict[int, float]) -> None:
    use, idle = CpuUse(), page(1)
    use.look([idle], 0.0)
    use.look([idle], 2.0)
    assert not use.excuses(idle, [idle], 2.0), "5 windows"
    use.look([idle], 4.01)
    assert use.excuses(idle, [idle], 4.01)


def test_a_judgement_needs_the_whole_window_and_more_than_the_least_share(used: dict[int, float]) -> None:
    use, idle = CpuUse(), page(1)
    used[1] = 0.0
    use.look([idle], 0.0)
    used[1] = 0.025
    use.look([idle], 0.5)
    assert not use.excuses(idle, [idle], 0.5), "a share of 0.05 is that of a collective's threads"
    use, used[1] = CpuUse(), 0.0
    use.look([idle], 0.0)
    use.look([idle], 0.4)
    assert not use.excuses(idle, [idle], 0.4), "0.4 s are enough"


SPIN = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True:\n    pass"
SLEEP = "import time\ntime.sleep(60)"


@pytest.fixture
def crowded_core() -> Iterator[Callable[[str, int], int]]:
    """Start Python code on a core that two nice-0 processes use up; returns its pid."""
    core = min(os.sched_getaffinity(0))
    with contextlib.ExitStack() as started:

        def begin(code: str, nice: int) -> int:
            process = subprocess.Popen([sys.executable, "-c", code, str(nice)])
            started.callback(process.wait)
            started.callback(process.kill)
            os.sched_setaffinity(process.pid, {core})
            return process.pid

        for _ in range(2):
            begin(SPIN, 0)
        yield begin


def test_a_worker_that_a_neighbour_keeps_from_its_core_is_at_work(
    crowded_core: Callable[[str, int], int],
) -> None:
    """Ray's workers have nice 15: beside others' processes they computed for weeks, and were called hung."""
    starved, stuck = page(crowded_core(SPIN, 15)), page(crowded_core(SLEEP, 15))
    time.sleep(5.0)  # both have begun: an import takes seconds there
    for one, excused in ((starved, True), (stuck, False)):
        use = CpuUse()
        began = time.monotonic()
        use.look([one], began)
        time.sleep(1.5)
        use.look([one], began + 1.5)
        assert use.excuses(one, [one], 2.0) is excused


def test_patience_ends(used: dict[int, float]) -> None:
    use, busy = CpuUse(), page(1, since_s=5.0)
    assert use.excuses(busy, [busy], 25.0)
    assert not use.excuses(busy, [busy], 25.01)


def test_a_spin_wait_for_the_device_is_no_work(used: dict[int, float]) -> None:
    """Both take a whole core; what counts on CUDA is whether anything moves. Builders and readers do work."""
    for phase, excused in (("backward", False), ("sync", False), ("build", True), ("compile", True)):
        use, spinner = CpuUse(), page(1, phase=phase, spins=1)
        use.look([spinner], 1.0)
        used[1] += 0.5
        use.look([spinner], 1.5)
        assert use.excuses(spinner, [spinner], 1.5) is excused, phase
    use, waiting, mate = CpuUse(), page(1, spins=1), page(2, spins=1)
    use.look([waiting, mate], 1.0)
    mate.progress += 1
    use.look([waiting, mate], 1.5)
    assert use.excuses(waiting, [waiting, mate], 1.5), "a mate that moves is waited for"
