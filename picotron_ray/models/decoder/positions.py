"""Formulas of rotary positions that configs need too. Torch-free."""

from __future__ import annotations

import math


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """Return how much sharper attention is made over rows ``factor`` times as long.

    0.1 x coefficient x ln(factor) + 1 (Peng et al. 2023, section 3.4; the coefficient is DeepSeek's).
    """
    return 1.0 if factor <= 1.0 else 0.1 * coefficient * math.log(factor) + 1.0
