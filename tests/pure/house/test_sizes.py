"""Files and functions stay small, and a class's name says which class it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = sorted(path for folder in ("picotron_ray", "tuning") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES = 400
MOST_FUNCTION_LINES = 60


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Every node of these kinds, with its file's name."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield str(path.relative_to(ROOT)), node


def test_files_are_small() -> None:
    assert len(FILES) > 100
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {file: count for file, count in lines.items() if count > MOST_LINES} == {}


def test_functions_are_small() -> None:
    long = {}
    for file, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert node.end_lineno is not None
        count = node.end_lineno - node.lineno + 1
        if count > MOST_FUNCTION_LINES:
            long[f"{file}:{node.name}"] = count
    assert long == {}


def test_no_class_name_is_defined_twice() -> None:
    """Also ``_Name`` beside ``Name``: a reader who searches for one finds both."""
    places = defaultdict(list)
    for file, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places[node.name.lstrip("_")].append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
