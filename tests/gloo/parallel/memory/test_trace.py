"""The trace of a step: its peak to the byte, what each storage is for, and that it changes nothing."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.memory import MEMORY_CLASSES
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.parallel.memory.trace import MemoryAccount, MemoryTrace
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.memory_account import accounted_step, held, untraceable
from tests.gloo.parallel.memory.test_recompute import LENGTH, ROWS, job, measured
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.memory_jobs import traced_peaks
from tests.support.selection import also_deep

TOKENS = np.random.default_rng(0).integers(0, 260, (1, ROWS, LENGTH + 1))
BATCH = StepBatch(1, TOKENS, np.ones((1, ROWS)), ROWS * LENGTH, (0, ROWS), bytes(16))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def trained(policy: str) -> Engine:
    """An engine that has taken one step."""
    engine = build_engine(job(), Layout(micro_batch=ROWS, recompute=policy), 0, None, CPU)
    engine.initialise(0)
    stepped(engine)(lambda _: None)
    return engine


def stepped(engine: Engine) -> Callable[[Callable[[str], None]], float]:
    def step(phase: Callable[[str], None]) -> float:
        loss, _ = engine.gradients_of(BATCH, phase)
        phase("optimizer")
        engine.optimizer_step(1e-3)
        return loss

    return step


def account(policy: str) -> MemoryAccount:
    engine = trained(policy)
    _, found = accounted_step(engine, stepped(engine))
    engine.close()
    return found


@pytest.mark.parametrize("policy", ["none", "selective", "full", "int8"])
def test_its_peak_is_the_one_that_is_measured_apart(policy: str) -> None:
    found = account(policy)
    assert found.peak_bytes == measured(job(), Layout(micro_batch=ROWS, recompute=policy))[1]
    assert sum(found.by_class.values()) == found.peak_bytes
    assert tuple(found.by_class) == tuple(found.most) == MEMORY_CLASSES


def test_each_class_is_what_it_is_called() -> None:
    engine = trained("none")
    lasting = {
        kind: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
        for kind, tensors in held(engine).items()
    }
    _, found = accounted_step(engine, stepped(engine))
    engine.close()
    assert {kind: found.most[kind] for kind in lasting} == lasting
    assert lasting["optimizer"] == 2 * lasting["weights"] == 2 * lasting["gradient"]
    estimate = memory_estimate(job(), Layout(micro_batch=ROWS)).activation_bytes
    assert found.most["activation"] == pytest.approx(estimate, rel=0.06)


def test_recomputed_activations_are_temporary_and_kept_inputs_are_not() -> None:
    kept, again = account("none"), account("full")
    assert again.most["activation"] < 0.1 * kept.most["activation"]
    assert again.most["temporary"] > 2 * kept.most["temporary"]


def test_the_timeline_ends_as_it_began_and_says_the_phases() -> None:
    found = account("none")
    times = [at for at, _ in found.timeline]
    assert times == sorted(times)
    assert max(sum(classes) for _, classes in found.timeline) == found.peak_bytes
    assert [name for _, name in found.phases] == ["forward", "backward", "reduce", "clip", "optimizer"]
    assert sum(found.timeline[-1][1]) < found.peak_bytes / 3


def test_a_traced_step_computes_the_same_bits() -> None:
    traced, plain = trained("selective"), trained("selective")
    (loss, _), expected = accounted_step(traced, stepped(traced)), stepped(plain)(lambda _: None)
    assert loss == expected
    for mine, other in zip(traced.state(), plain.state(), strict=True):
        assert torch.equal(mine.values(), other.values())
    traced.close()
    plain.close()


def test_what_lives_on_keeps_no_trace_alive() -> None:
    lives = torch.ones(8)
    trace = MemoryTrace({"weights": [lives]})
    with trace:
        more = lives + 1
    assert trace.account({}).peak_bytes == 2 * lives.nbytes
    gone = weakref.ref(trace)
    del trace
    gc.collect()
    assert gone() is None
    assert more.sum() == 16


def test_a_resized_storage_counts_with_its_new_size() -> None:
    """As FSDP's gathered weights: no operator tells of it, and they are there before the step."""
    gathered, freed = torch.zeros(1000), torch.zeros(500)
    freed.untyped_storage().resize_(0)
    trace, plain = MemoryTrace({"temporary": [gathered]}), torch.UntypedStorage.resize_
    with trace:
        gathered.untyped_storage().resize_(0)
        small = torch.ones(10)
        gathered.untyped_storage().resize_(40000)
        freed.untyped_storage().resize_(8000)
        freed.untyped_storage().resize_(0)
        large = torch.ones(1000)
    assert torch.UntypedStorage.resize_ is plain
    assert trace.account({}).peak_bytes == 40000 + small.nbytes + 8000 > 40000 + small.nbytes + large.nbytes


@pytest.mark.parametrize("zero", [3, *also_deep(1, 2)])
def test_gathered_weights_count_while_they_are_there(pool: Pool, zero: Zero) -> None:
    """Against a count that reads every living storage after every operator."""
    config = make_job("adamw", 4, MODEL.model_copy(update={"layers": 4}))
    for traced, counted in pool.run(2, traced_peaks, config, Layout(dp=2, zero=zero)):
        assert traced == counted


def test_its_work_grows_with_what_is_made_and_not_with_its_square() -> None:
    """Seen: 20.7 s for 8,000 storages that live, since all of them were read again at every new peak."""
    x, held_back = torch.ones(8), []
    began = time.process_time()
    with MemoryTrace({}) as trace:
        for _ in range(20_000):
            held_back.append(x + 1)
    assert time.process_time() - began < 10.0, "2 s on a busy core; the square took over 100 s"
    assert trace.account({}).peak_bytes == sum(y.nbytes for y in held_back)


@pytest.mark.parametrize(
    ("kernels", "words"),
    [({"compile": True}, "compiled"), ({"activation": "compiled"}, "compiled"), ({}, "")],
)
def test_compiled_code_is_not_traced(kernels: dict[str, object], words: str) -> None:
    config = job()
    said = untraceable(config.model_copy(update={"kernels": config.kernels.model_copy(update=kernels)}))
    assert words in said
    assert bool(said) == bool(words)
