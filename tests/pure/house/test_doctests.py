"""Examples in docstrings of the torch-free packages run as they are written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("layout", "config", "planner", "coordinator", "errors")
MUST_HAVE = {  # public entry points that a newcomer meets first
    "picotron_ray.layout.layout.Layout",
    "picotron_ray.layout.layout.current_names",
    "picotron_ray.layout.schedules.schedule_of",
    "picotron_ray.planner.search.choose_layout",
    "picotron_ray.planner.search.layouts",
}


def torch_free_modules() -> list[str]:
    found = []
    for name in PACKAGES:
        module = importlib.import_module(f"picotron_ray.{name}")
        found.append(module.__name__)
        if hasattr(module, "__path__"):
            found += [info.name for info in pkgutil.walk_packages(module.__path__, f"{module.__name__}.")]
    return found


def examples(module: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


WITH_EXAMPLES = {test.name: test for module in torch_free_modules() for test in examples(module)}


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES))
def test_examples_give_what_they_say(name: str) -> None:
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(WITH_EXAMPLES[name], out=output.append)
    assert runner.failures == 0, "".join(output)


def test_entry_points_have_an_example() -> None:
    assert set(WITH_EXAMPLES) >= MUST_HAVE
