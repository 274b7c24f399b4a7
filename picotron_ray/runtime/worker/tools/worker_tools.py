"""Tools of one worker: a recording of some steps, breakpoints, and looks at values while all ranks stay.

Orders come from a person through the node's agent, on threads of their own. The thread that trains takes
them up at the next boundary. There, flags of the step's exchange say what concerns all ranks:

- ``GO``: recordings that are armed begin with the next step, on all their ranks.
- ``PATIENT``: a recording slows some rank down. Until nobody says so any more, no phase counts as a hang
  before ``elastic.first_step_timeout_s``, and no phase's length is learned.
- ``HOLD``: a breakpoint was hit, or a recording is to be saved. All ranks stay at the boundary in the phase
  ``hold``, in which nothing counts as a hang for ``HOLD_S``, and exchange flags until none of them says
  ``HOLD``. So they leave after the same exchange. A request to stop the run ends it too.
- ``DEBUGGED``: a debugger is attached to some rank. Any phase may take ``debugger.LIMIT_S``.

Without any of that a boundary costs a comparison.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.data.dataset import DataSplits
from picotron_ray.debug.breakpoints import Breakpoint
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.tool_names import SUFFIX
from picotron_ray.runtime.worker.tools.breaks import Breaks
from picotron_ray.runtime.worker.tools.debugger import LIMIT_S as DEBUGGED_S
from picotron_ray.runtime.worker.tools.debugger import Debugger
from picotron_ray.runtime.worker.tools.looks import look
from picotron_ray.runtime.worker.tools.profiler import OnPhase
from picotron_ray.runtime.worker.tools.recordings import recording_of
from picotron_ray.runtime.worker.tools.window import RecordedSteps, WindowedTool
from picotron_ray.train.engine import Engine
from picotron_ray.train.step_sync import DEBUGGED, GO, HOLD, PATIENT, STOP
from picotron_ray.train.step_tools import FlagsOfAll, StepTools

HOLD_S = 600.0
"""Limit of one exchange while all ranks stay: one of them may be about to end a recording."""
POLL_S, LOOK_POLL_S = 0.05, 0.002
CLOCK_ROUNDS = 16
"""Exchanges at the begin of a hold, without a pause, whose times tell how far apart clocks are."""
LIMIT_BYTES = 1 << 30
"""Of one recording, before it is compressed."""


class Raises(Protocol):
    """Flags that the next exchange takes along (`train.loop.Requests`)."""

    def add(self, flag: int) -> None:
        """Raise a flag."""


class ToolPlace(NamedTuple):
    """Generation that a worker takes part in, as its tools need it."""

    rank: int
    requests: Raises
    engine: Engine


class WorkerTools(StepTools):
    """Tools of one worker, for one generation after the other.

    Args:
        folder: for recordings, on disk.
        telemetry: path of the telemetry page; None: there is none.
        data: of the run; None: nobody is to look at rows.
    """

    def __init__(
        self,
        job: JobConfig,
        page: Page,
        worker: str,
        folder: Path,
        device: torch.device,
        telemetry: Path | None,
        data: DataSplits | None = None,
    ) -> None:
        self._job, self._page, self._device, self._telemetry = job, page, device, telemetry
        self._data = data
        self._path = folder / f"{worker}{SUFFIX}"
        self._lock = threading.Lock()
        self._place: ToolPlace | None = None
        self._breaks: Breaks | None = None
        self._tool: WindowedTool | None = None
        self._debugger = Debugger(job.debug.attach, lambda attached: page.put(debugged=attached))
        self._listeners: dict[str, OnPhase] = {}
        self._trains = 0  # thread of the phases that they hear of
        self._plain_on_phase: OnPhase | None = None
        self._held_step = 0  # > 0: all ranks stay after this step
        self._open, self._looking = False, 0  # for looks at values, and those under way

    # --- the generation ------------------------------------------------------------------------------

    def join(self, rank: int, requests: Raises, engine: Engine) -> WorkerTools:
        """Begin with a generation; returns itself."""
        self._place = ToolPlace(rank, requests, engine)
        self._breaks = Breaks(self._page, rank, lambda: requests.add(HOLD))
        return self

    def leave(self) -> None:
        """End what concerns the generation; its engine is let go of."""
        if self._tool is not None:
            self._tool.give_up("the generation ended before its last step was recorded")
        if self._breaks is not None:
            self._breaks.close()
        self._open = False
        self._place = self._breaks = None
        self._held_step, self._page.least_limit_s = 0, 0.0
        for name in list(self._listeners):
            self._listen(name, None)

    # --- the thread that trains ------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Hear that a step begins."""
        tool, place = self._tool, self._place
        if place is not None and self._debugger.attached:
            place.requests.add(DEBUGGED)
        if tool is None or place is None or tool.state != "running":
            return
        tool.begin(step)
        place.requests.add(PATIENT | (HOLD if tool.last else 0))

    def boundary(self, step: int, flags: int, flags_of_all: FlagsOfAll) -> None:
        """Hear that a step is over."""
        tool, page = self._tool, self._page
        if tool is not None:
            tool.end(step)
            if flags & GO:
                tool.go()
        if self._debugger.traced:
            self._debugger.clear()
        self._install_breaks()
        if flags & HOLD:
            flags |= self._hold(step, flags_of_all) & (DEBUGGED | GO)
        patient = flags & (GO | PATIENT)
        page.least_limit_s = self._job.elastic.first_step_timeout_s if patient else 0.0
        if flags & DEBUGGED:
            page.least_limit_s = max(page.least_limit_s, DEBUGGED_S)
            self._debugger.heard()

    def _hold(self, step: int, flags_of_all: FlagsOfAll) -> int:
        """Stay until no rank wants to, or the run is to stop; returns the last exchange's flags.

        A recording that is told to begin meanwhile begins with the next step: the one that was armed in the
        exchange with ``GO``, which is the same on all ranks, and not what was armed in its stead since. Where
        there was any ``GO``, that flag is returned too.
        """
        place, tool = self._place, self._tool
        gone, going = 0, None
        assert place is not None
        self._held_step, rounds = step, 0
        while True:
            self._page.phase("hold", HOLD_S)
            wanted = (HOLD if self._wants() else 0) | (DEBUGGED if self._debugger.attached else 0)
            place.requests.add(wanted)
            began_ns = time.time_ns()
            flags = flags_of_all()
            if tool is not None and tool.state == "stopped":
                tool.rounds.append((began_ns, time.time_ns()))
            rounds += 1
            self._install_breaks()  # what was removed meanwhile watches no more: a debugger may come
            if flags & DEBUGGED:
                self._debugger.heard()
            if flags & GO:
                gone, going = GO, self._tool
            if not flags & HOLD or flags & STOP:
                break
            self._open = True
            if rounds >= CLOCK_ROUNDS:
                if tool is not None:
                    tool.save()
                time.sleep(POLL_S)
        self._held_step, self._open = 0, False
        if self._breaks is not None:
            self._breaks.go_on()
        if going is not None and going is self._tool:
            going.go()
        return flags | gone

    def _install_breaks(self) -> None:
        """Put into force what was ordered of breakpoints."""
        if self._breaks is not None and not self._breaks.idle:
            self._breaks.install()
            self._listen("breaks", self._breaks.on_phase)

    def _wants(self) -> bool:
        """Whether this rank wants all to stay; where it does not, no look begins until others do."""
        tool, breaks = self._tool, self._breaks
        with self._lock:
            stops = breaks is not None and breaks.stops
            saves = tool is not None and tool.holds
            self._open = bool(stops or saves or self._looking)
            return self._open

    def _listen(self, name: str, listener: OnPhase | None) -> None:
        """Have a function hear of each phase, beside what heard of them before; None: not any more.

        Called by the thread that trains, and its phases alone are heard of: a slot is written by another one.
        """
        page, had = self._page, bool(self._listeners)
        if listener is None:
            self._listeners.pop(name, None)
        else:
            self._listeners[name], self._trains = listener, threading.get_ident()
        if self._listeners and not had:
            self._plain_on_phase, page.on_phase = page.on_phase, self._heard
        elif had and not self._listeners:
            page.on_phase, self._plain_on_phase = self._plain_on_phase, None

    def _heard(self, step: int, phase: str) -> None:
        if self._plain_on_phase is not None:
            self._plain_on_phase(step, phase)
        if threading.get_ident() == self._trains:
            for listener in tuple(self._listeners.values()):
                listener(step, phase)

    # --- orders ----------------------------------------------------------------------------------------

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order of a person; returns its answer, ``refused`` with a line where it is none."""
        try:
            place, breaks = self._place, self._breaks
            if place is None or breaks is None:
                return {"refused": "the generation has just ended; ask again once the run trains"}
            return self._carried_out(order["what"], order, place, breaks)
        except ConfigError as error:
            return {"refused": str(error)}

    def _carried_out(
        self, what: str, order: Mapping[str, Any], place: ToolPlace, breaks: Breaks
    ) -> dict[str, Any]:
        if what == "arm":
            with self._lock:
                return self._arm(order, place.engine)
        if what in ("state", "drop", "go"):
            return self._of_tool(what, order["key"], place)
        if what == "break":
            return {"break": self._add_break(order["break"], breaks)}
        if what == "attach":
            breaks.refuse_lines(
                "attach: a breakpoint watches a line until the end of a step: `rm` it, and ask again; the"
                " debugger has its own"
            )
            if self._tool is not None and self._tool.live:
                raise ConfigError("attach: a recording is under way; ask again when it is done")
            tell_all = partial(place.requests.add, DEBUGGED)
            return self._debugger.attach(order["port"], order["agent"], tell_all)
        if what in ("enable", "disable", "rm"):
            return breaks.change(order["number"], what)
        if what == "continue":
            return {"went_on": breaks.go_on()}
        if what == "breaks":
            held = {"held": self._held_step > 0, "held_step": self._held_step}
            return {"breaks": breaks.plain(), "hit": self._hit(breaks), **held}
        if what == "inspect":
            return self._inspect(order, place, breaks)
        raise ConfigError(f"order: saw {what!r}, which this version of the package does not know")

    def _add_break(self, data: Mapping[str, Any], breaks: Breaks) -> dict[str, Any]:
        if self._debugger.attached and not Breakpoint.read(data).phase:
            raise ConfigError("break: a debugger is attached to this rank; it has breakpoints of its own")
        return breaks.add(data)

    @staticmethod
    def _hit(breaks: Breaks) -> dict[str, Any] | None:
        return None if breaks.hit is None else {k: v for k, v in breaks.hit.items() if k != "locals"}

    def _arm(self, order: Mapping[str, Any], engine: Engine) -> dict[str, Any]:
        tool = self._tool
        if tool is not None and (tool.live or (tool.state == "armed" and not tool.stale)):
            raise ConfigError(
                "another recording is under way; one at a time: wait for its end, and ask again"
            )
        if self._debugger.attached and order["kind"] in ("call", "line"):
            raise ConfigError("trace: a debugger is attached to this rank, and traces it; end that one first")
        window = RecordedSteps(order["wait"], order["warmup"], order["active"])
        tells = self._listen, self._telemetry
        recording = recording_of(order, self._job, self._device, *tells, engine, self._data)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"no folder for recordings: {error}") from error
        self._tool = WindowedTool(order["key"], window, recording, self._path, LIMIT_BYTES)
        return {"armed": True}

    def _of_tool(self, what: str, key: str, place: ToolPlace) -> dict[str, Any]:
        tool = self._tool
        if tool is None or tool.key != key:
            return {"state": "none", "text": "this rank has no such recording any more"}
        if what == "go":
            place.requests.add(GO)
        elif what == "drop":
            tool.unwanted("it was dropped")
            if not tool.live:
                tool.drop()
                self._tool = None
        return {**tool.plain(), "memory_by_class": self._memory_by_class()}

    def _memory_by_class(self) -> dict[str, int]:
        """Bytes of the step whose memory was accounted, by class; empty: none was yet."""
        sizes = {kind: int(self._page.value(f"memory_{kind}_bytes")) for kind in MEMORY_CLASSES}
        return {kind: size for kind, size in sizes.items() if size >= 0}

    def _begins_look(self) -> bool:
        """Begin a look, unless this rank has just told the others that it wants to go on."""
        with self._lock:
            begins = self._held_step > 0 and self._open
            self._looking += begins
            return begins

    def _inspect(self, order: Mapping[str, Any], place: ToolPlace, breaks: Breaks) -> dict[str, Any]:
        """Look at values while this rank keeps all others at the boundary."""
        while not self._begins_look():
            if not self._held_step:
                raise ConfigError("no breakpoint holds the run, and values change: set one with `break`")
            time.sleep(LOOK_POLL_S)
        try:
            return look(order, place.engine, breaks.hit)
        finally:
            with self._lock:
                self._looking -= 1
