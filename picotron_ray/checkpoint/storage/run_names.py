"""Names of the runs below a storage URL: its folders that hold a ``run.json``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from picotron_ray.config.schema.service import RUN_NAME, StorageConfig
from picotron_ray.errors import NotFoundError, StorageError

MARK = "run.json"


def run_names(config: StorageConfig) -> list[str]:
    """List the names of runs in storage, in their order.

    In S3 these are all folders with a run's name: whether one holds a run shows when it is read.

    Raises:
        NotFoundError: there is no such folder, or it is a file.
        StorageError: storage does not answer.
    """
    if config.url.startswith("s3://"):
        from picotron_ray.checkpoint.storage.s3 import S3Storage

        found = S3Storage(config, "").folders()
        return sorted(name for name in found if re.fullmatch(RUN_NAME, name))
    root = Path(config.url.removeprefix("file://")).expanduser().absolute()
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and (root / entry / MARK).is_file()]
    except FileNotFoundError as error:
        raise NotFoundError(f"{root} does not exist") from error
    except NotADirectoryError as error:
        raise NotFoundError(f"{root} is a file") from error
    except OSError as error:
        raise StorageError(f"{root} cannot be read ({error.strerror})") from error
    return sorted(name for name in names if re.fullmatch(RUN_NAME, name))
