"""Muon: every layout as in one process, its iteration against an SVD, its momentum in any other layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.errors import LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.families.registry import parameter_table
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim import matrix_exchange
from picotron_ray.train.optim.matrix_exchange import Matrix, assign_owners, routes
from picotron_ray.train.optim.muon import COEFFICIENTS, STEPS, Muon, newton_schulz
from picotron_ray.train.optim.optimizer import decays
from picotron_ray.train.precision.precision import orthogonalization_dtype
from tests.gloo.parallel.test_custom_model import built
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    Result,
    assemble,
    batch,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import WEIGHTS_TOLERANCE, compare, reference, thinned, worst
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.muon_jobs import leg


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# fmt: off
LAYOUTS = [
    (MODEL, Layout(dp=2, micro_batch=3), 12),
    (MODEL, Layout(dp=3, zero=3, micro_batch=2), 7),  # 16 rows in 6, 6 and 4; 8 in 3, 3 and 2
    (MODEL, Layout(tp=2, micro_batch=6), 12),
    (MODEL, Layout(dp=2, pp=2, zero=2, micro_batch=2), 10),
    (MODEL, Layout(dp=2, tp=2, zero=3, micro_batch=3), 7),
    (MODEL, Layout(dp=2, cp=2, zero=2, micro_batch=3), 12),
    (MIXTURE, Layout(dp=2, tp=2, ep=2, micro_batch=3), 12),
    (MIXTURE, Layout(dp=4, ep=2, zero=3, micro_batch=2), 10),
]
# fmt: on
SMALL = ModelConfig(vocab_size=264, hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2)
CASES = thinned(
    LAYOUTS, (1, 3, 4, 7), lambda model, layout, _: f"{'mixture-' if model is MIXTURE else ''}{layout}"
)


def ranks_of(pool: Pool, job: JobConfig, layout: Layout, plant: str = "") -> list[Result]:
    return [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout, plant)]


def moments(ranks: list[Result], parameter: str) -> set[str]:
    """Names of the moments that a parameter has."""
    names = {piece[0] for rank in ranks for piece in rank.state}
    return {name.removesuffix(f"/{parameter}") for name in names if name.endswith(f"/{parameter}")}


@pytest.mark.parametrize(("model", "layout", "global_batch"), CASES)
def test_layout_equals_one_process(pool: Pool, model: ModelConfig, layout: Layout, global_batch: int) -> None:
    job = make_job("muon", global_batch, model)
    ranks = ranks_of(pool, job, layout)
    assert compare(job, layout, ranks) == []
    assert all(rank.stable for rank in ranks)
    for spec in parameter_table(model):
        inside = spec.name.startswith("layers.") and len(spec.shape) > 1
        expected = {"momentum"} if inside else {"exp_avg", "exp_avg_sq"}
        assert moments(ranks, spec.name) == expected, spec.name


def test_a_model_of_ones_own(pool: Pool) -> None:
    job, layout = make_job("muon", 12, built("chain")), Layout(dp=2, tp=2, zero=3, micro_batch=3)
    ranks = ranks_of(pool, job, layout)
    assert compare(job, layout, ranks) == []
    found = {name: moments(ranks, name) for name, _ in job.model.built.parameters}  # type: ignore[union-attr]
    matrices = {name for name, kinds in found.items() if kinds == {"momentum"}}
    assert len(matrices) == 4 * 6, "of each block q, k, v, out and two of the MLP"
    assert all(".mix." in name or ".mlp." in name for name in matrices)
    assert all(kinds == {"exp_avg", "exp_avg_sq"} for name, kinds in found.items() if name not in matrices)


@pytest.mark.parametrize("plant", ["muon-messages", "muon-shards"])
def test_a_planted_fault_is_noticed(pool: Pool, plant: str) -> None:
    job, layout = make_job("muon", 12), Layout(dp=2, zero=3, micro_batch=3)
    wrong = compare(job, layout, ranks_of(pool, job, layout, plant))
    assert any("after 3 steps" in line for line in wrong), f"{plant} went unnoticed: {wrong}"


@pytest.mark.parametrize("after", [Layout(tp=2, micro_batch=6), Layout(micro_batch=12)], ids=str)
def test_momentum_goes_on_in_another_layout(pool: Pool, tmp_path: Path, after: Layout) -> None:
    job, before = make_job("muon", 12), Layout(dp=3, zero=3, micro_batch=2)
    pool.run(before.world_size, leg, job, before, (0, 2), tmp_path)
    found = pool.run(after.world_size, leg, job, after, (2, 3), tmp_path)
    far, name = worst(assemble(found), assemble([reference("muon", 12).state]))
    assert far < WEIGHTS_TOLERANCE, name


# --- the iteration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9, 9), (6, 20), (20, 6)])
def test_newton_schulz_moves_singular_values_alone(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    found = newton_schulz(x)
    torch.testing.assert_close(found, u @ torch.diag_embed(values) @ v, rtol=0, atol=1e-12)
    torch.testing.assert_close(newton_schulz(1e3 * x), found, rtol=0, atol=1e-12)
    rough = newton_schulz(x.bfloat16()).double()
    assert float((rough - found).norm() / found.norm()) < 0.05


def test_newton_schulz_brings_singular_values_near_one() -> None:
    """From a hundredth of the largest on; what is nothing stays nothing."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q for _ in range(2))
    spread = torch.logspace(0, -2, 32, dtype=torch.float64)
    found = torch.linalg.svdvals(newton_schulz((u @ torch.diag(spread) @ v)[None]))
    assert 0.65 < float(found.min()) < float(found.max()) < 1.25
    assert not newton_schulz(torch.zeros(1, 4, 6)).any()


