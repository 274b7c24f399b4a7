"""The CPU image without an engine: the lock installed into an empty root, and the shipped job run in it.

As the pod has it: a user that is not root, a read-only tree, /dev/shm of the pod's size, nothing of this
machine's environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REAL_HOME
from tests.support.deploy.pods import container_of, quantity
from tests.support.deploy.render import DEPLOY, ROOT, cluster_spec, ray_objects, render, tool

SCRIPT = ROOT / "tests" / "support" / "deploy" / "empty_root.sh"
ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(tool() is None, reason="neither kubectl nor kustomize is installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="an empty root needs chroot and mounts: run as root"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The image's tree. Mounts are of the script's own namespace and go with it."""
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    for parent in list(folder.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)  # the user of the image passes through
    command = [*ALONE, str(SCRIPT), str(folder), sys.base_prefix, "install", str(ROOT)]
    env = {**os.environ, "HOME": REAL_HOME}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "No broken requirements found." in done.stdout
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def inside(root: Path, shm_bytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    run = [*ALONE, str(SCRIPT), str(root), sys.base_prefix, "run", str(shm_bytes), *command]
    return subprocess.run(run, capture_output=True, text=True, timeout=600, check=False)


def test_the_shipped_job_runs_as_in_its_pod(root: Path) -> None:
    objects = render("cpu")
    (group,) = cluster_spec(ray_objects(objects)[0])["workerGroupSpecs"]
    (shm,) = (
        volume["emptyDir"]["sizeLimit"]
        for volume in group["template"]["spec"]["volumes"]
        if volume["name"] == "shm"
    )
    workers = int(quantity(container_of(group["template"])["resources"]["limits"]["cpu"]))
    shutil.copy(DEPLOY / "overlays/cpu/cluster/job.yaml", root / "etc/picotron/job.yaml")
    here = ["steps=20", "storage.url=/home/picotron/runs", "cluster.autoscale=false"]
    here += [f"cluster.max_workers={workers}", "metrics.port=0", "metrics.coordinator_port=0"]
    launch = ["python", "-m", "picotron_ray.launch", "/etc/picotron/job.yaml", "--json", *here]
    done = inside(root, int(quantity(shm)), *launch)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["steps"]) == ("finished", 20)
    assert len(summary["generations"][-1]["members"]) == workers
    assert summary["final_loss"] < summary["first_loss"]


PAGE = """
import json, subprocess, sys, urllib.request
command = ["picotron-ray", "dashboard", "/home/picotron/runs/quickstart", "--port", "0", "--json"]
page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
address = json.loads(page.stdout.readline())["url"].partition("#")[0]
with urllib.request.urlopen(address, timeout=60) as answer:
    print(answer.status, "picotron" in answer.read().decode())
page.terminate()
page.wait(30)
"""


def test_the_page_is_served_and_spans_can_be_sent(root: Path) -> None:
    run = "python -m picotron_ray.launch quickstart chaos=[] steps=25 metrics.port=0"
    run += " storage.url=/home/picotron/runs telemetry.otel.endpoint=http://127.0.0.1:9"  # nobody is there
    done = inside(root, 1 << 30, "sh", "-c", f"{run} >/dev/null && python -c '{PAGE}'")
    assert done.stdout.split() == ["200", "True"], done.stderr[-3000:]


def test_the_tree_is_read_only_and_the_user_is_not_root(root: Path) -> None:
    done = inside(root, 1 << 20, "sh", "-c", "id -u; touch /venv/x /etc/x; touch /tmp/x ~/x && echo written")
    assert done.stdout.split() == ["1000", "written"]
    assert done.stderr.count("Read-only file system") == 2
