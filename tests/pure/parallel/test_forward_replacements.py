"""Every replacement of a module's forward belongs to a step of `parallelize`."""

from __future__ import annotations

import ast
from pathlib import Path

import picotron_ray

PACKAGE = Path(picotron_ray.__file__).parent
STEPS = {
    "parallel/compiled_code.py",
    "parallel/data/fsdp.py",
    "parallel/memory/activation_checkpointing.py",
    "parallel/memory/activation_offload.py",
    "parallel/memory/activation_quantization.py",
    "parallel/precision/autocast.py",
    "parallel/precision/switches.py",
    "parallel/tensor/tensor_parallel.py",
}
"""Modules that replace a forward. A new one needs a step, and its place in the chain written down there."""
TRIALS = {"train/meta/inspect_model.py"}
"""Those that do so in a copy of a model, which is thrown away."""


def replaces_forward(path: Path) -> bool:
    targets = [
        target
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return any(isinstance(target, ast.Attribute) and target.attr == "forward" for target in targets)


def test_no_forward_is_replaced_elsewhere() -> None:
    """Except in models, which make a stage's own forward before it is parallelized."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if replaces_forward(path)}
    assert {path for path in found if not path.startswith("models/")} == STEPS | TRIALS
