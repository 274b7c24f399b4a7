"""``bench mfu``: the engine's speed, the shares of a step's time, and the gain of each optimisation and peer.

The engine runs as in a generation of the service, without Ray (worker.py): with nothing but its steps, and by
the loop of workers with exchange and snapshots (real_loop.py). Rounds take the base, the loop, every switch
and every peer once each, every second round in reverse, and compare within the round, so that a
drift of the machine cancels. Rates come from undisturbed steps; the breakdown is a pass of its own, which
waits for the device at every phase.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from picotron_ray.bench.common.event_log import Event, Events
from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.process import Launched, torchrun
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.bench.mfu.memory_timeline import as_html
from picotron_ray.bench.mfu.peers import CHECKOUTS, chosen_peers, peer
from picotron_ray.bench.mfu.result import memory_of, result
from picotron_ray.bench.mfu.settings import (
    SWITCHES,
    Refusal,
    Setting,
    alone,
    base_setting,
    by_the_loop,
    slots_base,
    switched,
)
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.driver.asked_files import refuse_unwritable, write_asked
from picotron_ray.runtime.driver.resolve_job import DATA, OWN_PRECISION, ResolvedJob, resolve, resolve_words

POLL_S = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MfuOptions:
    """Options of the command line; see its help."""

    workers: int
    steps: int
    warmup: int
    rounds: int
    ablate: bool
    peers: str
    picotron: Path | None
    torchtitan: Path | None
    peak_tflops: float | None
    only: str = ""
    memory_timeline: Path | None = None

    @property
    def switches(self) -> list[str]:
        """Switches to try: those that begin with a word of ``only``. ConfigError where a word fits none."""
        words = [word.strip() for word in self.only.split(",")]
        found = [switch for switch in SWITCHES if switch.startswith(tuple(words))]
        fits = all(word and any(switch.startswith(word) for switch in SWITCHES) for word in words)
        if self.only and not (fits and self.ablate):
            raise ConfigError(
                f"--only: saw {self.only!r}, expected with --ablate the beginning of a switch, such as comm.,"
                " or several with commas between"
            )
        return found if self.ablate else []

    @property
    def checkouts(self) -> dict[str, Path]:
        """Checkouts of the peers' code, as far as they were given."""
        given = {name: getattr(self, name) for name in CHECKOUTS}
        return {name: path for name, path in given.items() if path is not None}


def bench(config: str, overrides: Sequence[str], options: MfuOptions, say: Say) -> dict[str, Any]:
    """Measure; returns all figures and every step's time.

    Raises ConfigError, before anything is started, for a config or options that cannot be used.
    """
    if options.peak_tflops is not None and not options.peak_tflops > 0:
        raise ConfigError(f"--peak-tflops: saw {options.peak_tflops:g}, expected a number above 0")
    refuse_unwritable("--memory-timeline", options.memory_timeline)
    switches, peers = options.switches, chosen_peers(options.peers, options.checkouts)
    asked = resolve_words(config, [*overrides, *alone(options.workers)]).job
    device = _device(asked, options.workers)
    if asked.precision == "auto":
        overrides = [*overrides, f"precision={_settled(asked, device).precision}"]
    base = base_setting(config, overrides, options.workers, device)
    found = [*by_the_loop(base), *switched(base, switches), *(peer(base, name) for name in peers)]
    settings = [base, *(item for item in found if isinstance(item, Setting))]
    refused = {item.name: item.reason for item in found if isinstance(item, Refusal)}
    resolve(ResolvedJob(base.job), (DATA,))  # once for all settings, and refused here
    folder = tempfile.TemporaryDirectory(prefix="picotron-bench-")
    with sigterm_exits(), folder as name, slots_folder(settings) as slots:
        events = measure(settings, options, Path(name), say, accounted=True, slots=slots)
    if options.memory_timeline is not None:
        write_timeline(options.memory_timeline, base, memory_of(events)[0])
    return {
        "machine": {**machine(), **versions()},
        "options": {
            **asdict(options),
            **{name: str(path) for name, path in options.checkouts.items()},
            "memory_timeline": options.memory_timeline and str(options.memory_timeline),
        },
        **result(settings, refused, events, options.peak_tflops),
    }


@contextmanager
def slots_folder(settings: Sequence[Setting]) -> Iterator[Path | None]:
    """Make the folder of the slots, where a setting takes snapshots; it goes at the end."""
    if all(setting.kind != "loop" for setting in settings):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="picotron-bench-", dir=slots_base(settings[0])) as name:
        yield Path(name)


