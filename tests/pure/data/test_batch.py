"""Step batches: the global batch is the same whatever the layout, fillers are no samples."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import xxhash

from picotron_ray.data import loader as data_loader
from picotron_ray.data.batch import StepBatch, eval_batches, make_batch
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.data.samples import Dataset
from picotron_ray.data.shuffle import samples_between
from picotron_ray.layout.layout import Layout

SEQ = 6
DATA = Dataset(np.random.default_rng(0).integers(1, 250, 40 * SEQ + 3).astype("<u2"), SEQ)
LAYOUTS = [
    Layout(dp=dp, pp=pp, tp=tp, micro_batch=mb)
    for dp in (1, 2, 3, 5, 7)
    for pp, tp in ((1, 1), (2, 2))
    for mb in (1, 2, 3)
]


def real_rows(batch: StepBatch) -> np.ndarray:
    return batch.tokens.reshape(-1, SEQ + 1)[batch.weights.ravel() == 1]


def test_samples_share_one_token_and_cover_the_stream() -> None:
    assert DATA.samples == 40
    rows = DATA.rows(np.arange(40))
    assert np.array_equal(rows[:-1, -1], rows[1:, 0])
    assert np.array_equal(rows[:, 1:].ravel(), DATA.tokens[1 : 40 * SEQ + 1])
    assert rows.dtype == np.int64
    for tokens, samples in ((0, 0), (SEQ, 0), (SEQ + 1, 1), (2 * SEQ, 1), (2 * SEQ + 1, 2)):
        assert Dataset(DATA.tokens[:tokens], SEQ).samples == samples


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_feeds_the_same_global_batch(layout: Layout) -> None:
    for batch_size, step in itertools.product((4, 7, 12), (1, 5, 6)):
        parts = [make_batch(Feed.uniform(DATA, 9, batch_size), layout, i, step) for i in range(layout.dp)]
        fed = np.concatenate([real_rows(part) for part in parts])
        first = (step - 1) * batch_size
        assert np.array_equal(fed, DATA.rows(samples_between(9, first, first + batch_size, DATA.samples)))
        assert len({part.tokens.shape for part in parts}) == 1
        assert parts[0].tokens.shape[:2] == (layout.micro_batches(batch_size), layout.micro_batch)
        ends = [first] + [part.rows[1] for part in parts]
        assert [part.rows for part in parts] == list(itertools.pairwise(ends))
        assert ends[-1] == first + batch_size
        assert {part.global_tokens for part in parts} == {batch_size * SEQ}
        for part in parts:
            assert part.weights.sum() == part.rows[1] - part.rows[0]
            assert not part.tokens[part.weights == 0].any()
            assert part.digest == xxhash.xxh3_128_digest(real_rows(part).astype("<u4").tobytes())
            assert (str(part.tokens.dtype), str(part.weights.dtype), part.step) == ("int64", "float64", step)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("samples", [1, 10, 25, 1000])
def test_evaluation_samples_do_not_depend_on_the_layout(layout: Layout, samples: int) -> None:
    replicas = [eval_batches(DATA, layout, i, samples, 12) for i in range(layout.dp)]
    shape = (layout.micro_batches(12), layout.micro_batch, SEQ + 1)
    assert {batch.tokens.shape for batches in replicas for batch in batches} == {shape}
    fed = np.concatenate([real_rows(batch) for group in zip(*replicas, strict=True) for batch in group])
    wanted = min(samples, 40)
    assert np.array_equal(fed, DATA.rows(samples_between(0, 0, wanted, 40)))
    assert sum(batch.global_tokens for batch in replicas[0]) == wanted * SEQ
    assert {batch.step for batches in replicas for batch in batches} == {0}
    spans = [batch.rows for group in zip(*replicas, strict=True) for batch in group]
    ends = [0, *(last for _, last in spans)]
    assert spans == list(itertools.pairwise(ends))
    assert ends[-1] == wanted
    for group in zip(*replicas, strict=True):
        sizes = [last - first for first, last in (batch.rows for batch in group)]
        assert max(sizes) - min(sizes) <= 1


def loader(start: int = 0, depth: int = 2, **more: object) -> BatchLoader:
    return BatchLoader(
        Feed.uniform(DATA, 1, 6),
        layout=Layout(dp=2),
        dp_index=1,
        start_step=start,
        depth=depth,
        **more,  # type: ignore[arg-type]
    )


def test_loader_goes_on_after_the_step_it_starts_from() -> None:
    ahead = loader(start=10)
    assert ahead._thread.daemon  # a worker that ends without closing it is not held up
    for step in range(11, 20):
        batch, wanted = ahead.next(), make_batch(Feed.uniform(DATA, 1, 6), Layout(dp=2), 1, step)
        assert batch.step == step
        assert np.array_equal(batch.tokens, wanted.tokens)
    ahead.close()
    ahead.close()
    with pytest.raises(RuntimeError, match="closed"):
        ahead.next()


def test_loader_makes_batches_ahead_and_no_more_than_asked() -> None:
    made: list[int] = []

    def slow(*arguments: object) -> StepBatch:
        made.append(arguments[-1])  # type: ignore[arg-type]
        return make_batch(*arguments)  # type: ignore[arg-type]

    ahead = loader(depth=3, make=slow)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert made == [1, 2, 3, 4]  # three ready, one waiting for room
    assert ahead.next().step == 1
    ahead.close()


def test_loader_hands_its_error_to_the_caller_again_and_again() -> None:
    def broken(*arguments: object) -> StepBatch:
        if arguments[-1] == 2:
            raise OSError("the disk went away")
        return make_batch(*arguments)  # type: ignore[arg-type]

    ahead = loader(make=broken)
    assert ahead.next().step == 1
    for _ in range(3):
        with pytest.raises(OSError, match="went away"):
            ahead.next()
    ahead.close()


def test_a_read_that_hangs_holds_up_neither_a_stop_nor_the_next_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_loader, "CLOSE_S", 0.05)
    mended = threading.Event()

    def hung(*arguments: object) -> StepBatch:
        mended.wait(10)
        return make_batch(*arguments)  # type: ignore[arg-type]

    ahead = loader(depth=1, make=hung)
    threading.Timer(0.05, ahead.stop_waiting).start()
    with pytest.raises(RuntimeError, match="closed while a batch was awaited"):
        ahead.next()
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 2
    assert ahead._thread.is_alive()
    mended.set()
    ahead._thread.join(5)
    assert not ahead._thread.is_alive(), "it ends with the read"


def test_close_releases_a_waiting_caller_and_leaves_no_thread() -> None:
    def stuck(*arguments: object) -> StepBatch:
        time.sleep(0.2)
        return make_batch(*arguments)  # type: ignore[arg-type]

    ahead = loader(make=stuck)
    seen: list[StepBatch | RuntimeError] = []

    def wait() -> None:
        try:
            while True:
                seen.append(ahead.next())
        except RuntimeError as error:
            seen.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    ahead.close()
    waiting.join(2)
    assert not waiting.is_alive()
    assert isinstance(seen[-1], RuntimeError)
    assert "loader" not in {thread.name for thread in threading.enumerate()}


def test_masks_are_those_of_the_targets_and_every_replica_knows_their_number() -> None:
    mask = np.random.default_rng(5).integers(0, 2, len(DATA.tokens)).astype(np.uint8)
    masked, layout = Dataset(DATA.tokens, SEQ, mask), Layout(dp=3, micro_batch=2)
    parts = [make_batch(Feed.uniform(masked, 1, 7), layout, index, 2) for index in range(3)]
    plain = [make_batch(Feed.uniform(DATA, 1, 7), layout, index, 2) for index in range(3)]
    found = np.concatenate([part.counted[part.weights > 0] for part in parts if part.counted is not None])
    samples = samples_between(1, 7, 14, DATA.samples)
    expected = np.stack([mask[int(s) * SEQ + 1 : int(s) * SEQ + 1 + SEQ] for s in samples])
    np.testing.assert_array_equal(found, expected.astype(bool))
    assert {part.loss_tokens for part in parts} == {int(expected.sum())}
    assert {part.loss_tokens for part in plain} == {7 * SEQ} == {part.global_tokens for part in parts}
    assert [part.digest for part in parts] == [part.digest for part in plain]
    assert all(not part.counted[part.weights == 0].any() for part in parts if part.counted is not None)
    none = Dataset(DATA.tokens, SEQ, np.zeros_like(mask))
    assert make_batch(Feed.uniform(none, 1, 7), layout, 0, 2).loss_tokens == 1, "nothing to divide by"
    held = eval_batches(masked, layout, 1, 5, 7)
    assert sum(part.loss_tokens for part in held) <= 5 * SEQ
    assert all(part.counted is not None for part in held)
