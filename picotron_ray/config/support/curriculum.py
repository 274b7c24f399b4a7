"""Bounds of curricula that the config's rules and the plan share."""

from __future__ import annotations

LEAD = 16
"""Steps between the one that decides and the first of the next stage: more than loaders read ahead."""
