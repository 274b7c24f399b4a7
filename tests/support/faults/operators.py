"""Small faults that a program may have, as replacements of one piece of its source.

The operators are the usual ones of mutation testing (DeMillo et al. 1978; Offutt et al. 1996): a comparison
off by its border or turned round, plus for minus, ``and`` for ``or``, a condition negated, a constant off
by one, a call or an update left out. Left alone is what changes no behaviour that a test could see:
annotations, docstrings, texts of errors and logs, settings of time by name (``…_S``, ``timeout``), how output
looks (``indent``, ``flush``, ``width``, options of Typer), the size of a cache or pool, the border of a
tolerance, and ``strict`` of ``zip``, which only another fault could reach.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
}  # fmt: skip
QUIET_CALLS = ("print", "log", "warn", "note", "echo", "info", "debug", "secho", "Typer")
QUIET_KEYWORDS = ("indent", "flush", "maxsize", "strict", "width", "include_url", "max_pool_connections")
QUIET_NAMES = ("_S", "_s", "timeout", "TIMEOUT", "interval", "grace")


@dataclass(frozen=True)
class Fault:
    """One replacement.

    Fields:
        path: relative to the tree.
        line, column, end_line, end_column: of the piece; lines from 1, columns in bytes from 0.
        text: what stands there instead.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def apply(self, source: str) -> str:
        lines = source.encode().split(b"\n")
        before = b"\n".join([*lines[: self.line - 1], lines[self.line - 1][: self.column]])
        after = b"\n".join([lines[self.end_line - 1][self.end_column :], *lines[self.end_line :]])
        return (before + self.text.encode() + after).decode()

    def show(self, source: str) -> str:
        found = source.encode().split(b"\n")[self.line - 1].decode().strip()
        return f"{self.path}:{self.line}: {found[:60]!r} has {self.text[:60]!r}"


def faults_in(path: str, source: str) -> list[Fault]:
    """Every fault that the operators make of a file."""
    return [
        Fault(path, node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0, text)
        for node, text in _Finder().of(ast.parse(source))
    ]


class _Finder:
    """Walks a module past what no test could see."""

    def of(self, node: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        if isinstance(node, (ast.stmt, ast.expr)):
            if _quiet(node):
                return
            for text in _replacements(node):
                yield node, text
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.keyword) and _quiet_keyword(child.arg or ""):
                    continue
                if isinstance(child, ast.AST):
                    yield from self.of(child)


def _quiet(node: ast.stmt | ast.expr) -> bool:
    """Whether nothing inside changes what a test could see."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.AnnAssign)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.Assign):
        return any(quiet in ast.unparse(target) for target in node.targets for quiet in QUIET_NAMES)
    if isinstance(node, ast.Call):
        return any(word in ast.unparse(node.func) for word in QUIET_CALLS)
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _quiet_keyword(name: str) -> bool:
    return name in QUIET_KEYWORDS or any(quiet in name for quiet in QUIET_NAMES)


def _replacements(node: ast.stmt | ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Compare) and "tolerance" in ast.unparse(node).lower():
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.unparse(ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _quiet(node.value)
    ):
        yield "pass"


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )
