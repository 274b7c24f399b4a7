"""Values inside of events and commands: workers, generations, states, slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE, Calibration


@dataclass(frozen=True, slots=True, order=True)
class GenerationId:
    term: int
    n: int

    def __str__(self) -> str:
        return f"{self.term}.{self.n}"


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """Identity of a state. The order is that in which states were written, whichever of them count."""

    generation: GenerationId
    step: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part ``index`` of ``count`` of the state that ``Layout.state_group`` number ``group`` holds."""

    group: int
    index: int = 0
    count: int = 1


SlotIdentity = tuple[str, str, GenerationId, int]
"""Node, file, generation and step of a slot. Files are reused: nothing remembers one by its name alone."""


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """A sealed snapshot slot, as its node's agent reports it."""

    node: str
    slot: str  # file name in the node's folder
    generation: GenerationId
    step: int
    rank: int  # of the writer, in its generation
    fragments: tuple[Fragment, ...]

    @property
    def identity(self) -> SlotIdentity:
        return self.node, self.slot, self.generation, self.step


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Assignments to each expert of a layer, over the global batches of the last steps."""

    layer: int
    loads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Shares of a state that one node holds whole, and others too.

    Fields:
        groups: state groups of the writers' layout that are whole there.
        slots: files in the node's folder that make them up.
    """

    node: str
    groups: tuple[int, ...]
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a generation's state; exactly one of the three kinds."""

    kind: Literal["init", "slots", "commit"]
    step: int = 0
    generation: GenerationId | None = None  # slots, commit: who wrote it
    slots: tuple[SlotInfo, ...] = ()
    manifest: str = ""  # commit: key of the manifest
    layout: Layout | None = None  # slots: the layout of the writers
    digest: str = ""  # commit: blake3 of the manifest; "" where an older version wrote the log
    copies: tuple[StateCopy, ...] = ()  # slots: of shares that several nodes hold

    @property
    def identities(self) -> tuple[SlotIdentity, ...]:
        """All slots that members may read, each once."""
        named = [(slot.node, slot.slot, slot.generation, slot.step) for slot in self.slots]
        if self.generation is not None:
            state = self.generation, self.step
            named += [(copy.node, name, *state) for copy in self.copies for name in copy.slots]
        return tuple(dict.fromkeys(named))


@dataclass(frozen=True, slots=True)
class Member:
    worker: str
    node: str


@dataclass(frozen=True, slots=True)
class Link:
    """One ancestor of a generation: its states up to step ``through`` are part of the run's history."""

    generation: GenerationId
    through: int


@dataclass(frozen=True, slots=True)
class Rewind:
    """Return to an older state for a bad step: steps ``to_step`` + 1 to ``bad_step`` are passed over.

    They count as steps, but their samples are not fed, by no generation that follows.
    """

    to_step: int
    bad_step: int
    reason: str  # non-finite, spike

    @property
    def passed(self) -> range:
        """Steps that are passed over."""
        return range(self.to_step + 1, self.bad_step + 1)


@dataclass(frozen=True, slots=True)
class NodeTraits:
    """Traits of a node that planning and placement go by.

    Fields:
        device_bytes: memory of its smallest device, on a node without GPUs a worker's share of the host's; 0:
            not known.
        domain: failure domain: nodes of one may go together; empty: the node is its own.
        has_gpus: its workers compute on GPUs, else in the host's memory.
        hardware: product names of its GPUs; empty: it has none, or they are not known.
    """

    node: str
    device_bytes: int = 0
    domain: str = ""
    has_gpus: bool = False
    hardware: str = ""


Settings = tuple[tuple[str, str], ...]
"""Dotted config keys and their values as JSON, or plain words (``config.settings``)."""


@dataclass(frozen=True, slots=True)
class LayoutQuestion:
    """Question to the planner: the cheapest layout on these workers.

    Fields:
        workers: most that it may use.
        node_sizes: how many of them stand on each node, in rank order.
        device_bytes: memory of the smallest device among theirs; 0: not known.
        limit_bytes: largest estimate of a worker's memory that it may have; 0: as the device allows.
        settings: config keys that hold instead of the job's.
        calibration: what was measured against the cost model.
    """

    workers: int
    node_sizes: tuple[int, ...] = ()
    device_bytes: int = 0
    limit_bytes: int = 0
    settings: Settings = ()
    calibration: Calibration = NONE

    def __hash__(self) -> int:
        """Hash without the nodes one by one: questions are looked up often, and name thousands of nodes."""
        return hash((self.workers, len(self.node_sizes), self.device_bytes, self.limit_bytes))


@dataclass(frozen=True, slots=True)
class Strike:
    """Memory that ran out: on devices of this size no layout is taken whose estimate is above the limit."""

    device_bytes: int
    limit_bytes: int
    layout: str  # that ran out last, by name
    drop: float  # share by which the limit is below its estimate


