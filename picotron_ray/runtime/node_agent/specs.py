"""Specs that workers leave in their node's folder: the generations that they were told to run.

All workers of a node leave the same spec, and that of a large generation takes megabytes and seconds to read.
So what reads the same is decoded once. A greeting names a spec, and does not carry it: thousands of agents
know the same one, and a coordinator asks one of them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec

log = logging.getLogger(__name__)
REMEMBERED = 4  # the newest, one before it, what was kept; a spec may take tens of megabytes


@dataclass(frozen=True, slots=True)
class SpecName:
    """Name of a spec; specs of one name are the same.

    Fields:
        digest: of its JSON.
    """

    id: GenerationId
    digest: str


def name_of(spec: GenerationSpec) -> SpecName:
    """Return the name of a spec."""
    return SpecName(spec.id, blake3(json.dumps(plain(spec)).encode()).hexdigest())


@lru_cache(REMEMBERED)
def read_text(text: str) -> GenerationSpec:
    """Read a spec's JSON; the same object for the same text, as long as it is remembered."""
    return decode_spec(json.loads(text))


def read_spec(path: Path) -> GenerationSpec | None:
    """Read one spec; None where it is torn, or was a dead worker's and has just been removed."""
    try:
        return read_text(path.read_text())
    except (ValueError, TypeError, KeyError, OSError) as error:
        log.warning("spec %s is set aside: %s", path.name, error)
        return None


def newest_spec(folder: Path) -> GenerationSpec | None:
    """Return the newest generation that a spec in a node's folder names; None where there is none."""
    specs = (read_spec(path) for path in folder.glob("*.spec"))
    return max((spec for spec in specs if spec is not None), key=lambda spec: spec.id, default=None)


class ToldSpecs:
    """Specs that an agent named last, for whoever asks for one of them."""

    def __init__(self) -> None:
        self._told: dict[SpecName, GenerationSpec] = {}

    def name(self, spec: GenerationSpec | None) -> SpecName | None:
        """Return the name of a spec, and have it at hand; None for none."""
        if spec is None:
            return None
        told = dict(self._told)  # other threads name specs too
        name = next((name for name, known in told.items() if known is spec), None) or name_of(spec)
        told.pop(name, None)
        self._told = {**dict(list(told.items())[1 - REMEMBERED :]), name: spec}
        return name

    def get(self, digest: str) -> GenerationSpec | None:
        """Return the spec of a digest; None where it was not named lately."""
        return next((spec for name, spec in self._told.items() if name.digest == digest), None)
