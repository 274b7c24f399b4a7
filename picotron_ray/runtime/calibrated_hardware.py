"""Hardware of a plan, corrected by what runs on it were measured to take here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.planner.calibration import calibrated
from picotron_ray.planner.calibration_history import CalibrationHistory, Correction, correction
from picotron_ray.planner.hardware import Hardware
from picotron_ray.planner.plan import for_devices
from picotron_ray.runtime.calibration_store import folder, hardware_here, load, path_of, read

SHOWN = 5


def calibrated_hardware(
    found: Hardware, job: JobConfig, gpus: int, asked: str
) -> tuple[Hardware, Correction, Path | None]:
    """The hardware with its correction, and the file that it is from.

    Args:
        asked: ``auto``: this machine's history of such hardware, if any; ``none``; or a file.

    Raises:
        ConfigError: the file cannot be read, or is of another kind of device.
    """
    path = _path(found, asked)
    named = asked not in ("auto", "none")
    history = None if path is None else _named(asked, found) if named else load(path)
    fixed = correction(
        history,
        for_devices(job, gpus, found.device),
        lambda measure, layout: found.of_devices(layout.world_size).profile,
    )
    if not fixed.why:
        return found, fixed, None
    profile = calibrated(found.profile, fixed.factors)
    return (
        replace(found, profile=profile, origin=f"{found.origin}; calibrated", reached=(1.0, 1.0)),
        fixed,
        path,
    )


def _path(found: Hardware, asked: str) -> Path | None:
    if asked == "none":
        return None
    if asked != "auto":
        return Path(asked)
    if found.device == "cpu":
        return path_of("cpu", hardware_here())
    kind = found.name.partition("-")[0].upper()
    for path in sorted(folder().glob("cuda-*.json")):
        history = load(path)
        if history is not None and (kind in history.hardware.upper() or history.hardware in found.origin):
            return path
    return None


def _named(asked: str, found: Hardware) -> CalibrationHistory:
    """The history of a file that was asked for by name."""
    expected = "expected auto, none, or a file of measured runs"
    try:
        history = read(Path(asked))
    except OSError as error:
        raise ConfigError(
            f"--calibration: cannot read {asked}: {error.strerror or error}; {expected}"
        ) from None
    except ValueError:
        raise ConfigError(f"--calibration: saw {asked}, which holds no measured runs; {expected}") from None
    if history.device != found.device:
        raise ConfigError(
            f"--calibration: saw runs on {history.hardware} ({history.device}) in {asked}, expected some on"
            f" {found.device}; give another file, or none"
        )
    return history


def correction_lines(fixed: Correction, path: Path | None) -> Iterator[str]:
    """Describe the correction of a plan, and the newest measures against the model, before and after."""
    if not fixed.why:
        yield "calibrated by nothing: no run was measured on this hardware here"
        return
    yield f"calibrated {fixed.factors}: {fixed.why} ({path})"
    for row in fixed.rows[-SHOWN:]:
        measure = row.measure
        yield (
            f"  {measure.run}: {row.layout} took {measure.step_s:.3g} s a step, by the model"
            f" {row.total_s:.3g} s, corrected {row.corrected_s(fixed.factors):.3g} s"
        )
