"""One connection of the test process to the session's local Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_cluster.local_ray import LocalRay


@pytest.fixture
def connected(local_ray: LocalRay) -> Iterator[None]:
    """This process is a driver of the session's Ray; other tests may use other clusters in between."""
    import ray

    from picotron_ray.runtime.ray_cluster.names import NAMESPACE

    ray.init(
        address=local_ray.address,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="ERROR",
        ignore_reinit_error=True,
    )
    yield
    ray.shutdown()