def test_types_of_the_iteration() -> None:
    types = {
        (precision, device): orthogonalization_dtype(
            make_job("muon", 4, precision=precision), torch.device(device)
        )
        for precision in ("fp64", "fp32", "bf16")
        for device in ("cpu", "cuda")
    }
    assert types.pop(("bf16", "cuda")) == torch.bfloat16
    assert {key: str(found) for key, found in types.items()} == {
        key: "torch.float64" if key[0] == "fp64" else "torch.float32" for key in types
    }


def test_update_equals_torchs() -> None:
    """torch.optim.Muon iterates in bfloat16, so ours does here; both scale as AdamW's updates are."""
    torch.manual_seed(0)
    spec = ParameterSpec("w", (12, 20), 0, "block", None, True, 1.0)
    start = torch.randn(12, 20)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    local = LocalParameter(spec, Box((0, 0), (12, 20)), True, True, ours)
    muon = Muon([local], assign_owners([spec], Layout(), 0), 0, 0.9, torch.bfloat16, CPU)
    other = torch.optim.Muon([theirs], lr=0.1, momentum=0.9, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        theirs.grad = torch.randn(12, 20)
        with torch.no_grad():
            muon.step({"w": theirs.grad.clone()}, {"w": 0.1}, {"w": 0.3})
        other.step()
    moved, expected = ours.detach() - start, theirs.detach() - start
    assert float((moved - expected).norm() / expected.norm()) < 0.01


def losses(optimizer: str, cache: Path) -> list[float]:
    """Mean loss per token of each step on real text, in one process."""
    rows, steps, width = 16, 40, 32
    text = DataConfig(
        source="text",
        path=f"{Path(json.__file__).parent}/*.py",
        sequence_length=width,
        global_batch=rows,
        held_out_fraction=0.2,
    )
    job = make_job(optimizer, rows, SMALL).model_copy(update={"data": text, "precision": "fp32"})
    train = build_dataset(text, SMALL.vocab_size, job.seed, cache).train
    engine = build_engine(job, Layout(micro_batch=rows), 0, None, CPU)
    engine.initialise(0)
    found = []
    for step in range(1, steps + 1):
        feed = make_batch(Feed.uniform(train, job.seed, rows), engine.layout, 0, step)
        found.append(float(engine.forward_backward(feed)) / feed.global_tokens)
        engine.reduce()
        engine.clip()
        engine.optimizer_step(job.optimizer.learning_rate)
    engine.close()
    return found


def test_learns_faster_than_adamw_at_its_learning_rate(tmp_path: Path) -> None:
    muon, adamw = losses("muon", tmp_path), losses("adamw", tmp_path)
    assert muon[0] == adamw[0]
    assert sum(muon[-10:]) < 0.95 * sum(adamw[-10:]) < 0.7 * sum(adamw[:10])


# --- who works on what ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [Layout(dp=4), Layout(dp=2, tp=2, zero=3), Layout(dp=2, tp=2, pp=2, ep=2)], ids=str
)
def test_each_matrix_is_worked_on_once_and_the_work_is_spread(layout: Layout) -> None:
    specs = [spec for spec in parameter_table(MIXTURE) if spec.matrix]
    rank = layout.world_size - 1
    matrices = [matrix for found in assign_owners(specs, layout, rank) for matrix in found]
    keys = [(matrix.name, matrix.box) for matrix in matrices]
    expected = sum(spec.shape[0] if spec.expert else 1 for spec in specs)
    assert len(keys) == len(set(keys)) == expected
    sizes = {other: 0 for other in range(layout.world_size) if layout.coordinates(other).pp == layout.pp - 1}
    for matrix in matrices:
        assert matrix.owner in dict(matrix.holders)
        assert sum(box.numel for _, box in matrix.sources) == matrix.box.numel
        sizes[matrix.owner] += matrix.box.numel
    assert max(sizes.values()) < 1.25 * min(sizes.values())
    others = [other for other in sizes if other != rank]
    assert all(assign_owners(specs, layout, other) == assign_owners(specs, layout, rank) for other in others)


def test_rounds_bound_what_an_owner_holds() -> None:
    specs = [spec for spec in parameter_table(MODEL) if spec.matrix]
    rounds = assign_owners(specs, Layout(dp=2), 0, most=500)
    largest = max(spec.numel for spec in specs)
    assert len(rounds) > 2
    for matrices in rounds:
        for rank in (0, 1):
            assert sum(m.box.numel for m in matrices if m.owner == rank) < 500 + largest
    assert sum(len(matrices) for matrices in rounds) == len(specs)