@dataclass(frozen=True, slots=True)
class Adapted:
    """A change that the adaptation loop made, and what came of it.

    Fields:
        kind: of the change, as ``adapt.apply`` names it.
        target: what was changed, and to what; the same words are not tried twice.
        verdict: trial, as long as it is not judged; kept; back, taken back since it hurt; void, taken back
            since the generation failed before it was judged.
        expected: share of a step's seconds that it was to save.
        before_s, after_s: seconds per step before it, and with it, without waits for data and copies.
        layout, settings: what a trial is taken back to; one that hurt holds them until that is done.
        began: generation that began with it; None: an older version wrote it.
        avoid: workers that are too slow, and whose place spares took.
        workers: names by rank, among whom rows and blocks of ``layout`` were shared out; empty: evenly.
    """

    kind: str
    target: str
    verdict: Literal["trial", "kept", "back", "void"]
    expected: float
    before_s: float
    after_s: float = 0.0
    layout: Layout | None = None
    settings: Settings = ()
    began: GenerationId | None = None
    avoid: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on the newest change, which its generation's spec calls a trial for as long as that runs.

    Fields:
        began: generation that began with the change.
    """

    began: GenerationId
    verdict: Literal["kept", "back", "void"]
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Values that one rank held, where others held different ones."""

    rank: int
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepReplay:
    """Steps that the same members compute again, to find which of them held wrong values after ``step``.

    Fields:
        tensor, elements, bits: where they differed.
        ranks: what each held there.
    """

    step: int
    tensor: str
    elements: tuple[int, ...]
    ranks: tuple[HeldValues, ...]
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Divergence:
    """Replicas that differ, as their members have judged it, all alike.

    Fields:
        step: finished steps of the state that was looked at.
        agreed_step: newest state of which all ranks held the same.
        liars: ranks that held wrong values; empty: not known.
        settled: the state of ``step`` is sound now: it was computed again, and all ranks agree.
        replay: what to compare with what is computed again; None: nothing is left to try.
    """

    step: int
    agreed_step: int
    liars: tuple[int, ...] = ()
    settled: bool = False
    replay: StepReplay | None = None


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Everything a worker needs to take part: the member at index i of ``members`` is rank i.

    ``lineage`` holds the ancestors, oldest first. It travels with the spec (agents and the log keep it
    as it is), so that a later term can tell void states from valid ones even where the log entry of a
    generation in between was never written. Set by the machine alone.
    """

    id: GenerationId
    members: tuple[Member, ...]
    layout: Layout
    source: Source
    reason: str
    lineage: tuple[Link, ...] = ()
    struck: tuple[Strike, ...] = ()  # all that was known when it began, for later terms and launches
    rewinds: tuple[Rewind, ...] = ()  # all of the run's history, oldest first
    obeyed_step: int | None = None  # ``checkpoint.resume_step`` that it or an ancestor has gone back to
    settings: Settings = ()  # config keys that it and its successors run with instead of the job's
    adapted: tuple[Adapted, ...] = ()  # newest changes of the run, oldest first
    replaced: Settings = ()  # what the job said for the keys of ``settings``
    replay: StepReplay | None = None  # what it is to find out on the way

    @property
    def resume_step(self) -> int:
        return self.source.step

    def passes_over(self, step: int) -> bool:
        """Whether ``step`` is one of those that a rewind passes over."""
        return any(step in rewind.passed for rewind in self.rewinds)


@dataclass(frozen=True, slots=True)
class NodeDrain:
    """Node that an operator sends away. ``left_s``: seconds that it still has; 0: no deadline was given."""

    node: str
    left_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StandingOrders:
    """Orders of operators that hold until they are taken back, or the launch ends.

    Fields:
        paused: the run is not to compute.
        min_workers, max_workers: instead of the job's; 0: the job's hold.
        draining: nodes that are to go.
    """

    paused: bool = False
    min_workers: int = 0
    max_workers: int = 0
    draining: tuple[NodeDrain, ...] = ()


NO_ORDERS = StandingOrders()


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed checkpoint, as the log holds it."""

    step: int
    generation: GenerationId
    manifest: str  # key of the manifest
    seq: int  # number of the log entry
    digest: str = ""  # blake3 of the manifest
    damaged: bool = False  # not all of it is there: it is not restored from


OutcomeKind = Literal[
    "finished",
    "interrupted",
    FailureKind.PEER_LOST,
    FailureKind.FAILED,
    FailureKind.NUMERICS,
    FailureKind.DIVERGED,
]


@dataclass(frozen=True, slots=True)
class BusyWorker:
    """A worker that is inside ``run_generation``, and of which generation."""

    worker: str
    generation: GenerationId
