"""Settings and buckets for tests against an S3 server."""

from __future__ import annotations

import os
import pwd
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3

from picotron_ray.config.schema.service import StorageConfig

Settings = dict[str, str]
SCRIPT = Path(__file__).resolve().parents[2] / "s3" / "start_s3.sh"


@contextmanager
def environment(settings: Settings) -> Iterator[None]:
    """boto3's own chain finds the server's credentials (and authority, under TLS) in the environment."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    wanted = {name: settings[name] for name in names}
    if settings.get("S3_CA"):
        wanted["AWS_CA_BUNDLE"] = settings["S3_CA"]
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def script(command: str, folder: Path, **env: str) -> None:
    """Run the server's start script. The unpacked packages are kept where ``S3_PREFIX`` or the home says."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    prefix = os.environ.get("S3_PREFIX") or str(Path(home) / ".cache" / "ci-s3")
    done = subprocess.run(
        [str(SCRIPT), command, str(folder)],
        env={**os.environ, "HOME": home, "S3_PREFIX": prefix, **env},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def settings_of(folder: Path) -> Settings:
    lines = (folder / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def new_bucket(settings: Settings, **changes: object) -> StorageConfig:
    """A storage config in a fresh bucket; call inside ``environment``."""
    bucket = f"picotron-{uuid.uuid4().hex[:12]}"
    client = boto3.session.Session().client("s3", endpoint_url=settings["S3_ENDPOINT"])
    client.create_bucket(Bucket=bucket)
    client.close()
    values = {
        "url": f"s3://{bucket}/some/prefix",
        "endpoint_url": settings["S3_ENDPOINT"],
        "path_style": True,
    }
    return StorageConfig.model_validate({**values, "retry_deadline_s": 20.0, **changes})
