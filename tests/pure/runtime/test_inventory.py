"""Doors at size: recipes, overlays and mixed nodes against inventories of machines that are not here.

Whether a recipe fits is derived by hand: mixed precision with Adam keeps 16 bytes a parameter over all
workers (2 of the weight, 2 of the gradient, 4 each of master weight and two moments; ZeRO, arXiv:1910.02054,
section 3.1), and activations come on top. A card's room is its memory x 0.9 for what CUDA and NCCL take x 0.9
of margin: 69.3 GB of an H100's 85.5, 13.0 of a T4's 16.1.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.nvml import Card
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.memory import budget_bytes, memory_estimate
from picotron_ray.runtime.driver.inventory import InventoryNode, plan, with_those_to_come
from picotron_ray.runtime.ray_cluster import node_facts
from picotron_ray.runtime.ray_cluster.names import node_folder
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, look, small_files_bytes, snapshot_problem

ROOT = Path(__file__).resolve().parents[3]
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 81559 * 2**20)
T4 = Card("Tesla T4", (7, 5), 15360 * 2**20)
AMPLE = 10**15

# recipe: billions of parameters, 16 bytes of each over 8 cards in GB, fits 8 H100, fits 64 H100, fits 8 T4
RECIPES = {
    "tiny": (0.00, 0.0, True, True, True),
    "quickstart": (0.00, 0.0, True, True, True),
    "sft-chat": (0.00, 0.0, True, True, True),
    "gpt2-small": (0.12, 0.2, True, True, True),
    "smollm-135m": (0.13, 0.3, True, True, True),
    "gpt2-medium": (0.35, 0.7, True, True, True),
    "gemma-3-1b": (1.00, 2.0, True, True, True),
    "olmo2-1b": (1.48, 3.0, True, True, True),
    "smollm-1.7b": (1.71, 3.4, True, True, True),
    "gemma-2-2b": (2.61, 5.2, True, True, True),
    "llama-2-7b": (6.74, 13.5, True, True, False),
    "llama-3-8b": (8.03, 16.1, True, True, False),
    "deepseek-v2-lite": (15.71, 31.4, True, True, False),
    "gpt-oss-20b": (20.91, 41.8, True, True, False),
    "qwen3-30b-a3b": (30.5, 61.1, True, True, False),
    "llama-3-70b": (70.6, 141.1, False, True, False),
    "gpt-oss-120b": (116.83, 233.7, False, True, False),
    "llama-3.1-405b": (405.85, 811.7, False, False, False),
}
# recipe and card: how many would do, in whole nodes of 8: the first whose share of 16 bytes a parameter
# leaves room for activations; 0: none up to 512
WOULD_DO = {
    ("llama-2-7b", "Tesla T4"): 16,
    ("llama-3-8b", "Tesla T4"): 16,
    ("qwen3-30b-a3b", "Tesla T4"): 48,
    ("llama-3-70b", "NVIDIA H100 80GB HBM3"): 24,
    ("llama-3-70b", "Tesla T4"): 120,
    ("llama-3.1-405b", "NVIDIA H100 80GB HBM3"): 112,
    ("llama-3.1-405b", "Tesla T4"): 0,
    ("deepseek-v2-lite", "Tesla T4"): 24,
    ("gpt-oss-20b", "Tesla T4"): 32,
    ("gpt-oss-120b", "NVIDIA H100 80GB HBM3"): 32,
    ("gpt-oss-120b", "Tesla T4"): 192,
}


def recipe(name: str, *overrides: str) -> JobConfig:
    data = () if name in ("tiny", "quickstart") else ("data.path=/data",)
    return load_job(name, [*data, "cluster.min_workers=1", "cluster.max_workers=64", *overrides])


def nodes(card: Card | None, *sizes: int, room: int = AMPLE) -> list[InventoryNode]:
    return [
        InventoryNode(f"host-{index}", size, NodeFacts([card] * size if card else [], room))
        for index, size in enumerate(sizes)
    ]


def cases() -> list[object]:
    """The dear ones (a minute for all) are for the deep run."""
    found: list[object] = []
    for name, (_, _, *fits) in RECIPES.items():
        for (card, count), fit in zip(((H100, 1), (H100, 8), (T4, 1)), fits, strict=True):
            dear = count > 1 or "qwen3" in name or (not fit and name != "llama-2-7b")
            marks = [pytest.mark.deep, pytest.mark.timeout(300)] if dear else []
            label = f"{name}-{8 * count}-{card.name}"
            found.append(pytest.param(name, card, count, fit, marks=marks, id=label))
    return found


@pytest.mark.parametrize(("name", "card", "count", "fits"), cases())
def test_each_recipe_passes_or_is_refused_as_derived_by_hand(
    name: str, card: Card, count: int, fits: bool
) -> None:
    job = recipe(name)
    if fits:
        planned = plan(job, "cuda", nodes(card, *(8,) * count)).planned
        room = budget_bytes(job, profile_of("cuda", card.memory_bytes).memory_bytes)
        assert memory_estimate(job, planned.layout).total_bytes <= room
        return
    with pytest.raises(ConfigError, match=r"^layout: saw room for") as refused:
        plan(job, "cuda", nodes(card, *(8,) * count))
    enough = WOULD_DO[name, card.name]
    assert (f"; {enough} workers with {card.name} would do" in str(refused.value)) == (enough > 0)
    assert ("would do" in str(refused.value)) == (enough > 0)
    assert ("raise cluster.max_workers=64 too" in str(refused.value)) == (enough > 64)


def test_the_table_follows_from_16_bytes_a_parameter() -> None:
    known = {path.stem for path in (ROOT / "picotron_ray" / "recipes").glob("*.yaml")}
    assert set(RECIPES) == known - {"sinusoids"}  # whose model is known once it was built
    room = {card: 0.81 * card.memory_bytes / 1e9 for card in (H100, T4)}
    for name, (billions, share, *fits) in RECIPES.items():
        assert share == pytest.approx(16 * billions / 8, abs=0.11), name
        assert fits == [share < room[H100], share / 8 < room[H100], share < room[T4]], name


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_an_overlays_job_fits_the_pods_of_its_own_manifest(overlay: str) -> None:
    folder = ROOT / "deploy" / "overlays" / overlay / "cluster"
    job = load_job(str(folder / "job.yaml"), [])
    base = yaml.safe_load((ROOT / "deploy" / "base" / "raycluster.yaml").read_text())
    size = {patch["path"]: patch["value"] for patch in yaml.safe_load((folder / "size.yaml").read_text())}
    group = "/spec/workerGroupSpecs/0"
    [worker] = base["spec"]["workerGroupSpecs"]
    volume = (
        size.get(f"{group}/template/spec/volumes/0/emptyDir/sizeLimit")
        or (worker["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"])
    )
    resources = (
        size.get(f"{group}/template/spec/containers/0/resources")
        or (worker["template"]["spec"]["containers"][0]["resources"])
    )
    cards = int(resources["limits"].get("nvidia.com/gpu", 0))
    workers = cards or int(int(resources["limits"]["cpu"]) // job.cluster.cpus_per_worker)
    device, card = ("cuda", H100) if cards else ("cpu", None)
    room = int(volume.removesuffix("Gi")) * 2**30
    for replicas in ("minReplicas", "replicas", "maxReplicas"):
        count = size.get(f"{group}/{replicas}", worker[replicas])
        if count * workers >= job.cluster.min_workers:
            found = plan(job, device, nodes(card, *(workers,) * count, room=room))
            assert found.left_out == (), replicas


def test_nodes_without_room_for_their_slots_are_left_out_by_name() -> None:
    job = recipe("smollm-135m", "cluster.min_workers=8")
    need = 3 * 8 * plan(job, "cuda", nodes(H100, 8)).slot_bytes + small_files_bytes(job, 8)
    small, ample = nodes(H100, 8, room=need - 1)[0], nodes(H100, 8, 8, room=need)[1]
    assert plan(job, "cuda", [ample]).left_out == ()
    found = plan(job, "cuda", [small, ample])
    assert found.planned.layout.world_size <= 8
    [line] = found.left_out
    assert line.startswith("node host-0 is left out: snapshot.folder: saw room for ")
    assert line.endswith(
        "enlarge it, lower snapshot.slots, or name a disk folder in snapshot.overflow_folder"
    )
    with pytest.raises(ConfigError, match="node host-0 is left out"):
        plan(job, "cuda", [small])
    assert plan(job, "cuda", [small], alone=True).left_out == ()


def test_a_node_without_room_is_told_what_it_would_need(tmp_path: Path) -> None:
    job = recipe("tiny", "cluster.max_workers=2", f"snapshot.folder={tmp_path}")
    small = small_files_bytes(job, 2)
    assert small == 3 * 17_408 + 2 * (17_408 + 159_744), "markers, specs, and what else workers leave"
    mega, need = 10**6, 6 * 10**6 + small
    assert snapshot_problem(job, need, mega, 8) is None  # 3 slots of 1 MB for the 2 that may run there
    assert snapshot_problem(job, need - 1, mega, 1) is None
    assert "expected 0.00641 GB for 3 slots of 0.001 GB for each of 2 workers, and small" in str(
        snapshot_problem(job, need - 1, mega, 8)
    )


def test_the_slots_of_before_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_facts, "free_bytes", lambda folder: 100)
    assert look(str(tmp_path), "run").snapshot_bytes == 100
    folder = node_folder(str(tmp_path), "run", "node")
    folder.mkdir(parents=True)
    (folder / "w.0.slot").write_bytes(b"\0" * 2**22)
    (folder / "w.page").write_bytes(b"\0" * 2**20)
    taken = 512 * sum(path.stat().st_blocks for path in folder.iterdir())
    assert look(str(tmp_path), "run").snapshot_bytes == 100 + taken
    monkeypatch.undo()
    assert look(str(tmp_path / "none"), "run").snapshot_bytes == 0


def test_of_mixed_cards_the_smallest_counts_or_is_done_without() -> None:
    job = recipe("llama-3-8b")
    mixed = [*nodes(H100, 8), InventoryNode("small", 1, NodeFacts([T4], AMPLE))]
    assert plan(job, "cuda", mixed).planned == plan(job, "cuda", nodes(H100, 8)).planned
    assert plan(recipe("llama-2-7b"), "cuda", nodes(T4, 8, 8)).planned.layout.world_size > 8


def test_small_cards_are_not_done_without_below_the_least_number_of_workers() -> None:
    mixed = [*nodes(H100, 8), InventoryNode("small", 1, NodeFacts([T4], AMPLE))]
    with pytest.raises(ConfigError, match="saw room for 13 GB per worker"):
        plan(recipe("llama-3-8b", "cluster.min_workers=9"), "cuda", mixed)


def test_nodes_that_ray_may_add_are_planned_with() -> None:
    job = recipe("tiny", "cluster.max_workers=20")
    here = [*nodes(T4, 4), *nodes(H100, 8)]
    assert with_those_to_come(job, here) == here
    scaled = recipe("tiny", "cluster.max_workers=20", "cluster.autoscale=true")
    assert with_those_to_come(scaled, here) == [*here, here[1]]
    assert with_those_to_come(scaled, nodes(H100, 8, 8, 4)) == nodes(H100, 8, 8, 4)


def test_a_node_without_cards_counts_with_its_share_of_the_measured_memory() -> None:
    """8 GiB a worker, less what its process takes, hold what 1 GiB does not."""
    job = recipe("smollm-135m", "cluster.max_workers=4", "data.global_batch=8")
    ample, small = (InventoryNode("host", 4, NodeFacts([], AMPLE, host_bytes=gib * 2**30)) for gib in (32, 5))
    assert ample.facts.worker_bytes("cpu", 4) == 31 * 2**28
    assert ample.facts.worker_bytes("cuda", 4) == 0
    room = budget_bytes(job, profile_of("cpu", 8 * 2**30).memory_bytes)
    assert memory_estimate(job, plan(job, "cpu", [ample]).planned.layout).total_bytes <= room
    with pytest.raises(ConfigError, match=r"saw room for 0\.87 GB per worker"):
        plan(recipe("gpt2-medium", "cluster.max_workers=4", "data.global_batch=8"), "cpu", [small])
    fewer = recipe("smollm-135m", "cluster.max_workers=1", "data.global_batch=8")
    assert plan(fewer, "cpu", [small]).planned.layout.world_size == 1, "its share is of those that run"


def test_one_machine_is_never_told_to_add_workers_that_would_share_its_memory() -> None:
    """They would share what is there: only fewer of them, or less to hold, can help."""

    def refused(name: str, gib: int, *words: str) -> str:
        here = InventoryNode("host", 8, NodeFacts([], AMPLE, host_bytes=gib * 2**30))
        with pytest.raises(ConfigError) as error:
            plan(recipe(name, "data.global_batch=8", *words), "cpu", [here], alone=True)
        return str(error.value)

    line = refused("gpt2-medium", 3)
    assert "add workers" not in line
    assert "would do" not in line
    seen, needed = map(float, re.findall(r"([\d.]+) GB", line))
    assert 0 < seen < 1.01 * 0.81 * 2.75 * 1.073741824, "of one worker; several have less together"
    assert needed > max(seen, 16 * 0.35)
    assert "cluster.max_workers" not in line
    assert line.endswith("smaller, or take a machine with more memory")
    line = refused("gpt2-medium", 3, "layout.memory_budget_gib=0.01")
    assert line.endswith("smaller, raise layout.memory_budget_gib, or take a machine with more memory")
    fewer = refused("smollm-135m", 6, "cluster.max_workers=8")
    number = int(re.findall(r"set cluster.max_workers=(\d)", fewer)[0])
    here = InventoryNode("host", number, NodeFacts([], AMPLE, host_bytes=6 * 2**30))
    job = recipe("smollm-135m", "data.global_batch=8", f"cluster.max_workers={number}")
    assert plan(job, "cpu", [here], alone=True).planned.layout.world_size <= number


def test_more_workers_than_their_processes_alone_have_room_for_are_refused_with_the_number_that_has() -> None:
    """A typo in ``cluster.max_workers`` started process after process until the machine ran out."""
    job = recipe("quickstart", "cluster.max_workers=500")
    here = InventoryNode("laptop", 500, NodeFacts([], AMPLE, host_bytes=24 * 2**30))
    with pytest.raises(ConfigError, match=r"on this machine.*set cluster\.max_workers=\d\d,"):
        plan(job, "cpu", [here], alone=True)
