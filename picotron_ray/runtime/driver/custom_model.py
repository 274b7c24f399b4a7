"""A model of the user's own, seen from the driver: looked into once, before anything is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.check import check
from picotron_ray.errors import ConfigError


def with_built_model(job: JobConfig, say: Callable[[str], None] = lambda line: None) -> JobConfig:
    """``job`` with ``model.built`` filled in where it names a builder; else as it is.

    The module is built in a process of its own (``train.inspection``), which finds the user's code where
    workers will: in the folder of the script that runs, in the present folder, or installed.

    Args:
        say: told one line per fact about the model.

    Raises ConfigError: the module cannot be built, trained, or cut as the layout says.
    """
    if job.model.builder is None or job.model.built is not None:
        return job
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
    built = BuiltModel.model_validate(answer["built"])
    job = job.model_copy(update={"model": job.model.model_copy(update={"built": built})})
    problems = check(job)
    if problems:
        raise ConfigError(*(f"{problem.key}: {problem.text}" for problem in problems))
    for line in answer["said"]:
        say(line)
    return job
