"""What may be imported without torch and Ray stays importable without them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = (
    "errors",
    "failures",
    "config",
    "planner",
    "coordinator",
    "cli",
    "commands.bench",
    "commands.run",
    "launch",
    "layout",
    "layout.shards",
    "config.validation.check",
    "planner.model_sizes",
    "models.families.registry",
    "models.families.llama.sizes",
    "models.huggingface.names",
)


@pytest.mark.parametrize("module", LIGHT)
def test_module_loads_neither_torch_nor_ray(module: str) -> None:
    program = f"import sys, picotron_ray.{module}; print(sorted({{'torch', 'ray'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
