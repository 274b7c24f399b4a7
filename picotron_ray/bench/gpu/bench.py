"""``bench gpu``: everything that a machine with GPUs can show, in one JSON named by the device.

Parts that are not asked for stay as an earlier run left them in that file: a machine may be there for
minutes alone.

Each part runs in processes of its own; one that fails or cannot run here says why in the result, and the
others go on. Nothing needs a network, nor Ray but for the part ``service``.

=============  ======================================================================================
``tests``      tests/gpu of the checkout that the package lies in
``mfu``        ``bench mfu`` with its switches and its peers
``snapshots``  steps by the real loop with snapshots after each, at the chosen interval, and without
``kill``       a killed rank without Ray: seconds until the survivors' next new step
``service``    the same through Ray: a run that loses a worker and ends
=============  ======================================================================================

A rehearsal (``--cpu``) takes the same way through every part over gloo, with tiny sizes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.bench.gpu.recovery import FLAT, bench_kill, bench_snapshots
from picotron_ray.bench.gpu.tests_part import bench_tests, checkout
from picotron_ray.bench.mfu import run as mfu
from picotron_ray.bench.recovery.peers.host import environment
from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError, NoDeviceError, PicotronError
from picotron_ray.runtime.driver.asked_files import write_asked

PARTS = ("tests", "mfu", "snapshots", "kill", "service")
SCHEMA = 1
TOKENS = 1 << 22
"""Made-up tokens of the corpus: no speed depends on what they say."""
LONGEST_S = 1800
"""Of the service's run."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Models and lengths of the parts.

    Fields:
        config, overrides: of ``mfu``.
        small: config of the parts that keep snapshots, and of the service's run.
        tests: pytest's expression of names; empty: all tests.
        only: of ``bench mfu``.
    """

    config: str
    overrides: tuple[str, ...]
    small: str
    small_overrides: tuple[str, ...]
    tests: str
    only: str
    steps: int
    warmup: int
    rounds: int
    kills: int
    snapshot_steps: int
    at_once: int = 1
    """Tests."""


ON_GPUS = Sizes(
    config="smollm-1.7b",
    overrides=("data.global_batch=32",),
    small="smollm-135m",
    small_overrides=("data.global_batch=32",),
    tests="",
    only="",
    steps=10,
    warmup=5,
    rounds=3,
    kills=5,
    snapshot_steps=100,
)
QUICK = Sizes(
    config="smollm-1.7b",
    overrides=("data.global_batch=16",),
    small="smollm-135m",
    small_overrides=("data.global_batch=32",),
    tests="",
    only="kernels.compile,kernels.projections,kernels.loss,kernels.attention=flash,kernels.optimizer",
    steps=5,
    warmup=2,
    rounds=1,
    kills=1,
    snapshot_steps=24,
    at_once=4,
)
"""For a machine that is at hand for minutes."""
REHEARSAL = Sizes(
    config="tiny",
    overrides=(),
    small="tiny",
    small_overrides=(),
    tests="(one and is_one_process) or (dp and killed and not hsdp and not fsdp)",
    only="precision=bf16,kernels.loss",
    steps=2,
    warmup=1,
    rounds=1,
    kills=1,
    snapshot_steps=6,
)


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Options of the command line; see its help."""

    out: Path
    cpu: bool = False
    quick: bool = False
    parts: str = "all"
    workers: int | None = None
    picotron: Path | None = None
    torchtitan: Path | None = None

    @property
    def chosen(self) -> tuple[str, ...]:
        """Parts to run, in their order; ConfigError for one that is not known."""
        words = PARTS if self.parts == "all" else tuple(word.strip() for word in self.parts.split(","))
        unknown = [word for word in words if word not in PARTS]
        if unknown:
            raise ConfigError(f"--parts: saw {unknown[0]!r}, expected all, or some of {', '.join(PARTS)}")
        return tuple(part for part in PARTS if part in words)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices that everything runs on."""

    kind: str
    name: str
    count: int


def place_of(options: GpuOptions) -> Devices:
    """Find the devices.

    Raises:
        NoDeviceError: torch sees no CUDA device, and no rehearsal was asked for.
        ConfigError: ``--workers`` asks for more than there are.
    """
    import torch  # takes a second

    if options.cpu:
        return Devices("cpu", "cpu", options.workers or 2)
    count = torch.cuda.device_count()
    if not count:
        raise NoDeviceError("bench gpu: saw no CUDA device; give --cpu to rehearse every part over gloo")
    if (options.workers or 1) > count:
        raise ConfigError(
            f"--workers: saw {options.workers}, expected at most the {count} GPUs of this machine"
        )
    return Devices("cuda", torch.cuda.get_device_name(0), options.workers or count)


def bench(options: GpuOptions, say: Say) -> dict[str, Any]:
    """Run the chosen parts, and write ``<out>/<device>.json``.

    Raises ConfigError or NoDeviceError before anything runs.
    """
    chosen, place = options.chosen, place_of(options)
    if not options.out.is_dir():
        raise ConfigError(f"--out: saw {options.out}, expected a folder that exists")
    file = options.out / f"{slug(place)}.json"

    before = earlier_parts(file, options)

    def keep(parts: Mapping[str, Any]) -> dict[str, Any]:
        mine = {name: {**part, "quick": options.quick} for name, part in parts.items()}
        found = assembled(place, options, before | mine)
        write_asked("--out", file, json.dumps(found, indent=2) + "\n")
        return found

    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="picotron-bench-gpu-") as name:
        works = {part: work_of(part, options, place, Path(name), say) for part in chosen}
        found = keep(run_parts(works, say, keep))
    say(f"written to {file}")
    return found


Work = Callable[[], dict[str, Any]] | str
"""What a part does, or why it is left out."""
Keep = Callable[[Mapping[str, Any]], object]
"""Takes what was found so far."""


def work_of(part: str, options: GpuOptions, place: Devices, folder: Path, say: Say) -> Work:
    """Make a part ready to run, or say why it cannot run here."""
    sizes = REHEARSAL if options.cpu else QUICK if options.quick else ON_GPUS
    small = (sizes.small, small_overrides(sizes, folder), place.kind, place.count)
    if part == "tests":
        root = checkout()
        if root is None or importlib.util.find_spec("pytest") is None:
            return "tests/gpu or pytest is not here: run it from a checkout with the extra test"
        return lambda: bench_tests(root, place.kind, sizes.tests, folder, sizes.at_once)
    if part == "mfu":
        return lambda: bench_mfu(sizes, options, place, folder, say)
    if part == "snapshots":
        return lambda: bench_snapshots(*small, sizes.snapshot_steps, say)
    if part == "kill":
        return lambda: bench_kill(*small, sizes.kills, say)
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed"
    return lambda: bench_service(sizes, place, folder)


def run_parts(works: Mapping[str, Work], say: Say, keep: Keep) -> dict[str, Any]:
    """Run one part after the other; each is ``done``, ``failed`` or ``left out``, with its reason.

    What is found is kept after each: a machine that is at hand for minutes may be gone before the last.
    """
    found: dict[str, Any] = {}
    for part, work in works.items():
        if isinstance(work, str):
            found[part] = {"status": "left out", "why": work}
        else:
            say(f"{part} …")
            began = time.monotonic()
            found[part] = _ended(work)
            found[part]["seconds"] = round(time.monotonic() - began, 1)
            found[part]["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        keep(found)
        why = f": {found[part]['why']}" if "why" in found[part] else ""
        say(f"{part}: {found[part]['status']}{why}")
    return found


def _ended(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a part; whatever ends it is told in the result, as hours of other parts must not be lost."""
    try:
        found = work()
    except Exception as error:  # noqa: BLE001 - told in the result, and by the command's exit code
        words = str(error).splitlines() or [""]
        name = "" if isinstance(error, PicotronError) else f"{type(error).__name__}: "
        return {"status": "failed", "why": f"{name}{words[0][:300]}"}
    if found.get("failed"):
        return {"status": "failed", "why": f"{len(found['failed'])} tests failed", "found": found}
    return {"status": "done", "found": found}


