"""Specs that workers leave in their node's folder: the generations that they were told to run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from picotron_ray.coordinator.codec import decode_spec
from picotron_ray.coordinator.messages import GenerationSpec

log = logging.getLogger(__name__)


def read_spec(path: Path) -> GenerationSpec | None:
    """Read one spec; None where it is torn, or was a dead worker's and has just been removed."""
    try:
        return decode_spec(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, OSError) as error:
        log.warning("spec %s is set aside: %s", path.name, error)
        return None


def newest_spec(folder: Path) -> GenerationSpec | None:
    """Return the newest generation that a spec in a node's folder names; None where there is none."""
    specs = (read_spec(path) for path in folder.glob("*.spec"))
    return max((spec for spec in specs if spec is not None), key=lambda spec: spec.id, default=None)
