"""Planted mutations by name: each breaks one thing that a simulation must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


class Mutations(dict[str, Plant]):
    """Plants by their functions' names; adding one is a decorator."""

    def plant(self, plant: Plant) -> Plant:
        self[plant.__name__] = plant
        return plant
