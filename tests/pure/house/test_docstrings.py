"""Docstrings open with a noun or a verb, and public entry points carry an example that holds.

Examples of commands are parsed by tests/pure/cli/test_examples.py.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("picotron_ray", "tuning")
OPENINGS = re.compile(r"\W*(What|Which|How|Where)\b")
EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)
YAML = re.compile(r"Example::\n\n((?:[ \t]+.*\n?|\n)+)")
NO_EXAMPLE = {BuiltModel}  # filled in by launch, and refused in a config
ENTRY_POINTS = (
    "launch:main",
    "runtime.ray_train.trainer:ElasticTrainer",
    "parallel.parallelize:parallelize",
    "layout.layout:Layout",
    "checkpoint.storage.open:open_storage",
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def odd_openings(source: str) -> list[tuple[int, str]]:
    """Line and first line of docstrings that open with What, Which, How or Where."""
    return [(line, text.splitlines()[0]) for line, text in docstrings(source) if OPENINGS.match(text)]


def test_no_docstring_opens_with_a_question() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 200
    found = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in files
        for line, first in odd_openings(path.read_text())
    ]
    assert not found, "\n".join([f"{len(found)} docstrings", *found])


@pytest.mark.parametrize("first", ["What it is.", "``Which`` one.", "How: so.", "Where\n\nit is."])
def test_such_an_opening_is_noticed(first: str) -> None:
    assert odd_openings(f'def function() -> None:\n    """{first}"""\n')
    assert not odd_openings(f'def function() -> None:\n    """Say {first}"""\n')


def documentation(entry: str) -> str:
    """Docstring of ``module:name``, read without an import; torch stays out of this tier."""
    module, name = entry.split(":")
    path = ROOT / "picotron_ray" / f"{module.replace('.', '/')}.py"
    (node,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    )
    return ast.get_docstring(node) or ""


@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_an_entry_point_has_an_example(entry: str) -> None:
    assert EXAMPLE.search(documentation(entry)), documentation(entry)


def sections(section: type[Section]) -> Iterator[type[Section]]:
    """Sections of a config, below one and itself."""
    for below in section.__subclasses__():
        yield below
        yield from sections(below)


SCHEMA = "picotron_ray.config.schema."
SECTIONS = sorted(
    (each for each in set(sections(Section)) - NO_EXAMPLE if each.__module__.startswith(SCHEMA)),
    key=lambda each: each.__name__,
)


def example_of(section: type[Section]) -> str:
    """YAML of a section's example."""
    found = YAML.search(ast_docstring(section))
    return textwrap.dedent(found[1]) if found else ""


def ast_docstring(section: type[Section]) -> str:
    return textwrap.dedent(section.__doc__ or "") + "\n"


def instances(value: object, section: type[Section]) -> Iterator[Section]:
    """Sections of that class in a job."""
    if isinstance(value, section):
        yield value
    if isinstance(value, Section):
        for name in type(value).model_fields:
            yield from instances(getattr(value, name), section)
    if isinstance(value, tuple):
        for item in value:
            yield from instances(item, section)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_config_section_has_an_example_that_loads(section: type[Section], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(example_of(section))
    found = list(instances(load_job(str(file)), section))
    assert found
    assert all(found_one != default for found_one in found for default in instances(JobConfig(), section))
    assert all(found_one.model_fields_set for found_one in found)


@pytest.mark.parametrize("module", ["picotron_ray.checkpoint.storage.open"])
def test_examples_give_what_they_say(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert result.attempted > 0
    assert result.failed == 0
