"""Torch's settings for ``kernels.deterministic``: each of them one of the whole process.

Torch then takes the deterministic way of an operator, and raises RuntimeError, with its name, where
there is none: a model of one's own may have such operators. cuBLAS keeps to one order of sums only with
workspaces of its own, which it looks up in the environment before its first product.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.utils.deterministic

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
"""Values under which cuBLAS is deterministic (its documentation, section on reproducibility)."""


def prepare_cublas(job: JobConfig, environment: MutableMapping[str, str]) -> None:
    """Give cuBLAS workspaces of its own, before its first product, where a job asks for determinism.

    Raises:
        ConfigError: the environment says otherwise.
    """
    if not job.kernels.deterministic:
        return
    found = environment.setdefault(CUBLAS, WORKSPACES[0])
    if found not in WORKSPACES:
        raise ConfigError(
            f"kernels.deterministic: saw {CUBLAS}={found}, expected {' or '.join(WORKSPACES)}; take it out of"
            " the environment of the nodes"
        )


def choose_algorithms(job: JobConfig) -> tuple[str, ...]:
    """Have torch take deterministic algorithms or any, as a job asks; returns what was applied.

    Memory that nobody has written yet is not filled: nothing here reads it.
    """
    asked = job.kernels.deterministic
    torch.use_deterministic_algorithms(asked)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return ("deterministic algorithms",) if asked else ()
