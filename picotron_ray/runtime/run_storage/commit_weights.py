"""Names under which a commit holds the weights of a model: as they were trained, or their moving average."""

from __future__ import annotations

from collections.abc import Iterable

from picotron_ray.checkpoint.store.manifest import Manifest
from picotron_ray.errors import ConfigError
from picotron_ray.models.parameters import ParameterSpec

AVERAGED = "ema/"
"""How the names of averaged weights begin (`checkpoint.torch_state`, which needs torch)."""
TRAINED, AVERAGE = "trained", "ema"
"""Values of ``--weights``."""


def stored_names(table: Iterable[ParameterSpec], manifest: Manifest, weights: str) -> dict[str, str]:
    """By the name of a parameter, the stored tensor that stands for it.

    Averages of LoRA are A's and B's, as evaluation takes them: their product is not the average of products.

    Args:
        weights: ``trained``, or ``ema``: their moving average (what no gradient moves has none).

    Raises:
        ConfigError: it is neither, or the commit has no averages.
    """
    specs = list(table)
    if weights == TRAINED:
        return {spec.name: spec.name for spec in specs}
    if weights != AVERAGE:
        raise ConfigError(f"--weights: saw {weights}, expected {TRAINED} or {AVERAGE}")
    there = manifest.tensors()
    missing = [spec.name for spec in specs if spec.trained and AVERAGED + spec.name not in there]
    if missing:
        raise ConfigError(
            f"--weights: saw {weights}, but the commit of step {manifest.step} holds no average of"
            f" {missing[0]}; train with optimizer.ema_decay first, or take {TRAINED}"
        )
    return {spec.name: AVERAGED * spec.trained + spec.name for spec in specs}
