"""Inspection of a model of the user's own from the driver, once, before anything is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError


def inspect_model(job: JobConfig) -> tuple[BuiltModel, list[str]]:
    """Build the module that ``model.builder`` names; returns what a plan needs, and facts to show.

    It is built in a process of its own (``train.custom_model.inspect``), which finds the user's code where
    workers will: in the folder of the script that runs, in the present folder, or installed.

    Raises:
        ConfigError: the module cannot be built or trained.
    """
    script = str(Path(sys.argv[0]).resolve().parent)
    paths = [script] if script in sys.path else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "picotron_ray.train.custom_model.inspect"],
        input=job.model_dump_json(),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise ConfigError(
            f"model.builder: the process that builds {job.model.builder} ended with {done.returncode}: {last}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])  # before it may stand what C code printed
    if "problems" in answer:
        raise ConfigError(*answer["problems"])
    return BuiltModel.model_validate(answer["built"]), list(answer["said"])
