"""Modules and files that docstrings and comments mention exist: a rename is followed in words too."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from picotron_ray.config.json_schema import key_schemas

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "picotron_ray"
FOLDERS = ("picotron_ray", "tuning", "tests")
DOTTED = re.compile(r"`{1,2}([A-Za-z_]\w*(?:\.\w+)+)(?:\(\))?`{1,2}")
FILE = re.compile(r"(?<![\w/.<>*-])\w[\w/.-]*\.py\b")
IMPORT = re.compile(r"\bfrom ((?:picotron_ray|tuning|tests)[\w.]*) import ((?:\w+(?:, )?)+)")
SUFFIXES = ("bin", "py", "json", "jsonl", "yaml")  # data files, and files that FILE finds
ELSEWHERE = {
    "modules.py",  # of each family
    "chaos.0.step",  # a config key with an index
    "layers.3.attention.wq.weight",  # a canonical name of a tensor
    "picotron_ray.ElasticTrainer",  # made when it is asked for
    "torchft.data",  # of the package torchft, not of our module
    "torchft.ddp.DistributedDataParallel",
}


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def prose(source: str) -> Iterator[str]:
    """Texts of docstrings (also those below a value) and of comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def module_paths() -> dict[tuple[str, ...], list[Path]]:
    """Every tail of a module's dotted name, such as ``(tensor, overlap)`` → files that have it."""
    found: dict[tuple[str, ...], list[Path]] = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for start in range(len(parts)):
            found.setdefault(parts[start:], []).append(path)
    return found


@cache
def bound(path: Path) -> frozenset[str]:
    """Names that a module defines or imports, and those of its classes' members."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for body in [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            else:
                found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return frozenset(found)


@cache
def config_keys() -> frozenset[str]:
    return frozenset(key_schemas())


def is_module_mention(name: str) -> bool:
    """Whether the first part of a dotted name is a package or module of ours, and it names no data."""
    parts = tuple(name.split("."))
    return (
        parts[:1] in module_paths()
        and parts[-1] not in SUFFIXES
        and name.removeprefix("job.") not in config_keys()
        and name not in ELSEWHERE
    )


def exists(name: str) -> bool:
    """Whether a dotted name is a module or a name in one; a leading part of its path may be left out."""
    parts = tuple(name.split("."))
    return any(
        bound(path).issuperset(parts[cut:])
        for cut in range(len(parts), 0, -1)
        for path in module_paths().get(parts[:cut], ())
    )


def file_exists(name: str, place: Path) -> bool:
    """Whether a file lies at that path from the folder of ``place``, or from one above it."""
    return any((folder / name).exists() for folder in place.parents if folder.is_relative_to(ROOT))


def missing(source: str, place: Path) -> list[str]:
    """Modules and files that the prose of ``source`` mentions and that are not there."""
    found = []
    for text in prose(source):
        found += [name for name in DOTTED.findall(text) if is_module_mention(name) and not exists(name)]
        found += [
            name for name in FILE.findall(text) if name not in ELSEWHERE and not file_exists(name, place)
        ]
    return found


def test_modules_and_files_in_prose_exist() -> None:
    files = sources()
    assert len(files) > 400
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path in files
        if (names := missing(path.read_text(), path))
    }
    assert found == {}


def missing_imports(text: str) -> list[str]:
    """What the import statements in a text name and nobody has: programs in strings, examples in Markdown."""
    named = (
        f"{module}.{name}" for module, names in IMPORT.findall(text) for name in re.findall(r"\w+", names)
    )
    return [name for name in named if not exists(name) and name not in ELSEWHERE]


def test_programs_in_strings_and_in_the_documentation_import_what_exists() -> None:
    files = [*sources(), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/**/*.md")]
    imports = {path.relative_to(ROOT).as_posix(): missing_imports(path.read_text()) for path in files}
    del imports["tests/pure/house/test_circles.py"]  # its modules are made up
    assert {path: names for path, names in imports.items() if names} == {}


def test_an_import_of_nothing_is_found() -> None:
    gone = "picotron_ray.runtime.no_such_module"
    text = f"from {gone.rpartition('.')[0]} import chaos, no_such_module, worker"
    assert missing_imports(text) == [gone]


@pytest.mark.parametrize(
    "text",
    [
        "`train.inspection` looks at it.",
        "``runtime.worker.Worker`` runs.",
        "See `picotron_ray.config.devices`.",
        "`local_shards.no_such_function()`.",
        "ours.py says so.",
        "tests/pure/gone.py shows it.",
    ],
)
def test_a_mention_of_nothing_is_found(text: str) -> None:
    place = PACKAGE / "bench" / "recovery" / "bench.py"
    assert len(missing(f'"""{text}"""\n', place)) == 1
    assert len(missing(f"x = 1  # {text}\n", place)) == 1


def test_what_exists_may_be_mentioned() -> None:
    text = "`train.custom_model.inspect`, `layout.pp`, `local_shards.local_gradient`, bench.py, train/loop.py"
    assert missing(f'"""{text}"""\n', PACKAGE / "bench" / "recovery" / "bench.py") == []
