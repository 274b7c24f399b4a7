"""deploy/slurm and deploy/skypilot: scripts are clean and do as they say, configs pass ``validate``.

The Slurm script is run here with stand-ins for Slurm's and Ray's commands. SkyPilot's own schema is asked
where that package is installed; it brings sixty others, so CI does without.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from picotron_ray.config.load import load_job

ROOT = Path(__file__).resolve().parents[3]
SLURM, SKY = ROOT / "deploy" / "slurm", ROOT / "deploy" / "skypilot"
SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
STAND_INS = {
    "scontrol": 'echo "scontrol $*" >>calls; [ "$1" = show ] && printf "n1\\nn2\\n" || true',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1 10.0.0.2",
    "ray": 'echo "ray $*" >>calls; exec sleep 60',
    "python": """
if [ "$1" = - ]; then cat >/dev/null; exit 0; fi
echo "launch $* at $RAY_ADDRESS" >>calls
trap 'sleep 0.3; exit 75' USR1
trap 'sleep 0.3; exit 130' TERM
touch launched
for _ in $(seq 200); do sleep 0.05; done
exit 3
""",
}


def script() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((SKY / "run.yaml").read_text())
    return found


@pytest.mark.parametrize("folder", [SLURM, SKY])
def test_configs_are_sound(folder: Path) -> None:
    job = load_job(str(folder / "job.yaml"))
    assert job.cluster.device == "cuda"
    assert "://" in job.storage.url or job.storage.url.startswith("/"), "nodes must see the same"


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
def test_scripts_are_clean(tmp_path: Path) -> None:
    files = [SLURM / "picotron.sbatch"]
    for part in ("setup", "run"):
        files.append(tmp_path / f"{part}.sh")
        files[-1].write_text("#!/bin/bash\n" + script()[part])
    done = subprocess.run([str(SHELLCHECK), *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    files[-1].write_text(files[-1].read_text().replace('"$CONFIG"', "$CONFIG"))
    assert subprocess.run([str(SHELLCHECK), str(files[-1])], capture_output=True).returncode == 1


def submitted(folder: Path) -> subprocess.Popen[str]:
    """The script with stand-ins, once it has launched the run."""
    tools = folder / "bin"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tools}:{os.environ['PATH']}"}
    command = ["bash", str(SLURM / "picotron.sbatch"), "job.yaml", "steps=5"]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **slurm}, text=True, **streams)
    deadline = time.monotonic() + 60
    while not (folder / "launched").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    ("number", "code", "queued"), [(signal.SIGUSR1, 75, True), (signal.SIGTERM, 130, False)]
)
def test_the_script_passes_signals_on_and_requeues(
    number: int, code: int, queued: bool, tmp_path: Path
) -> None:
    process = submitted(tmp_path)
    assert (tmp_path / ".ray-token-7").stat().st_mode & 0o777 == 0o600
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert process.returncode == code, out
    assert ("scontrol requeue 7" in calls) is queued
    assert "launch -m picotron_ray.launch job.yaml steps=5 at 10.0.0.1:6379" in calls
    assert "ray start --address=10.0.0.1:6379 --block" in calls
    assert list(tmp_path.glob(".ray-token*")) == [], "the token goes with the job"


def test_slurm_signals_before_the_time_is_over() -> None:
    text = (SLURM / "picotron.sbatch").read_text()
    assert "#SBATCH --signal=B:USR1@300" in text
    assert "#SBATCH --requeue" in text
    assert "REQUEUE=75" in text


def test_a_skypilot_worker_ends_when_the_head_is_gone(tmp_path: Path) -> None:
    """Its Ray, which does not return by itself, is joined while the head listens, and killed after."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ray").write_text(
        '#!/bin/bash\necho "ray $*" >>calls\n[ -e died ] || { touch died; exit 1; }\nexec sleep 60\n'
    )
    (tools / "ray").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as head:
        told = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NODE_RANK": "1", "LOOK_S": "0.1"}
        told |= {"PORT": str(head.getsockname()[1]), "PATH": f"{tools}:{os.environ['PATH']}"}
        process = subprocess.Popen(["bash", "-c", script()["run"]], cwd=tmp_path, env={**os.environ, **told})
        deadline = time.monotonic() + 60
        while not (tmp_path / "calls").exists() or len((tmp_path / "calls").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.poll() is None
    assert process.wait(30) == 0
    joins = (tmp_path / "calls").read_text().splitlines()
    assert joins == [f"ray start --address=127.0.0.1:{told['PORT']} --node-ip-address=127.0.0.2 --block"] * 2


def test_skypilots_own_ray_is_left_alone() -> None:
    assert [line for line in script()["run"].splitlines() if line.strip().startswith("ray stop")] == []


def test_steps_get_the_cores_of_the_job() -> None:
    assert "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}" in (SLURM / "picotron.sbatch").read_text()


def test_skypilots_own_schema_accepts_the_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    import jsonschema

    task = script()
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
