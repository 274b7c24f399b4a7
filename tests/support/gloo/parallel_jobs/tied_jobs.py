"""Planted faults for the tests of tied embeddings in pipelines."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.gloo.faults import replace


def dropped() -> Any:
    """Each end keeps its own gradient."""
    from picotron_ray.parallel.pipeline.tied_embeddings import TiedEmbeddings

    return replace(TiedEmbeddings, "sum_", lambda self, parameters, gradients: None)


def stale() -> Any:
    """The head's copy on the embedding's rank stays what it was."""
    from picotron_ray.parallel.pipeline.tied_embeddings import TiedEmbeddings

    return replace(TiedEmbeddings, "follow", lambda self: None)


def counted_twice() -> Any:
    """Both ends count in the norm."""
    import picotron_ray.parallel.local_shards as local_shards

    kept = local_shards.counts_in_norm
    return replace(
        local_shards,
        "counts_in_norm",
        lambda spec, layout, rank: kept(dataclasses.replace(spec, copy=False), layout, rank),
    )


PLANTS = {"dropped": dropped, "stale": stale, "counted": counted_twice}
