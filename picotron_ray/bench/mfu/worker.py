"""Worker process of ``bench mfu``: it builds each setting in turn, trains a few steps and logs their times.

A segment is one setting, from the engine's build to its end, as one generation of the service: process
groups under a prefix of their own over a standing store (torchrun's), and everything dropped afterwards.
So all settings share processes, and rounds over them are quick. All ranks do the same segments in the same
order; what a layout refuses, it refuses on all of them. The loop of the service's workers is a setting too
(real_loop.py).

``torchrun --standalone --nproc-per-node N -m picotron_ray.bench.mfu.worker PLAN.json FOLDER`` leaves its
figures in FOLDER (``bench.common.event_log``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from picotron_ray.bench.common.event_log import EventLog
from picotron_ray.bench.common.training import EngineTraining, PlainTraining, Training
from picotron_ray.bench.mfu import picotron, torchtitan
from picotron_ray.bench.mfu.memory_timeline import thinned
from picotron_ray.bench.mfu.meters import (
    PRODUCT_SIZE,
    Clock,
    Stopwatch,
    peak_bytes,
    product_flops,
    reset_peak,
    stages_timed,
)
from picotron_ray.bench.mfu.peers import CHECKOUTS
from picotron_ray.bench.mfu.real_loop import RealLoop
from picotron_ray.bench.mfu.settings import Setting
from picotron_ray.bench.recovery.peers.replica import Replica
from picotron_ray.comm.process_groups import ProcessGroups
from picotron_ray.comm.wire_bytes import SENT
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.data.samples import SampleSet
from picotron_ray.errors import PeerLostError, PicotronError
from picotron_ray.planner.peaks import known_peak, rated_precision
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.worker.nccl_settings import prepare_nccl
from picotron_ray.train.engine import build_engine
from picotron_ray.train.memory_account import untraceable
from picotron_ray.train.training_state import MadeWeights


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Place of this process: its rank, the number of ranks, and its device."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def of(cls, device: str) -> WorkerPlace:
        """Read it from torchrun's environment."""
        found = torch.device("cpu")
        if device == "cuda":
            found = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(found)
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), found)

    @contextlib.contextmanager
    def groups(self, prefix: str, needed: bool) -> Iterator[ProcessGroups | None]:
        """Process groups of all ranks; None where there is one rank and nothing needs them."""
        if self.world == 1 and not needed:
            yield None
            return
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        groups = ProcessGroups.open(host, port, prefix, self.rank, self.world, backend)
        try:
            yield groups
        finally:
            gc.collect()
            groups.close()


