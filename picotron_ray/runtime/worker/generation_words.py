"""Lines that a worker prints of a generation; they are among the run's logs."""

from __future__ import annotations

from collections.abc import Sequence

from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.train.precision.adaptive import PrecisionPolicy


def tell(spec: GenerationSpec, rank: int, words: str) -> None:
    """Print a line of one rank's."""
    print(f"generation {spec.id} rank {rank}: {words}", flush=True)


def applied_words(spec: GenerationSpec, applied: Sequence[str]) -> str:
    """Say what layout and settings a generation has, and what was made of the model."""
    settings = "".join(f", {key}={text}" for key, text in spec.settings)
    return f"{spec.layout}{settings}: {'; '.join(applied) or 'one process'}"


def policy_words(precision: str, policy: PrecisionPolicy) -> str:
    """Say what adaptive precision has decided."""
    full = ", ".join(sorted(set(policy.sensitivity) - policy.low)) or "nothing"
    return f"{precision} adds {policy.error:.1e} to the loss; in full precision: {full}"
