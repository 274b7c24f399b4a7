"""Memory of a generation: the account on the page, the rungs that are done, and a refusal with numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.config.settings import with_settings
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory_prediction import GROWTH
from picotron_ray.planner.memory_pressure import PATIENCE
from picotron_ray.runtime.heartbeat import Page, read_page
from picotron_ray.runtime.node_agent.metrics import _worker
from picotron_ray.runtime.worker import generation_memory, memory_reading
from picotron_ray.runtime.worker.generation_memory import GenerationMemory, estimated
from picotron_ray.runtime.worker.memory_limit import out_of_memory
from picotron_ray.runtime.worker.memory_reading import HeldMemory, held_memory, release_cached
from tests.gloo.parallel.memory.test_recompute import ROWS, job
from tests.gloo.parallel.memory.test_trace import stepped, trained

LAYOUT = Layout(micro_batch=ROWS)
SPEC = GenerationSpec(GenerationId(1, 1), (Member("w0", "n0"),), LAYOUT, Source("init"), "test")
CPU = torch.device("cpu")


def memory(folder: Path, **options: Any) -> tuple[GenerationMemory, Any]:
    config = job()
    config = config.model_copy(update={"memory": config.memory.model_copy(update=options)})
    page = Page(folder / "w0.page", config.elastic)
    resources = SimpleNamespace(job=config, device=CPU, page=page, memory_ratios={}, limited=False)
    return GenerationMemory(resources, config, SPEC, 0), resources  # type: ignore[arg-type]


def test_the_second_step_is_accounted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched, resources = memory(tmp_path)
    engine = trained("none")
    take = stepped(engine)
    watched.watch(engine)
    for step in (1, 2, 3):
        watched.step(step, lambda: take(lambda _: None))
        page = read_page(tmp_path / "w0.page")
        assert page is not None
        assert (page.memory_peak_bytes > 0) == (step > 1)
    engine.close()
    assert capsys.readouterr().out.count("memory of step 2 in MB: weights 2.1, gradient 2.1, optimizer") == 1
    samples = {(s.name, s.labels.get("class")): s.value for s in _worker(page)}
    assert samples["picotron_worker_memory_bytes", "optimizer"] == 2 * page.memory_bytes[0]
    assert samples["picotron_worker_memory_peak_bytes", None] == page.memory_peak_bytes
    (ratio,) = resources.memory_ratios["activation"]
    assert ratio == pytest.approx(1, rel=0.06)


def test_nothing_is_traced_where_it_is_off(tmp_path: Path) -> None:
    watched, resources = memory(tmp_path, account=False)
    for step in (1, 2, 3):
        watched.step(step, lambda: None)
    assert resources.memory_ratios == {}


def boundaries(
    folder: Path, monkeypatch: pytest.MonkeyPatch, readings: list[HeldMemory]
) -> tuple[list[str], Callable[[], None]]:
    """What is done at a boundary for each reading, and a function that takes all steps."""
    watched, _ = memory(folder, account=False, interval_steps=1)
    done: list[str] = []
    given = iter(readings)
    monkeypatch.setattr(generation_memory, "held_memory", lambda *_: next(given))
    monkeypatch.setattr(generation_memory, "release_cached", lambda _: done.append("release"))
    monkeypatch.setattr(generation_memory, "collect", lambda _: done.append("collect"))

    def steps() -> None:
        for step in range(1, len(readings) + 1):
            watched.step(step, lambda: None)

    return done, steps


def test_fragments_are_released_and_collected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, steps = boundaries(tmp_path, monkeypatch, [HeldMemory(60, 100, 100, 1000, 40)] * 6)
    steps()
    assert done == ["release", "collect"]


def test_activations_that_were_freed_are_no_fragments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: two needless releases of the whole cache in every generation, whose next step took it again."""
    stats = {"allocated_bytes.all.current": 20, "reserved_bytes.all.current": 60}
    properties = SimpleNamespace(total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "memory_stats", lambda device: {**stats, "allocated_bytes.all.peak": most}
    )
    for most, expected in ((58, []), (30, ["release", "collect"])):
        held = held_memory(torch.device("cuda"), 0, None)
        assert held == HeldMemory(20, 60, most, 80, 60 - most)
        done, steps = boundaries(tmp_path, monkeypatch, [held] * 4)
        steps()
        assert done == expected


def test_a_generation_is_watched_by_the_settings_that_it_runs_with(tmp_path: Path) -> None:
    _, resources = memory(tmp_path)
    spec = replace(SPEC, settings=(("precision", "bf16"),))
    job = with_settings(resources.job, spec.settings)
    found = GenerationMemory(resources, job, spec, 0)
    assert found._estimate == estimated(job, spec, 0) != estimated(resources.job, spec, 0)


def test_pressure_is_told_and_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = HeldMemory(1010 * 10**9, 1010 * 10**9, 1010 * 10**9, 1000 * 10**9)
    done, steps = boundaries(tmp_path, monkeypatch, [full] * (3 + PATIENCE))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"will not fit: .* 1\.01e\+03 GB of 1e\+03 GB"
    ) as caught:
        steps()
    assert out_of_memory(caught.value)
    assert done == ["release", "collect"]
    assert "memory mode memory-critical, was high-performance" in caplog.text
    assert caplog.text.count("needs cheaper recomputation or a smaller micro-batch") == 1
    page = read_page(tmp_path / "w0.page")
    assert page is not None
    assert page.memory_mode == 2


def test_the_c_library_says_what_is_in_use_and_gives_back_what_is_not() -> None:
    """Blocks below the size that is mapped by itself, every second one freed: holes that are held."""
    assert memory_reading._malloc("")[0] > 0
    blocks = [torch.empty(2**16 - 64, dtype=torch.uint8).fill_(1) for _ in range(1600)]
    full = held_memory(CPU, 10**12, None)
    del blocks[::2]
    gc.collect()
    holes = held_memory(CPU, 10**12, None)
    assert full.allocated - holes.allocated > 4e7
    assert holes.reserved - holes.allocated > 4e7
    assert holes.peak >= full.allocated - holes.allocated
    release_cached(CPU)
    assert len(blocks) == 800


def test_a_generation_begins_with_the_planners_estimate_and_goes_on_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA side, its pools emulated: what each is filled with."""
    filled: list[dict[str, float]] = []
    monkeypatch.setattr(generation_memory, "MemoryPools", lambda device, expected: filled.append(expected))
    watched, resources = memory(tmp_path, preallocate=True)
    resources.device = SimpleNamespace(type="cuda")
    estimate = estimated(resources.job, SPEC, 0)
    watched.pools()
    resources.memory_ratios = {"gradient": (1.05,), "optimizer": (0.9, 1.0)}
    watched.pools()
    first, later = filled
    assert first == {kind: pytest.approx(GROWTH[kind] * estimate[kind]) for kind in ("gradient", "optimizer")}
    assert later["gradient"] == pytest.approx(1.05 * estimate["gradient"])
    assert later["optimizer"] == pytest.approx(estimate["optimizer"])
