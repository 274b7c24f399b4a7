"""What all tests share: tiers by folder, an isolated environment, a local Ray, and the coverage limits.

A test's folder is its tier: tests/pure, gloo, ray, server, gpu. Nothing here imports torch or Ray before
a test asks for it, so that the pure tier stays pure and quick.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

pytest_plugins = ["tests.support.coverage_limits", "tests.support.coverage_contexts"]

TESTS = Path(__file__).resolve().parent
TIERS = ("pure", "gloo", "ray", "server", "gpu")
_TRAIN = ("compile", "dry_run", "error_feedback", "muon", "quantized", "way_selection")
NUMERICS = ("parallel/", "models/", "planner/", "train/custom_model/", *(f"train/test_{of}" for of in _TRAIN))
"""Below tests/gloo: numerics of several ranks, which no clock judges."""
REHEARSAL = "PICOTRON_GPU_REHEARSAL"
"""Variable that, set to ``cpu``, runs what is marked ``any_device`` of tests/gpu on CPUs over gloo."""
REAL_HOME = os.environ.get("HOME", "")


def pytest_configure(config: pytest.Config) -> None:
    """Point everything that a test or its child processes may write at one temporary folder."""
    home = Path(tempfile.mkdtemp(prefix="picotron-tests-"))
    config.add_cleanup(lambda: _remove(home))
    paths = [str(TESTS / "support"), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    os.environ.update(
        HOME=str(home),
        XDG_STATE_HOME=str(home / "state"),
        XDG_CACHE_HOME=str(home / "cache"),
        XDG_CONFIG_HOME=str(home / "config"),
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
        OMP_NUM_THREADS="1",
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=str(home / "no-aws-config"),
        AWS_SHARED_CREDENTIALS_FILE=str(home / "no-aws-credentials"),
        NO_COLOR="1",
    )
    # Hundreds of processes import the package: let the first of them keep what it compiled.
    sys.dont_write_bytecode = False
    for name in (
        "RAY_ADDRESS", "AWS_PROFILE", "AWS_ENDPOINT_URL", "FORCE_COLOR", "PYTHONDONTWRITEBYTECODE",
    ):  # fmt: skip
        os.environ.pop(name, None)


SESSION = pytest.StashKey[pytest.Session]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[SESSION] = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End at once after Ray: its C++ threads outlive ``ray.shutdown``, and taking the interpreter down beside
    them has crashed the process after all tests had passed, so that the run's exit code was 139.
    """
    if "ray" in sys.modules and SESSION in config.stash and not hasattr(config, "workerinput"):
        _remove(Path(os.environ["HOME"]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[SESSION].exitstatus)


def _remove(home: Path) -> None:
    """Remove the temporary home, and the logs that the local Rays of tests keep beside it."""
    from picotron_ray.runtime.ray_cluster.local_ray import default_temp_folder

    for lock in (home / "state" / "picotron_ray").glob("*.lock"):
        shutil.rmtree(default_temp_folder(lock.stem), ignore_errors=True)
    shutil.rmtree(home, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """``-n 2``: what starts processes goes one after the other in one of the two.

    Beside it goes what minds no neighbour: numerics of several ranks, which no clock judges, then the pure
    tests. The two large groups have the most tests, so pytest-xdist begins with them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByTier(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if "pure/" in nodeid or "gpu/" in nodeid:
                return nodeid.partition("::")[0]
            return "numerics" if any(f"gloo/{part}" in nodeid for part in NUMERICS) else "with processes"

    return ByTier(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m TIER`` the other tiers' files are not even imported."""
    wanted = config.getoption("markexpr")
    parts = collection_path.relative_to(TESTS).parts if collection_path.is_relative_to(TESTS) else ()
    return True if wanted in TIERS and parts and parts[0] in TIERS and parts[0] != wanted else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()
    rehearses = os.environ.get(REHEARSAL) == "cpu"
    for item in items:
        tier = item.path.relative_to(TESTS).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(
                f"{item.path}: tests live in tests/{{{','.join(TIERS)}}}, not in {tier!r}"
            )
        item.add_marker(getattr(pytest.mark, tier))
        on_cpu = rehearses and item.get_closest_marker("any_device") is not None
        if tier == "gpu" and not has_gpu and not on_cpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    """One local Ray of 8 CPU slots in a session of its own, for tests that need any Ray."""
    from picotron_ray.runtime.ray_cluster import local_ray as lifecycle

    # Ray's socket paths must stay below 108 bytes, so not under pytest's own long folder names.
    folder = Path(tempfile.mkdtemp(prefix="pr-"))
    ray = lifecycle.start("tests", cpus=8, temp_folder=folder)
    yield ray
    lifecycle.stop(ray)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings of a real S3 server (Ceph RADOS Gateway) on a loopback port, as its script prints them."""
    script = TESTS / "s3" / "start_s3.sh"
    if shutil.which("apt-get") is None:
        pytest.skip("the S3 server is unpacked from Debian packages: no apt-get on this machine")
    folder = tmp_path_factory.mktemp("s3")
    prefix = os.environ.get("S3_PREFIX") or str(Path(REAL_HOME) / ".cache" / "ci-s3")
    env = {**os.environ, "S3_PREFIX": prefix, "HOME": REAL_HOME}
    subprocess.run([str(script), "start", str(folder)], env=env, check=True, timeout=300, capture_output=True)
    lines = (folder / "env").read_text().splitlines()
    yield dict(line.removeprefix("export ").split("=", 1) for line in lines if "=" in line)
    subprocess.run([str(script), "stop", str(folder)], env=env, check=True, timeout=60, capture_output=True)


@pytest.fixture(scope="session")
def prometheus_programs() -> Path:
    """Folder of Debian's ``prometheus`` and ``promtool``."""
    from tests.support.debian import unpacked

    return unpacked("prometheus", REAL_HOME) / "usr" / "bin"
