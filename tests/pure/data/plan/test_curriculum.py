"""Curriculum: the rows of each stage, any of them without those before, and how hard samples are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from picotron_ray.config.schema.curriculum import CurriculumConfig
from picotron_ray.data.plan import difficulty
from picotron_ray.data.plan.curriculum import StagedOrder, planned_starts
from picotron_ray.data.plan.difficulty import RankRequest, mean_lengths, ranked, rarity
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.plan.packing import PackedRows, Pieces
from picotron_ray.data.plan.pools import stage_pools
from picotron_ray.data.plan.score_files import write_scores
from picotron_ray.data.samples import Dataset
from picotron_ray.errors import DataError

REQUEST = RankRequest("id", "data", None, (("rarity", 1.0),), None)


def staged(firsts: tuple[int, ...]) -> StagedOrder:
    order = np.random.default_rng(0).permutation(100)
    return StagedOrder(7, 100, (order[:10], order[:50], order), firsts)


def test_a_stage_feeds_its_pool_epoch_after_epoch() -> None:
    order = staged((0, 33, 200))
    rows = order.samples(0, 500)
    for first, last, pool in ((0, 33, 10), (33, 200, 50), (200, 500, 100)):
        mine = rows[first:last]
        for at in range(0, len(mine) - pool + 1, pool):
            assert sorted(mine[at : at + pool].tolist()) == sorted(
                order.pools[(10, 50, 100).index(pool)].tolist()
            )
    assert len({tuple(rows[at : at + 10].tolist()) for at in (0, 10, 20)}) == 3, "shuffled anew"
    for first, last in ((0, 0), (30, 40), (199, 201), (450, 500)):
        assert np.array_equal(order.samples(first, last), rows[first:last])


def test_a_stage_that_begins_where_another_does_takes_its_place() -> None:
    order = staged((0, 20, 20))
    assert set(order.samples(20, 120).tolist()) == set(range(100))


def test_starts_follow_from_the_steps() -> None:
    stages = [{"name": name, "steps": steps} for name, steps in (("a", 10), ("b", 5), ("c", 1))]
    assert planned_starts(CurriculumConfig.model_validate({"stages": stages})) == (0, 10, 15)


def packed() -> PackedSamples:
    """Three rows of 8 tokens: documents of 4 and 4, of 2, 2 and 2, and of 3."""
    tokens = np.array([1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3], np.uint16)
    pieces = Pieces(np.array([0, 4, 8, 10, 12, 14]), np.array([4, 4, 2, 2, 2, 3]))
    return PackedSamples(tokens, 7, pieces, PackedRows(np.array([0, 2, 5, 6]), np.arange(6)), 0)


def test_lengths_are_those_of_the_documents() -> None:
    assert mean_lengths(packed(), None) == pytest.approx([7 / 2, 6 / 3, 3])
    stream = Dataset(np.array([1, 9, 1, 9, 1, 1, 1, 1, 9], np.uint16), 4)
    assert mean_lengths(stream, 9) == pytest.approx(
        [4 / 2, 4]
    )  # an end at a row's last input ends no row early


def test_rarity_is_the_mean_surprise_of_the_sources_own_frequencies() -> None:
    samples = packed()
    inputs = [np.array([1] * 7), np.array([2] * 6), np.array([3] * 3)]
    total = sum(map(len, inputs))
    expected = [-np.log(len(row) / total) for row in inputs]
    assert rarity(samples) == pytest.approx(expected)


def stream(rows: int = 40) -> Dataset:
    rng = np.random.default_rng(1)
    tokens = np.concatenate([rng.integers(0, 1 + row % 20, 4) for row in range(rows)] + [[0]])
    return Dataset(tokens.astype(np.uint16), 4)


def test_ranks_are_kept_and_made_again_where_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = stream()
    order = np.array(ranked(samples, REQUEST, tmp_path)[0])
    assert np.array_equal(np.sort(order), np.arange(40))
    assert (np.diff(rarity(samples)[order]) >= 0).all()
    (path,) = tmp_path.glob("ranks-*/order.npy")
    path.write_bytes(path.read_bytes()[:-8])
    assert np.array_equal(ranked(samples, REQUEST, tmp_path)[0], order)
    monkeypatch.setattr(difficulty, "_order", lambda *_: pytest.fail("made again"))
    assert np.array_equal(ranked(samples, REQUEST, tmp_path)[0], order)


def test_combined_is_the_weighted_mean_of_ranks(tmp_path: Path) -> None:
    samples, one, other = stream(4), np.array([3.0, 1, 2, 0]), np.array([0.0, 10, 30, 20])
    for name, values in (("loss", one), ("column", other)):
        write_scores(tmp_path / "scores", "data", name, "id", values)
    request = RankRequest("id", "data", None, (("column", 1.0), ("loss", 2.0)), tmp_path / "scores")
    # ranks: loss 3 1 2 0, column 0 1 3 2; twice the first and once the second: 6 3 7 2
    assert ranked(samples, request, tmp_path)[0].tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: (folder / "data/loss.npy").unlink(),
            "no .*loss.npy; write it by: picotron-ray data score",
        ),
        (lambda folder: (folder / "data/loss.npy").write_bytes(b"x"), "cannot read .*loss.npy"),
        (lambda folder: write_scores(folder, "data", "loss", "other", np.zeros(40)), "other rows than this"),
        (lambda folder: write_scores(folder, "data", "loss", "id", np.zeros(39)), r"39 scores, 40 rows"),
        (lambda folder: write_scores(folder, "data", "loss", "id", np.full(40, np.nan)), "has nan for row 0"),
    ],
)
def test_scores_that_are_not_of_these_rows_are_refused(tmp_path: Path, spoil: object, said: str) -> None:
    write_scores(tmp_path, "data", "loss", "id", np.zeros(40))
    assert callable(spoil)
    spoil(tmp_path)
    request = RankRequest("id", "data", None, (("loss", 1.0),), tmp_path)
    with pytest.raises(DataError, match=said):
        ranked(stream(), request, tmp_path / "cache")


def keeps_even(tokens: np.ndarray, documents: np.ndarray | None) -> bool:
    assert documents is None
    return int(tokens[0]) % 2 == 0


def keeps_none(tokens: np.ndarray, documents: np.ndarray | None) -> bool:
    return False


def fails(tokens: np.ndarray, documents: np.ndarray | None) -> bool:
    raise ValueError("odd\nrow")


def tosses(tokens: np.ndarray, documents: np.ndarray | None, coin: list[int] = []) -> bool:  # noqa: B006
    coin.append(0)
    return len(coin) % 2 == 0


def pools_of(tmp_path: Path, *stages: dict[str, object]) -> tuple[np.ndarray, ...]:
    words = [{"name": f"s{at}", "steps": 1, **stage} for at, stage in enumerate(stages)]
    curriculum = CurriculumConfig.model_validate({"stages": words})
    return stage_pools(stream(), curriculum, REQUEST, tmp_path)[0]


def test_pools_are_the_easiest_of_what_a_filter_keeps(tmp_path: Path) -> None:
    samples, here = stream(), f"{__name__}:keeps_even"
    tenth, even, all_of = pools_of(tmp_path, {"difficulty": 0.1}, {"difficulty": 0.5, "filter": here}, {})
    values, first = rarity(samples), samples.rows(np.arange(40))[:, 0]
    assert len(tenth) == 4
    assert values[tenth].max() <= np.sort(values)[3]
    kept = np.flatnonzero(first % 2 == 0)
    assert len(even) == -(-len(kept) // 2)
    assert set(even.tolist()) <= set(kept.tolist())
    assert len(all_of) == 40
    assert [pool.tolist() for pool in pools_of(tmp_path, {"difficulty": 0.1})] == [tenth.tolist()]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("keeps_none", r"data.curriculum.stages.s0.filter: .*keeps_none keeps no row of data"),
        ("fails", r"data.curriculum.stages.s0.filter: .*fails raises ValueError: odd row for row 0"),
        ("tosses", r"data.curriculum.stages.s0.filter: .*tosses says now yes and now no of row 0"),
        ("gone", r"data.curriculum.stages.s0.filter: saw .*gone, but .* has no gone"),
    ],
)
def test_a_filter_that_does_not_do_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        pools_of(tmp_path, {"filter": f"{__name__}:{name}"})
    assert "\n" not in str(caught.value)
