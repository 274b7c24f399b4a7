"""Suggestions for bottlenecks, ranked by the gain that ``bench mfu --ablate`` measured on the same config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.adapt import AdaptKind
from picotron_ray.coordinator.policies.bottleneck import ANSWERS
from picotron_ray.errors import ConfigError

SWITCHES: dict[AdaptKind, tuple[str, ...]] = {
    "micro-batch": ("layout.micro_batch",),
    "recompute": ("layout.recompute",),
    "layout": ("layout.tp", "layout.zero"),
    "compression": (
        "comm.gradients=bf16",
        "comm.gradients=int8",
        "comm.gradients=topk",
        "comm.gradients=powersgd",
    ),
    "bucket": ("comm.gradients=bucketed",),
    "precision": ("precision",),
}
"""How the names of a kind of change begin among the benchmark's switches; other kinds it does not try."""
ALSO: dict[str, tuple[str, ...]] = {
    "compute": ("kernels.",),
    "memory": ("layout.offload_activations", "optimizer.offload", "optimizer.moments"),
    "communication": ("comm.", "kernels.tp_overlap"),
}
"""Switches that answer a bottleneck and that no run changes by itself."""
NOT_MEASURED = (
    "not measured: `picotron-ray bench mfu CONFIG --ablate --json FILE` on an idle machine, then"
    " --measured FILE"
)


@dataclass(frozen=True, slots=True)
class Gains:
    """Speed over the base's by switch, as measured; empty: nothing was."""

    ratios: Mapping[str, float]
    memory: Mapping[str, float]
    """Peak memory over the base's, by switch."""

    @classmethod
    def read(cls, file: Path | None) -> Gains:
        """Read the result of a benchmark.

        Raises:
            ConfigError: it is none.
        """
        if file is None:
            return cls({}, {})
        try:
            found = json.loads(file.read_text())["ablation"]
            ratios = {name: _number(entry["ratio"]) for name, entry in found.items()}
        except OSError as error:
            raise ConfigError(f"--measured: {file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--measured: {file} is no result of `picotron-ray bench mfu CONFIG --ablate --json {file}`"
            ) from error
        peaks = {name: entry.get("memory_ratio") for name, entry in found.items()}
        return cls(
            ratios, {name: float(peak) for name, peak in peaks.items() if isinstance(peak, int | float)}
        )


def _number(value: Any) -> float:
    """A ratio: the number itself, or the middle of several figures of it."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def advice(bottlenecks: Sequence[Mapping[str, str]], gains: Gains) -> list[dict[str, Any]]:
    """Changes that answer bottlenecks: measured ones first, the largest gain leading; then the others.

    A switch that was measured to be slower is left out, unless memory is what is short.
    """
    measured: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    for one in bottlenecks:
        name = one["bottleneck"]
        begins = [*ALSO.get(name, ())]
        for kind in ANSWERS[name]:  # type: ignore[index]
            own = [switch for switch in gains.ratios if switch.startswith(SWITCHES.get(kind, ("-",)))]
            begins += SWITCHES.get(kind, ())
            if not own:
                others.setdefault(
                    kind, {"change": kind, "answers": name, "ratio": None, "gain": NOT_MEASURED}
                )
        for switch, ratio in gains.ratios.items():
            if switch.startswith(tuple(begins)) and (ratio > 1 or name == "memory"):
                measured.setdefault(switch, _measured(switch, name, ratio, gains))
    return [*sorted(measured.values(), key=lambda entry: -entry["ratio"]), *others.values()]


def _measured(switch: str, bottleneck: str, ratio: float, gains: Gains) -> dict[str, Any]:
    peak = gains.memory.get(switch)
    room = "" if peak is None else f", {peak:.2f} times the peak memory"
    return {
        "change": switch,
        "answers": bottleneck,
        "ratio": ratio,
        "gain": f"{ratio:.3f} times the speed{room}, measured",
    }
