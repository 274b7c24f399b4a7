"""Which cases of a test the default run takes."""

from __future__ import annotations

from typing import Any

import pytest


def also_deep(*cases: Any) -> list[Any]:
    """Cases that only ``.ci/deep`` runs: cheaper tests find what they find."""
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*part, marks=pytest.mark.deep) for part in parts]
