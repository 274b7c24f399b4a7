"""No circle of modules: whoever reads one module never has to have read it before.

Imports within functions count as those at the top do: they hide a circle from the interpreter, not from the
reader. Only ``if TYPE_CHECKING:`` blocks are free.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("picotron_ray", "tuning")

Graph = dict[str, set[str]]


def modules_of(root: Path) -> dict[str, Path]:
    """Modules and packages below ``root``, by dotted name."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def import_graph(root: Path) -> Graph:
    """Modules that each module imports, wherever in its file."""
    modules = modules_of(root)
    return {
        name: {at for at in _imported(file, name, modules) if at != name} for name, file in modules.items()
    }


def _imported(file: Path, name: str, modules: dict[str, Path]) -> Iterator[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield from (at for at in (whole if whole in modules else base,) if at in modules)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def circles(graph: Graph) -> list[list[str]]:
    """The shortest circle through each module that is part of one; each set of modules once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        path = _way_back(graph, start)
        if path:
            found.setdefault(frozenset(path), path)
    return list(found.values())


def _way_back(graph: Graph, start: str) -> list[str]:
    came_from: dict[str, str] = {}
    todo = deque([start])
    while todo:
        at = todo.popleft()
        for following in sorted(graph[at]):
            if following == start:
                path = [at]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if following not in came_from:
                came_from[following] = at
                todo.append(following)
    return []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 200, "the modules were found"
    found = circles(graph)
    assert not found, "circles of imports:\n" + "\n".join(" -> ".join([*path, path[0]]) for path in found)


TOP = "from picotron_ray import b\n"
IN_FUNCTION = "def late():\n    from picotron_ray.b import thing\n"
RELATIVE = "from . import b\n"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from picotron_ray import b\n"


@pytest.mark.parametrize(
    ("source", "found"), [(TOP, True), (IN_FUNCTION, True), (RELATIVE, True), (FOR_TYPES, False)]
)
def test_a_planted_circle_is_found(source: str, found: bool, tmp_path: Path) -> None:
    package = tmp_path / "picotron_ray"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(source)
    (package / "b.py").write_text("import picotron_ray.c\n")
    (package / "c.py").write_text("from picotron_ray.a import late\n")
    expected = [["picotron_ray.a", "picotron_ray.b", "picotron_ray.c"]] if found else []
    assert circles(import_graph(tmp_path)) == expected
