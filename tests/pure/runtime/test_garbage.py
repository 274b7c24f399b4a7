"""What is set apart from garbage collection; in processes of their own, as it changes the collector."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_lives_is_set_apart_and_garbage_is_not() -> None:
    run("""
import gc, weakref
from picotron_ray.runtime.garbage import set_apart
class Part:
    pass
gc.collect()
made_since = Part()
made_since.itself, gone = made_since, weakref.ref(made_since)
del made_since
before = len(gc.get_objects())
set_apart()
assert gone() is None
assert len(gc.get_objects()) < before / 10, (len(gc.get_objects()), before)
""")


def test_what_was_set_apart_is_not_looked_at_again_and_is_freed_with_its_last_reference() -> None:
    """A look at all that a coordinator knows takes longer than a loss may take to be decided."""
    run("""
import gc, time, weakref
from picotron_ray.runtime.garbage import set_apart
class Known(list):
    pass
def took_s():
    began_s = time.thread_time()
    set_apart()
    return time.thread_time() - began_s
gc.disable()
known = Known([at] for at in range(500_000))
gone, first_s = weakref.ref(known), took_s()
new = [[at] for at in range(1000)]
again_s = min(took_s() for _ in range(3))
assert again_s < first_s / 10, (again_s, first_s)
del known
assert gone() is None
""")


def test_what_became_garbage_after_it_was_set_apart_goes_when_all_is_looked_at_anew() -> None:
    """Else a coordinator grows with every generation that it knew."""
    run("""
import weakref
from picotron_ray.runtime.garbage import set_apart
class Part:
    pass
part = Part()
part.itself, gone = part, weakref.ref(part)
set_apart()
del part
set_apart()
assert gone() is not None
set_apart(anew=True)
assert gone() is None
""")


def test_a_launch_of_thousands_is_no_reason_to_look_at_everything() -> None:
    """A loss that is told meanwhile would wait for it."""
    run("""
import gc
from picotron_ray.runtime.garbage import RareCollection
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]) if phase == "start" else None)
rare = RareCollection(lambda: 0.0)
rare.begin()
seen.clear()
known = [[at] for at in range(1_000_000)]
assert 1 in seen and 2 not in seen, seen
rare.calm()
assert 2 not in seen, seen
assert len(gc.get_objects()) < 1000, len(gc.get_objects())
""")


def test_a_cycle_that_became_garbage_after_it_was_set_apart_goes_within_the_hour() -> None:
    run("""
import weakref
from picotron_ray.runtime.garbage import LOOK_EVERY_S, RareCollection
class Part:
    pass
now_s = [0.0]
rare = RareCollection(lambda: now_s[0])
rare.begin()
part = Part()
part.itself, gone = part, weakref.ref(part)
rare.calm()
del part
now_s[0] = LOOK_EVERY_S - 1.0
rare.calm()
assert gone() is not None
now_s[0] = LOOK_EVERY_S
rare.calm()
assert gone() is None
""")