def _device(job: JobConfig, workers: int) -> str:
    """``cpu`` or ``cuda``; raises ConfigError where a worker would have no GPU."""
    asked = job.cluster.device
    if asked == "cpu":
        return asked
    import torch  # takes a second

    gpus = torch.cuda.device_count()
    if asked == "auto" and not gpus:
        return "cpu"
    if gpus < workers:
        raise ConfigError(
            f"--workers: saw {workers}, but {gpus} GPUs; give fewer, or cluster.device=cpu to train without"
        )
    return "cuda"


def _settled(job: JobConfig, device: str) -> JobConfig:
    """The job as this machine's devices settle it."""
    cluster = job.cluster.model_copy(update={"device": device})
    return resolve(ResolvedJob(job.model_copy(update={"cluster": cluster})), (OWN_PRECISION,)).job


def segments(settings: int, rounds: int) -> list[dict[str, Any]]:
    """Plan the segments: rounds there and back, then the base once more, phase by phase."""
    order = [list(range(settings)), list(reversed(range(settings)))]
    timed = [{"index": index, "phases": False} for number in range(rounds) for index in order[number % 2]]
    return [*timed, {"index": 0, "phases": True}]


def accounts(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """Plan a segment for each of our own settings, in which the memory of a step is accounted."""
    ours = [index for index, setting in enumerate(settings) if setting.kind == "engine"]
    return [{"index": index, "phases": False, "traced": True} for index in ours]


def measure(
    settings: Sequence[Setting],
    options: MfuOptions,
    folder: Path,
    say: Say,
    *,
    accounted: bool = False,
    slots: Path | None = None,
) -> list[Event]:
    """Run every segment; returns what the processes noted.

    Args:
        accounted: whether a step of each setting is taken whose memory is accounted.
        slots: folder of snapshots, for settings of the kind ``loop``.
    """
    order = [*segments(len(settings), options.rounds), *(accounts(settings) if accounted else [])]
    plan = {
        "settings": [setting.to_dict() for setting in settings],
        "device": settings[0].job.cluster.device,
        "segments": order,
        "steps": options.steps,
        "warmup": options.warmup,
        "checkouts": {name: str(path.resolve()) for name, path in options.checkouts.items()},
        "peak_tflops": options.peak_tflops,
        **({} if slots is None else {"slots": str(slots)}),
    }
    file, events = folder / "plan.json", Events(folder / "events")
    file.write_text(json.dumps(plan))
    workers = Launched("bench mfu", folder / "workers")
    script = "picotron_ray.bench.mfu.worker"
    try:
        workers.launch(torchrun(options.workers, script, str(file), str(folder / "events")))
        told = 0
        while workers.ended() is None:
            time.sleep(POLL_S)
            told = _tell(events.read(), told, settings, len(order), say)
        noted = events.read()
        failed = [event["error"] for event in noted if event["what"] == "failed"]
        if failed:
            raise PicotronError(f"bench mfu: a worker failed: {failed[0].splitlines()[0][:300]}")
        if workers.ended():
            workers.check()
        return noted
    finally:
        workers.stop()


def write_timeline(file: Path, base: Setting, memory: Mapping[str, Any] | None) -> None:
    """Write the base's timeline as HTML.

    Raises:
        PicotronError: its steps cannot be traced, or the file not written.
    """
    if memory is None:
        raise PicotronError(f"--memory-timeline: {untraceable_words(base)}")
    page = as_html(f"Memory of a step of {base.job.name}, {base.layout}", memory)
    write_asked("--memory-timeline", file, page)


def untraceable_words(setting: Setting) -> str:
    """Say why a setting's memory was not accounted."""
    return f"saw {setting.name}, whose compiled or recorded steps run no operators; switch those kernels off"


def _other(event: Event) -> str:
    return "memory by class" if "memory" in event else "phase by phase"


def _tell(noted: Sequence[Event], told: int, settings: Sequence[Setting], total: int, say: Say) -> int:
    done = [event for event in noted if event["what"] == "segment" and event["rank"] == 0]
    for event in done[told:]:
        steps = event.get("steps_s")
        rate = event.get("refused") or (f"{mean(steps):.4g} s a step" if steps else _other(event))
        say(f"{event['number'] + 1} of {total}: {settings[event['index']].name}: {rate}")
    return len(done)
