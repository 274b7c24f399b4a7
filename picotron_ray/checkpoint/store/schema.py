"""Schemas of stored objects: what a newer version wrote is refused, and never passed over as damage.

To pass over it would go on from an older commit, and so void what the newer version has trained.
"""

from __future__ import annotations

from typing import Any

from picotron_ray.errors import NewerSchemaError


def refuse_newer(what: str, found: Any, known: int) -> None:
    """Raise NewerSchemaError where an object that is whole has a higher schema than ``known``."""
    if type(found) is int and found > known:
        raise NewerSchemaError(
            f"{what} has schema {found}, this version reads {known}: a newer picotron_ray has gone on with"
            " the run; launch it with that version, or a newer one"
        )
