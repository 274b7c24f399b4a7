"""Trackers that hand rows to a library: TensorBoard, Weights & Biases, MLflow; and ``open_tracker``.

Each is one function from rows to the library's calls. Weights & Biases ignores a step below its newest, so
a run that went back to an older commit shows there the steps that it took back, until it passes them.
MLflow keeps both values of a repeated step. TensorBoard is told to hide what was taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from picotron_ray.config.schema.service import TrackerConfig
from picotron_ray.observability.event_file import EventFile
from picotron_ray.observability.trackers import (
    PLOTTED,
    CsvTracker,
    JsonLinesTracker,
    Row,
    Tracker,
    TrackerProgress,
)

DEFAULT_PROJECT = "picotron_ray"


class Sink(Protocol):
    """Sink of a library: takes figures of one step, and can be closed."""

    def log(self, step: int, figures: dict[str, float], at_s: float | None) -> None: ...
    def rewind(self, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class RemoteTracker:
    """Tracker over a sink, which remembers the last step that it wrote."""

    def __init__(self, sink: Sink, progress: TrackerProgress) -> None:
        self._sink, self._progress = sink, progress

    @property
    def last_step(self) -> int:
        return self._progress.last_step

    @property
    def last_eval_step(self) -> int:
        return self._progress.last_eval_step

    def write(self, steps: Sequence[Row], evaluations: Sequence[Row]) -> None:
        held_out = {row["step"]: row["eval_loss"] for row in evaluations}
        for row in steps:
            figures = {f"train/{key}": row[key] for key in PLOTTED if row[key] is not None}
            if row["step"] in held_out:
                figures["eval/loss"] = held_out.pop(row["step"])
            self._sink.log(row["step"], figures, row["at_s"])
        for step, loss in held_out.items():
            self._sink.log(step, {"eval/loss": loss}, None)
        self._sink.flush()
        last = max([self.last_step, *(row["step"] for row in steps)])
        self._progress.reach(last, max([self.last_eval_step, *(row["step"] for row in evaluations)]))

    def rewind(self, step: int) -> None:
        self._sink.rewind(step)
        self._progress.reach(min(step, self.last_step), min(step, self.last_eval_step))

    def close(self) -> None:
        self._sink.close()


class TensorBoard:
    """TensorBoard event files: a new one for each coordinator, and each time that the run goes back."""

    def __init__(self, folder: Path, last_step: int) -> None:
        self._folder = folder
        self._file = EventFile(folder, last_step + 1)

    def log(self, step: int, figures: dict[str, float], at_s: float | None) -> None:
        self._file.add(step, figures, at_s)

    def rewind(self, step: int) -> None:
        self._file.close()
        self._file = EventFile(self._folder, step + 1)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandB:
    """Weights & Biases run; its id, our run's name and identity, is kept in a file for later coordinators."""

    def __init__(
        self, config: TrackerConfig, run: str, settings: dict[str, Any], folder: Path, run_id: str
    ) -> None:
        import wandb

        kept = folder / "wandb-run"
        if not kept.exists():
            kept.write_text(run_id)

        # the coordinator's own output is none of its business
        options = wandb.Settings(console="off", **({"base_url": config.url} if config.url else {}))
        project = config.project or DEFAULT_PROJECT
        self._run = wandb.init(
            project=project,
            id=kept.read_text(),
            name=run,
            resume="allow",
            config=settings,
            dir=str(folder),
            settings=options,
        )

    def log(self, step: int, figures: dict[str, float], at_s: float | None) -> None:
        self._run.log(figures, step=step)

    def rewind(self, step: int) -> None:
        """Keep everything: the library cannot take back a step."""

    def flush(self) -> None:
        """Leave it to the library, which sends by itself."""

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow run; its id is kept in a file, so that later coordinators go on with it."""

    def __init__(self, config: TrackerConfig, run: str, settings: dict[str, Any], folder: Path) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=config.url)
        kept = folder / "mlflow-run"
        if not kept.exists():
            project = config.project or DEFAULT_PROJECT
            found = self._client.get_experiment_by_name(project)
            experiment = found.experiment_id if found else self._client.create_experiment(project)
            made = self._client.create_run(experiment, run_name=run)
            for key, value in settings.items():
                self._client.log_param(made.info.run_id, key, value)
            kept.write_text(made.info.run_id)
        self._id = kept.read_text()
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, figures: dict[str, float], at_s: float | None) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, name, value, int(at_s * 1000) if at_s else None, step)

    def rewind(self, step: int) -> None:
        """Keep everything: the library cannot take back a step."""

    def flush(self) -> None:
        """Each figure is sent as it comes."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def folder_of(config: TrackerConfig, default_folder: Path) -> Path:
    """Return a tracker's folder, which is made where it is not there."""
    folder = Path(config.folder) if config.folder else default_folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def open_tracker(
    config: TrackerConfig, run: str, settings: dict[str, Any], default_folder: Path, identity: str = ""
) -> Tracker:
    """Open a tracker, which goes on where an earlier one of this run ended.

    Args:
        settings: the run's config by dotted key, for those that show one.
        default_folder: taken where the config names none.
        identity: tells the run from another one of its name.
    """
    folder = folder_of(config, default_folder)
    if config.kind == "csv":
        return CsvTracker(folder)
    if config.kind == "jsonl":
        return JsonLinesTracker(folder)
    progress = TrackerProgress(folder / f"{config.kind}.progress")
    if config.kind == "tensorboard":
        return RemoteTracker(TensorBoard(folder, progress.last_step), progress)
    if config.kind == "mlflow":
        return RemoteTracker(MLflow(config, run, settings, folder), progress)
    named_alone = progress.begun or not identity  # before ids held more than a name
    run_id = run if named_alone else f"{run}-{identity[:8]}"
    return RemoteTracker(WandB(config, run, settings, folder, run_id), progress)
