"""picotron_ray: elastic 4D-parallel LLM training on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_train.trainer import ElasticTrainer as ElasticTrainer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``picotron_ray.ElasticTrainer``, imported when it is first asked for: it loads Ray."""
    if name == "ElasticTrainer":
        from importlib import import_module

        return import_module("picotron_ray.runtime.ray_train.trainer").ElasticTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