def earlier_parts(file: Path, options: GpuOptions) -> dict[str, Any]:
    """Return parts that are not asked for, as an earlier run left them in the file.

    Raises ConfigError where that is no result of this command.
    """
    try:
        found = json.loads(file.read_text())
        return {name: part for name, part in found["parts"].items() if name not in options.chosen}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"--out: saw {file}, which is no result of bench gpu; move it away") from None


def assembled(place: Devices, options: GpuOptions, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Put the result together. Pure but for what it says of the machine."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    given.pop("out")
    return {
        "schema": SCHEMA,
        "device": asdict(place),
        "rehearsal": options.cpu,
        "machine": {**machine(), **versions()},
        "options": given,
        "left_out": {name: part["why"] for name, part in parts.items() if part["status"] == "left out"},
        "failed": {name: part["why"] for name, part in parts.items() if part["status"] == "failed"},
        "parts": dict(parts),
    }


def slug(place: Devices) -> str:
    """Name of the file without its ending.

    >>> slug(Devices("cuda", "NVIDIA H100 80GB HBM3", 8))
    'nvidia-h100-80gb-hbm3-x8'
    """
    return f"{re.sub('[^a-z0-9]+', '-', place.name.lower()).strip('-')}-x{place.count}"


def corpus(folder: Path, vocabulary: int) -> str:
    """Make a file of random tokens, once; returns its path."""
    file = folder / "tokens.bin"
    if not file.exists():
        tokens = np.random.default_rng(0).integers(0, min(vocabulary, 1 << 16), TOKENS)
        file.write_bytes(tokens.astype(np.uint16).tobytes())
    return str(file)


def data_of(config: str, overrides: Sequence[str], folder: Path) -> list[str]:
    """Override the data of a config whose corpus is not here by made-up tokens."""
    job = load_job(config, [*overrides, "data.source=memmap", f"data.path={folder}"])
    path = corpus(folder, job.model.vocab_size)
    return ["data.source=memmap", f"data.path={path}", "data.held_out_fraction=0.05"]


def small_overrides(sizes: Sizes, folder: Path) -> list[str]:
    """Overrides of the parts that keep snapshots."""
    return [*sizes.small_overrides, *data_of(sizes.small, sizes.small_overrides, folder)]


def bench_mfu(sizes: Sizes, options: GpuOptions, place: Devices, folder: Path, say: Say) -> dict[str, Any]:
    """Run ``bench mfu`` on all devices, with every switch, and every peer whose code is here."""
    peers = ["plain", *(name for name in ("picotron", "torchtitan") if getattr(options, name))]
    asked = mfu.MfuOptions(
        workers=place.count,
        steps=sizes.steps,
        warmup=sizes.warmup,
        rounds=sizes.rounds,
        ablate=True,
        peers=",".join(peers),
        picotron=options.picotron,
        torchtitan=options.torchtitan,
        peak_tflops=None,
        only=sizes.only,
    )
    data = data_of(sizes.config, sizes.overrides, folder)
    overrides = [*sizes.overrides, *data, f"cluster.device={place.kind}"]
    found = mfu.bench(sizes.config, overrides, asked, say)
    absent = [name for name in ("picotron", "torchtitan") if name not in peers]
    return {**found, "peers_left_out": {name: f"--{name} names no checkout" for name in absent}}


def bench_service(sizes: Sizes, place: Devices, folder: Path) -> dict[str, Any]:
    """Train through Ray with as many workers as devices, one of which is killed; the run's own summary."""
    steps = 60
    chaos = [{"fault": "kill", "target": f"worker:{place.count - 1}", "step": steps // 2, "phase": "forward"}]
    words = [
        *(sizes.small, *small_overrides(sizes, folder), f"name=bench-gpu-{place.count}", f"steps={steps}"),
        *(f"cluster.device={place.kind}", f"cluster.max_workers={place.count}", "cluster.min_workers=1"),
        *(f"chaos={json.dumps(chaos)}", f"storage.url={folder / 'service'}"),
        *(FLAT, "checkpoint.interval_steps=20", "evaluate.interval_steps=60", "evaluate.samples=8", "--json"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "picotron_ray.launch", *words],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=LONGEST_S,
    )
    last = (done.stdout.strip().splitlines() or ["{}"])[-1]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [last])[-1]
        raise PicotronError(f"bench gpu: the run ended with {done.returncode}: {said[:300]}")
    summary: dict[str, Any] = json.loads(last)
    if summary.get("status") != "finished" or not summary.get("failures"):
        raise PicotronError(
            f"bench gpu: saw status {summary.get('status')}, expected a run that lost a worker"
        )
    return summary
