"""A kill for want of memory is told from any other by the kernel's own count."""

from __future__ import annotations

from picotron_ray.runtime.node_agent.oom_watch import SAME_S, OomWatch


class Kernel:
    """Count of kills, and the time."""

    kills, now = 5, 100.0


def watch(kernel: Kernel) -> OomWatch:
    return OomWatch(lambda: kernel.kills, lambda: kernel.now)


def test_a_kill_from_before_explains_nothing() -> None:
    assert watch(Kernel()).cause() == "process gone"


def test_a_count_that_has_just_risen_explains_all_that_go_now() -> None:
    kernel = Kernel()
    here = watch(kernel)
    kernel.kills += 1
    assert here.cause() == "oom: killed by the kernel for want of memory"
    kernel.now += SAME_S / 2
    assert here.cause().startswith("oom"), "its control group was killed as a whole"
    kernel.now += SAME_S
    assert here.cause() == "process gone"


def test_another_process_that_was_killed_a_while_ago_explains_nothing() -> None:
    kernel = Kernel()
    here = watch(kernel)
    kernel.kills += 1
    here.look()
    kernel.now += 10 * SAME_S
    assert here.cause() == "process gone"
    kernel.kills = 0  # another control group, as after a move: no rise
    assert here.cause() == "process gone"