class Segments:
    """Runs one segment after the other in this process."""

    def __init__(self, plan: dict[str, Any], place: WorkerPlace) -> None:
        self._settings = [Setting.from_dict(setting) for setting in plan["settings"]]
        self._steps, self._warmup = plan["steps"], plan["warmup"]
        self._checkouts, self._place = plan["checkouts"], place
        job = self._settings[0].job
        self._made: MadeWeights = {}
        """Weights of step 0: making those of a large model takes longer than a segment's steps."""
        splits = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder())
        self._data, self._generations = splits.train, 0
        if "slots" in plan:
            self._loop = RealLoop(Path(plan["slots"]), place.rank, place.device, splits, self._made)

    def place(self) -> dict[str, Any]:
        """The device, and the peak that its data sheet promises in FLOP/s (None: not known)."""
        device, precision = self._place.device, rated_precision(self._settings[0].job)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return {"device": name, "data_sheet": known_peak(name, precision)}

    def product(self) -> dict[str, Any]:
        """FLOP/s of a large matrix product now, and its size."""
        device, precision = self._place.device, rated_precision(self._settings[0].job)
        return {"size": PRODUCT_SIZE[device.type], "flops_per_s": product_flops(device, precision)}

    def run(self, prefix: str, index: int, *, phases: bool, traced: bool = False) -> dict[str, Any]:
        """One segment: setting ``index``, timed as it runs or phase by phase, or its memory accounted.

        Args:
            prefix: of its keys in the store; its own.

        Returns ``steps_s``, ``peak_bytes``, ``sent_bytes`` (a step; None: not counted) and ``loss_sum`` (this
        rank's, in nats, the mean of the last quarter of the steps; None: of another scale), or ``phases_s``:
        seconds per step, and ``applied``: what computed; or ``memory``: a step's by class (None: cannot be
        traced); or ``refused``: why. Of the loop of workers ``steps_s``, ``peak_bytes`` and ``loop``.
        """
        setting, place = self._settings[index], self._place
        reset_peak(place.device)
        try:
            if setting.kind == "loop":
                return self._by_the_loop(setting)
            with place.groups(prefix, setting.kind in CHECKOUTS) as groups:
                training = self._training(setting, groups)
                loader = _loader(setting, place.rank, self._data)
                try:
                    if traced:
                        return {"memory": self._memory(setting, training, loader)}
                    if phases:
                        applied = training.applied if isinstance(training, EngineTraining) else []
                        return {"phases_s": self._phases(setting, training, loader), "applied": applied}
                    found = self._timed(training, loader)
                    if setting.kind != "engine":
                        found |= {"sent_bytes": None, "loss_sum": None}
                    return {**found, "peak_bytes": peak_bytes(place.device)}
                finally:
                    loader.close()
                    training.close()
        except (PicotronError, torch.OutOfMemoryError) as error:
            return {"refused": str(error).splitlines()[0], "by_peer": isinstance(error, PeerLostError)}

    def _by_the_loop(self, setting: Setting) -> dict[str, Any]:
        self._generations += 1
        found = self._loop.run(setting, self._generations, self._steps, self._warmup)
        return {**found, "sent_bytes": None, "loss_sum": None, "peak_bytes": peak_bytes(self._place.device)}

    def _training(self, setting: Setting, groups: ProcessGroups | None) -> Training:
        place, layout = self._place, setting.layout
        if setting.kind == "engine":
            engine = build_engine(setting.job, layout, place.rank, groups, place.device)
            return EngineTraining(engine, self._made)
        if setting.kind in CHECKOUTS:
            checkout = Path(self._checkouts[setting.kind])
            if setting.kind == "picotron":
                return picotron.PicotronTraining(checkout, setting.job, layout, place.device)
            return torchtitan.TorchtitanTraining(checkout, setting.job, layout, place.device)
        cache, rows = cache_folder(), layout.micro_batch
        return PlainTraining(
            Replica(setting.job, place.rank, layout.dp, cache, place.device, rows, self._made)
        )

    def _timed(self, training: Training, loader: BatchLoader) -> dict[str, Any]:
        """Seconds of each step, bytes sent in one, the loss; only the step waits for the device."""
        for _ in range(self._warmup):
            training.step(loader.next())
        clock, sent, losses = Clock(self._place.device), SENT.sent(), list[Any]()
        clock.mark()
        for _ in range(self._steps):
            losses.append(training.step(loader.next()))
            clock.mark()
        last = [float(loss) for loss in losses[-max(1, self._steps // 4) :]]
        sent_bytes = (SENT.sent() - sent) // self._steps
        return {"steps_s": clock.intervals(), "sent_bytes": sent_bytes, "loss_sum": sum(last) / len(last)}

    def _memory(self, setting: Setting, training: Training, loader: BatchLoader) -> dict[str, Any] | None:
        """Bytes of one step by class."""
        if not isinstance(training, EngineTraining) or untraceable(setting.job):
            return None
        for _ in range(max(1, self._warmup)):
            training.step(loader.next())
        return {**asdict(found := training.accounted(loader.next())), "timeline": thinned(found.timeline)}

    def _phases(self, setting: Setting, training: Training, loader: BatchLoader) -> dict[str, float]:
        """Seconds per step of each phase."""
        for _ in range(self._warmup):
            training.step(loader.next())
        stopwatch = Stopwatch(self._place.device)
        piped = setting.layout.pp > 1

        def on_phase(name: str) -> None:
            # under a pipeline the engine hears of the whole schedule alone; its stages mark the rest
            stopwatch.mark("bubble" if piped and name == "forward" else name)

        with stages_timed(stopwatch) if piped else contextlib.nullcontext():
            for _ in range(self._steps):
                stopwatch.mark("data")
                training.step(loader.next(), on_phase)
            stopwatch.mark("end")
        return {name: seconds / self._steps for name, seconds in stopwatch.seconds.items()}


def _loader(setting: Setting, rank: int, dataset: SampleSet) -> BatchLoader:
    job, layout = setting.job, setting.layout
    return BatchLoader(
        Feed.uniform(dataset, job.seed, job.data.global_batch),
        layout=layout,
        dp_index=layout.coordinates(rank).dp,
        start_step=0,
        depth=job.data.prefetch_steps,
    )


def main(plan_file: str, folder: str) -> None:
    """One rank; the launcher's environment says which."""
    torch.set_num_threads(1)  # as the service's workers do
    plan = json.loads(Path(plan_file).read_text())
    log = EventLog(Path(folder), int(os.environ["RANK"]))
    try:
        if plan["device"] == "cuda":
            prepare_nccl(os.environ)  # as the service's workers do
        place = WorkerPlace.of(plan["device"])
        segments = Segments(plan, place)
        gc.collect()
        gc.freeze()  # as the service's workers do
        described = segments.place()
        log.note("place", **described)
        for number, segment in enumerate(plan["segments"]):
            if described["data_sheet"] is None and plan["peak_tflops"] is None:
                log.note("product", **segments.product())
            log.note("segment", number=number, **segment, **segments.run(f"segment/{number}", **segment))
    except Exception as error:
        log.note("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        log.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
