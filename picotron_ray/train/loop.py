"""The training loop of one generation.

The loop runs from a restored step to the last one, or until it is asked to stop. Every step leaves behind

- a ledger line: the exact samples, loss and gradient norm, and whether the update was left out or a rewind
  passed over the samples,
- a heartbeat page that names the last clean state,
- a snapshot, when one is due, copied while the next step computes.

The loop knows no Ray and no recovery. A dead or stopped peer causes an exception here, and the worker around
it decides what to do.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.evaluation import figures, judges_commit
from picotron_ray.data.batch import StepBatch
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.errors import DivergedError
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine
from picotron_ray.train.evaluation import Evaluated, summed
from picotron_ray.train.link_probe import LinkProbe
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.replica_check import NoReplicaCheck
from picotron_ray.train.snapshot import Snapshotter
from picotron_ray.train.step_clock import NoClock
from picotron_ray.train.step_memory import StepMemory
from picotron_ray.train.step_sync import GO, LASTING, SNAPSHOT, STOP, Agreement, Contribution, exchange
from picotron_ray.train.step_tools import StepTools
from picotron_ray.train.update_policy import UpdatePolicy, bad_end


class HeartbeatPage(Protocol):
    """Shared-memory page that others read while the loop computes."""

    computing_step: int

    def phase(self, name: str, limit_s: float | None = None) -> None:
        """Say which phase of a step begins; ``limit_s``: how long it may take, instead of what is learned."""

    def put(self, **values: float) -> None:
        """Set values of the page."""

    def communication(self, figures: Mapping[str, tuple[float, float]]) -> None:
        """Note seconds of the newest step's communication, predicted and measured, by thing."""

    def count_step(self, seconds: float) -> None:
        """Add a step of this duration."""

    def count_bad(self, step: int) -> None:
        """Note a step whose update is left out."""


@dataclass(slots=True)
class Requests:
    """Flags that other threads raise. The next step's exchange carries them to all ranks."""

    _flags: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, flag: int) -> None:
        """Raise a flag (`step_sync.STOP`, `step_sync.SNAPSHOT`)."""
        with self._lock:
            self._flags |= flag

    def take(self) -> int:
        """Return all raised flags, and lower them."""
        with self._lock:
            flags, self._flags = self._flags, 0
            return flags