def matrix(name: str, rows: int, columns: int) -> ParameterSpec:
    return ParameterSpec(name, (rows, columns), 0, "block", None, True, 1.0)


def test_owners_and_rounds_by_hand() -> None:
    """m x n costs m²(2n + m): 192, 81, 40 and 40; the owner with less work takes the next, b before c."""
    specs = [matrix("b", 4, 2), matrix("a", 4, 4), matrix("c", 2, 4), matrix("d", 3, 3)]
    for most, expected in ((17, ["adb", "c"]), (18, ["adbc"])):
        rounds = assign_owners(specs, Layout(dp=2), 0, most=most)
        assert ["".join(m.name for m in found) for found in rounds] == expected
        assert {m.name: m.owner for found in rounds for m in found} == {"a": 0, "d": 1, "b": 1, "c": 1}
    assert matrix_exchange._held("x", Box((0, 0), (5, 3)), [(0, Box((0, 0), (5, 3)))]).cost == 117
    assert Matrix("x", Box((2, 0, 0), (1, 5, 3)), 0, (), ()).shape == (5, 3)


def test_the_nearest_holder_is_asked() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    places = {rank: layout.coordinates(rank) for rank in range(8)}
    for owner, ranks, nearest in ((0, [0, 1], 0), (0, [3, 1], 1), (3, [0, 2], 2), (1, [6], 6)):
        assert matrix_exchange._nearest(owner, ranks, places) == nearest


def test_messages_of_a_round_by_hand() -> None:
    first, second = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    parts = ((0, first), (1, second))
    matrices = [
        Matrix("a", Box((0, 0), (4, 4)), 1, parts, parts),
        Matrix("b", first, 0, ((0, first),), parts[:1]),
    ]
    there, back = routes(matrices, 0)
    assert (there.outgoing, there.incoming) == ({1: [(0, first)], 0: [(1, first)]}, {0: [(1, first)]})
    assert (back.outgoing, back.incoming) == ({0: [(1, first)]}, {1: [(0, first)], 0: [(1, first)]})
    there, back = routes(matrices, 1)
    assert (there.outgoing, there.incoming) == ({1: [(0, second)]}, {0: [(0, first)], 1: [(0, second)]})
    assert (back.outgoing, back.incoming) == ({0: [(0, first)], 1: [(0, second)]}, {1: [(0, second)]})


def test_experts_are_a_matrix_each() -> None:
    boxes = matrix_exchange._boxes(ParameterSpec("e", (2, 3, 5), 0, "block", None, True, 1.0, expert=True))
    assert list(boxes) == [Box((0, 0, 0), (1, 3, 5)), Box((1, 0, 0), (1, 3, 5))]
    assert list(matrix_exchange._boxes(matrix("w", 3, 5))) == [Box((0, 0), (3, 5))]


def test_boxes_that_leave_holes_are_refused() -> None:
    spec = ParameterSpec("w", (8, 4), 0, "block", None, True, 1.0)
    with pytest.raises(LayoutError, match=r"w: ranks hold \(4, 4\) at \(0, 0\), expected .*\(8, 4\)"):
        assign_owners([spec], Layout(dp=2), 0, lambda *_: (Box((0, 0), (4, 4)),))


# --- decay -----------------------------------------------------------------------------------------------


def test_what_decays() -> None:
    bare, plain = OptimizerConfig(decay_embeddings=False), OptimizerConfig()
    table = {spec.name: spec for spec in parameter_table(MODEL)}
    assert {n for n, s in table.items() if decays(s, plain)} == {n for n, s in table.items() if s.decay}
    lost = {name for name, spec in table.items() if decays(spec, plain) and not decays(spec, bare)}
    assert lost == {"embed.weight"}
    own = built("encoder").built
    assert own is not None
    assert own.embeddings == ("embed.weight", "positions.weight")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_embeddings_without_decay(optimizer: str) -> None:
    found = []
    for decay in (True, False):
        job = make_job(optimizer, 4)
        options = {"decay_embeddings": decay, "weight_decay": 0.5}
        job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update=options)})
        engine = build_engine(job, Layout(micro_batch=4), 0, None, CPU)
        engine.initialise(0)
        start = {item.shard.name: item.tensor.clone() for item in engine.weights()}
        engine.forward_backward(batch(job, engine.layout, 0, 1))
        engine.reduce()
        engine.optimizer_step(0.1)
        found.append({item.shard.name: item.tensor.clone() for item in engine.weights()})
        engine.close()
    differ = {name for name in start if not torch.equal(found[0][name], found[1][name])}
    assert differ == {"embed.weight"}
    lost = found[1]["embed.weight"] - found[0]["embed.weight"]
    torch.testing.assert_close(lost, 0.1 * 0.5 * start["embed.weight"], rtol=1e-9, atol=1e-12)
