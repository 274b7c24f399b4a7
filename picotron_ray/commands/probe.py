"""``picotron-ray probe``: measure the machines that a run would use, for plans of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from picotron_ray.errors import ConfigError
from picotron_ray.launch import reported
from picotron_ray.runtime.driver.asked_files import write_asked

if TYPE_CHECKING:
    from picotron_ray.planner.hardware_profile import HardwareProfile

RUN = "probe"
BUDGET_S = 60.0


def probe(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--json",
            help="file for the profile; left out: printed; - is stdout, alone",
            metavar="FILE",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="workers at most, one on each GPU or CPU slot")
    ] = 8,
    cpus: Annotated[float, typer.Option("--cpus-per-worker", min=0.1, help="CPU slots of one worker")] = 1.0,
    device: Annotated[str, typer.Option("--device", help="auto, cuda or cpu")] = "auto",
    topology: Annotated[
        Path | None,
        typer.Option("--topology", help="JSON of GPU groups (nvlink, pcie) that NVML must agree with"),
    ] = None,
    budget_s: Annotated[
        float, typer.Option("--budget-s", min=1.0, help="seconds for measuring; what they leave out is named")
    ] = BUDGET_S,
) -> None:
    """Measure matrix products, attention, memory and collectives on every node, all workers at once.

    On the cluster that RAY_ADDRESS names, else on this machine. `picotron-ray plan CONFIG --hardware FILE`
    plans with what was found.

    Example: picotron-ray probe --workers 2 --out here.json
    """
    alone = str(out) == "-"
    with reported(alone):
        from picotron_ray.config.load import parse_job
        from picotron_ray.runtime.driver.follow_run import without_rays_messages

        if out is not None and not out.parent.is_dir():
            raise ConfigError(f"--out: saw {out}, expected a folder that exists; make {out.parent} first")
        groups = None if topology is None else (_text_of(topology), str(topology))
        count = workers if os.environ.get("RAY_ADDRESS") else min(workers, _slots_here(device, cpus))
        job = parse_job(
            {
                "name": f"{RUN}-{os.getpid()}",
                "cluster": {
                    "device": device,
                    "max_workers": count,
                    "cpus_per_worker": cpus,
                    "min_workers": 1,
                },
            }
        )
        with without_rays_messages():
            from picotron_ray.runtime.hardware_probe.door import measure_nodes

            found = measure_nodes(job, budget_s, _to_stderr if alone else print, groups)
    _show(found, out, alone)


def _show(found: HardwareProfile, out: Path | None, alone: bool) -> None:
    if alone:
        print(found.model_dump_json(), flush=True)
        return
    from picotron_ray.planner.profile_text import profile_lines

    text = found.model_dump_json(indent=1)
    if out is None:
        print(text)
    else:
        write_asked("--out", out, text + "\n")
    for line in profile_lines(found, str(out)) if out else (*found.outliers, *found.cuts):
        print(line)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"--topology: cannot read {path}: {why}") from None


def _slots_here(device: str, cpus: float) -> int:
    """Workers that this machine has cores for; its GPUs are Ray's to count."""
    return 1 << 10 if device == "cuda" else max(1, int(len(os.sched_getaffinity(0)) / min(cpus, 1.0)))