@dataclass(slots=True)
class Loop:
    """One rank's part of one generation, from ``start_step`` on.

    The exchange comes before the optimizer writes. So a rank whose state is clean at step k also knows the
    ledger line of step k. It can be the only survivor, and the run goes on from it.
    """

    job: JobConfig
    layout: Layout
    identity: dict[str, int]  # term, n: written into every ledger line
    rank: int
    device: torch.device
    engine: Engine
    loader: BatchLoader
    eval_batches: Sequence[StepBatch]
    snapshots: Snapshotter
    page: HeartbeatPage
    requests: Requests
    updates: UpdatePolicy
    tail: LedgerTail
    start_step: int
    eval_sets: Sequence[Sequence[StepBatch]] = ()
    """Batches of each held-out set beside, in the order of `config.support.evaluation.set_names`."""
    evaluated: Evaluated = field(default_factory=Evaluated)
    """Figures of the state at hand, which its snapshot carries."""
    passes_over: Callable[[int], bool] = lambda step: False
    """Whether a rewind passes over a step."""
    memory: StepMemory = field(default_factory=StepMemory)
    clock: NoClock = field(default_factory=NoClock)
    """Hears of each phase of a step too."""
    tools: StepTools = field(default_factory=StepTools)
    """Looks on between steps, and may hold all ranks there."""
    replicas: NoReplicaCheck = field(default_factory=NoReplicaCheck)
    """Compares what ranks hold alike after a step."""
    check_peers: Callable[[], None] = lambda: None
    """Raises where the generation was aborted."""
    tell: Callable[[str], None] = lambda words: None
    """Hears what changes within the generation, the same on all ranks."""
    stages: StageRecord | None = None
    """Where a curriculum's stages begin, where the run decides it."""
    _trained: bool = False  # this generation has finished a step
    _last_snapshot: int = -1
    _step_time_s: float = 0.0

    def run(self) -> Literal["finished", "interrupted"]:
        """Train to the last step, or until a request to stop.

        Raises:
            RuntimeError: a peer is gone, or the process groups were aborted.
            NumericsError: losses, gradients or weights are such that the run must end.
            DivergedError: ranks that hold the same differ, or have found out why they did.
        """
        self._last_snapshot = self.start_step
        measures = self.clock.measures_links
        probe = LinkProbe(self.engine.group, self.device, self.start_step) if measures else None
        last = max(self.start_step, self.job.steps)
        for step in range(self.start_step + 1, last + 1):
            if self.passes_over(step):
                self._pass_over(step)
                continue
            self.tools.begin(step)
            agreement = self.memory.step(step, partial(self._step, step))
            self._compare(step, leaving=step == last or bool(agreement.flags & STOP))
            if step == last:
                break
            if agreement.flags & STOP:
                self._final_snapshot(step)
                return "interrupted"
            judged = judges_commit(self.job, step)
            if judged:  # its figures are part of the commit
                self.clock.end()
                self._evaluate(step)
            self.clock.enter("snapshot")
            self._snapshot_if_due(step, agreement)
            self.clock.end()
            if probe is not None and probe.due(step):
                self.page.phase("sync")
                probe.run()
                self.clock.links(probe.links)
            self.tools.boundary(step, agreement.flags, self._flags_of_all)
            if step % self.job.evaluate.interval_steps == 0 and not judged:
                self._evaluate(step)
        if not math.isfinite(eval_loss := self._evaluate(last)):
            self.page.put(clean=-1)  # these weights reach no slot
            raise bad_end(last, eval_loss)
        self._final_snapshot(last)
        return "finished"

    def _step(self, step: int) -> Agreement:
        """Train on one global batch."""
        began = time.monotonic()
        page, engine = self.page, self.engine
        page.computing_step = step
        self.clock.begin(step)
        self._enter("data")
        batch = self.loader.next()
        self.clock.fed(batch)
        loss_sum, grad_norm = engine.gradients_of(batch, self._enter)
        self._enter("sync")
        agreement = exchange(self._contribution(step, batch, loss_sum, grad_norm), self.layout, self.device)
        self.clock.enter("other")
        page.communication(engine.choose_ways(agreement.costs))
        loss = agreement.loss_sum / batch.loss_tokens
        self.check_peers()  # before anything is written by numbers that an abort may have left stale
        skipped = self.updates.judge(step, loss, agreement.grad_norm, agreement.finite)
        self.clock.enter("snapshot")
        self.snapshots.wait_copied()  # the optimizer overwrites what a snapshot still reads
        self.clock.enter("other")
        rate = learning_rate(self.job.optimizer, step, self.job.steps)
        self.evaluated.forget()
        if skipped:
            engine.skip_step()
        else:
            page.put(clean=-1)
            self._enter("optimizer")
            engine.optimizer_step(rate)
            self.clock.enter("other")
        self._record(step, batch, agreement, rate, skipped)
        self.updates.passed(step, loss, skipped)
        self._decide(step, None if skipped else loss)
        page.put(clean=step)
        self._step_time_s = time.monotonic() - began
        if not self._trained:
            self._trained = True
            page.put(first_step_at_s=time.time())
        page.count_step(self._step_time_s)
        page.put(step=step)
        return agreement

    def _enter(self, phase: str) -> None:
        self.page.phase(phase)
        self.clock.enter(phase)

    def _compare(self, step: int, *, leaving: bool) -> None:
        """Compare what ranks hold alike, where that is due; a state that is not sound reaches no slot."""
        if not self.replicas.due(step, leaving=leaving):
            return
        self.page.phase("sync", self.job.elastic.first_step_timeout_s)
        try:
            self.replicas.check(step)
        except DivergedError as error:
            if not error.settled:
                self.page.put(clean=-1)
            raise

    def _pass_over(self, step: int) -> None:
        """Count a step whose samples are not fed, as all ranks do by themselves: the spec says which."""
        self.page.computing_step = step
        self.page.phase("data")
        self.evaluated.forget()
        self.engine.skip_step()
        self.updates.pass_over()
        self._decide(step, None)
        global_batch = self.job.data.global_batch
        line = {
            "step": step,
            **self.identity,
            "samples": [(step - 1) * global_batch, step * global_batch],
            "rows": [],
            "tokens": 0,
            "loss": None,
            "grad_norm": None,
            "learning_rate": learning_rate(self.job.optimizer, step, self.job.steps),
            "at_s": round(time.time(), 3),
            "passed_over": True,
        }
        self.tail.add(step, json.dumps(line, separators=(",", ":")))
        self.page.put(clean=step, step=step)

    def _decide(self, step: int, loss: float | None) -> None:
        """Let the curriculum decide by the step's loss, as all ranks do by themselves."""
        if self.stages is not None and (words := self.stages.passed(step, loss)):
            self.tell(words)

    def _contribution(self, step: int, batch: StepBatch, loss_sum: Tensor, grad_norm: Tensor) -> Contribution:
        """Collect what this rank tells the others at the end of a step."""
        load = self.engine.expert_load()
        return Contribution(
            loss_sum=loss_sum,
            grad_norm=grad_norm,
            rows=batch.rows,
            flags=self.requests.take(),
            digest=batch.digest,
            snapshots_apart_s=self.snapshots.apart_s,
            step_time_s=self._step_time_s,
            sealed=self.snapshots.sealed_step,
            imbalance=load.imbalance,
            dropped=load.dropped,
            at_s=time.time(),
            costs=self.engine.comm_costs(),
            step=step,
        )

    def _record(self, step: int, batch: StepBatch, agreement: Agreement, rate: float, skipped: str) -> None:
        """Write the step's ledger line and heartbeat; loss and norm of the page are the last update's."""
        loss = agreement.loss_sum / batch.loss_tokens
        global_batch = self.job.data.global_batch
        line: dict[str, Any] = {
            "step": step,
            **self.identity,
            "samples": [(step - 1) * global_batch, step * global_batch],
            "rows": line_rows(agreement.rows),
            "tokens": batch.global_tokens,
            "loss": loss if math.isfinite(loss) else None,  # JSON has no NaN
            "grad_norm": agreement.grad_norm if math.isfinite(agreement.grad_norm) else None,
            "learning_rate": rate,
            "at_s": round(agreement.at_s, 3),
        }
        if self.stages is not None:
            line["stages"] = self.stages.begun(step)
            if (record := self.stages.at_window()) is not None:
                line["windows"] = record
        if agreement.imbalance:
            line |= {"expert_imbalance": agreement.imbalance, "dropped": agreement.dropped}
        if changes := self.engine.adaptation.changes():
            line["precision"] = changes
            said = "; ".join(f"{', '.join(parts)} {name}" for name, parts in changes.items())
            self.tell(f"step {step}: precision of {said}")
        if skipped:
            line["skipped"] = skipped
            self.page.count_bad(step)
        else:
            self.page.put(loss=loss, grad_norm=agreement.grad_norm)
        self.tail.add(step, json.dumps(line, separators=(",", ":")))  # once: every snapshot carries it
        self.snapshots.observe(agreement.sealed)
        self.page.put(
            tokens=batch.tokens_until,
            padding_ratio=1 - batch.global_tokens / (global_batch * (batch.tokens.shape[-1] - 1)),
            stage=batch.stage,
            learning_rate=rate,
            sealed=self.snapshots.sealed_step,
            complete=agreement.sealed,
            wait_s=self.snapshots.waited_s,
            pinned_wait_s=self.snapshots.pinned_wait_s,
        )

    def _snapshot_if_due(self, step: int, agreement: Agreement) -> None:
        """Start a snapshot at checkpoints (pinned until they are uploaded) and at the snapshot interval."""
        pinned = step % self.job.checkpoint.interval_steps == 0 or bool(agreement.flags & SNAPSHOT)
        chosen = self.job.snapshot.interval_steps
        interval = agreement.snapshot_interval if chosen == "auto" else chosen
        sound = self.replicas.agreed_step == step  # as all ranks have just found
        if sound:
            self.snapshots.keep(step)
        if pinned or sound or step - self._last_snapshot >= interval:
            self._last_snapshot = step
            if pinned:
                self.snapshots.wait_copied()
                self.engine.settle()
            self.snapshots.begin(step, self.tail.lines(), pinned=pinned)

    def _evaluate(self, step: int) -> float:
        """Measure the held-out losses, summed over all ranks; returns that of the data's own part."""
        self.page.phase("evaluate")
        averaged = self.job.evaluate.weights == "ema"
        if averaged:
            self.snapshots.wait_copied()  # the average is in the weights' place meanwhile
        sets = [self.eval_batches, *self.eval_sets]
        sums = [self.engine.evaluate(batches, averaged)[0] for batches in sets]
        if self.job.meta.on:  # of tasks before their inner steps too
            sets.append(self.eval_batches)
            sums.append(self.engine.evaluate(self.eval_batches, averaged, adapted=False)[0])
        totals = summed(sums, self.layout, self.device)
        self.check_peers()  # no step's number tells these numbers from those of the last time
        counts = [sum(batch.loss_tokens for batch in batches) for batches in sets]
        loss, *others = (total / count for total, count in zip(totals, counts, strict=True))
        if self.job.meta.on:
            self.page.put(eval_loss_before=others.pop())
        self.evaluated.note(dict(zip(figures(self.job), (loss, *others), strict=False)))
        if others:
            held = {f"eval_set_{at}": each for at, each in enumerate(others)}
            self.page.put(eval_sets=len(others), **held)
        self.page.put(eval_loss=loss, eval_step=step)
        return loss

    def _flags_of_all(self) -> int:
        """Exchange flags between steps; those that are raised once stay raised for the next step's.

        But for ``GO``: whoever exchanges them hears for which tool it is, and may have another one then.
        """
        mine = Contribution(0.0, 0.0, flags=self.requests.take())
        flags = exchange(mine, self.layout, self.device).flags
        self.check_peers()
        self.requests.add(flags & ~(LASTING | GO))
        return flags

    def _exchange_apart(self, mine: Contribution) -> Agreement:
        """Exchange figures between steps; flags are not acted on, but raised again for the next step's."""
        agreement = exchange(replace(mine, flags=self.requests.take()), self.layout, self.device)
        self.check_peers()  # no step's number tells these numbers from those of the last time
        self.requests.add(agreement.flags)
        return agreement

    def _final_snapshot(self, step: int) -> None:
        """Seal a pinned snapshot of the state that the generation ends with.

        The ranks first tell each other what they have sealed, so that an older slot may be overwritten: no
        further step would tell it, and where a dead coordinator's checkpoint pins a slot there is no other.
        """
        self.page.phase("flush")
        self.snapshots.wait_sealed()
        mine = Contribution(0.0, 0.0, sealed=self.snapshots.sealed_step)
        self.snapshots.observe(self._exchange_apart(mine).sealed)
        self.engine.settle()
        self.snapshots.flush(step, self.tail.lines(), pinned=True)
