"""Advance of a curriculum by losses: when stages end, what a restored record says, and what a check finds."""

from __future__ import annotations

import json
import math
import random
import threading
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.support.curriculum import LEAD
from picotron_ray.data.batch import make_batch
from picotron_ray.data.ledger import check
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.data.plan.advance_rule import AdvanceRule, Starts
from picotron_ray.data.plan.curriculum import StagedOrder
from picotron_ray.data.plan.mixture import Mixture, MixturePlan, Stretch
from picotron_ray.data.plan.sample_plan import Feed, StagedPlan
from picotron_ray.data.samples import Dataset
from picotron_ray.layout.layout import Layout

RULE = AdvanceRule(("a", "b", "c"), (60, 100, 1000), 100, 0.8, 0.7, window=5)
BATCH = 4
LEARNED, GUESSING = 0.1, math.log(100)


def falling(step: int) -> float:
    """Loss that is learned within some 20 steps."""
    return LEARNED + (GUESSING - LEARNED) * math.exp(-step / 4)


def test_figures_are_those_of_the_definition() -> None:
    performance, adaptation = RULE.figures([3.0, 1.5, 1.0])
    assert performance == pytest.approx(1 - 1 / math.log(100))
    assert adaptation == pytest.approx(1 - 0.5 / 2)
    assert RULE.figures([2.0, 2.0, 2.5])[1] == 1, "what does not fall has settled"
    assert RULE.ends([3.0, 0.5, 0.4])
    assert not RULE.ends([3.0, 1.1, 1.0]), "not yet good enough"
    assert not RULE.ends([3.0, 1.9, 0.4]), "still learning"


def test_a_stage_that_is_learned_ends_a_lead_after_the_step_that_decides() -> None:
    record, said = StageRecord(RULE), []
    for step in range(1, 61):
        if words := record.passed(step, falling(step)):
            said.append((step, words))
    decided = said[0][0]
    assert decided % RULE.window == 0
    assert record.starts[1] == decided + LEAD < 60
    assert (
        f"step {decided}: stage b of the curriculum begins after step {decided + LEAD} (performance"
        in said[0][1]
    )
    means = [
        np.mean([falling(at) for at in range(first, first + 5)]) for first in (1, decided - 9, decided - 4)
    ]
    assert RULE.ends([float(mean) for mean in means])


def test_a_stage_that_is_never_learned_ends_with_its_steps() -> None:
    record, said = StageRecord(RULE), []
    for step in range(1, 200):
        said += [step] * bool(record.passed(step, GUESSING))
    assert record.starts == (0, 60, 160)
    assert said == [60 - LEAD, 160 - LEAD]
    short = StageRecord(AdvanceRule(("a", "b", "c"), (3, 4, 1), 100, 0.8, 0.7, 5))
    assert short.starts == (0, 3, 7), "known from the beginning"


def test_losses_of_a_stage_do_not_count_for_the_next() -> None:
    record = StageRecord(RULE)
    for step in range(1, 200):
        begun = record.begun(step)
        loss = falling(step) if len(begun) == 1 else GUESSING
        record.passed(step, loss)
    assert len(record.starts) == 3
    assert record.starts[2] - record.starts[1] == 100, "the second one was never learned"


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_record_goes_on_as_one_that_never_stopped(seed: int) -> None:
    pick = random.Random(seed)
    losses = [None if pick.random() < 0.1 else falling(step % 45) for step in range(1, 200)]
    whole = StageRecord(RULE)
    for step, loss in enumerate(losses, 1):
        whole.passed(step, loss)
    cut = pick.randint(0, 198)
    first = StageRecord(RULE)
    for step, loss in enumerate(losses[:cut], 1):
        first.passed(step, loss)
    second = StageRecord(RULE)
    second.restore(json.loads(json.dumps(first.extra())))
    for step, loss in enumerate(losses[cut:], cut + 1):
        second.passed(step, loss)
    assert (second.starts, second.extra()) == (whole.starts, whole.extra())
    assert len(whole.starts) > 1


# --- rows, the loader and the ledger --------------------------------------------------------------------


def splits() -> tuple[Dataset, StagedPlan]:
    rng = np.random.default_rng(3)
    data = Dataset(rng.integers(0, 100, 60 * 8 + 1).astype(np.uint16), 8)
    order = rng.permutation(60)

    def made(starts: Starts) -> MixturePlan:
        firsts = tuple(start * BATCH for start in starts)
        staged = StagedOrder(1, 60, (order[:6], order[:30], order), firsts)
        return MixturePlan(BATCH, (staged,), Mixture(1, (Stretch(0, (1 << 16,)),)))

    return data, StagedPlan(made, (0,), (4, 8, 8), RULE)


def fed(steps: int, loss: Any = falling) -> list[dict[str, Any]]:
    """Lines of a run, as its loop writes them."""
    data, plan = splits()
    record, lines = StageRecord(RULE), []
    for step in range(1, steps + 1):
        batch = make_batch(Feed(data, plan, record), Layout(micro_batch=BATCH), 0, step)
        lines.append(
            {
                "step": step,
                "term": 1,
                "n": 1,
                "samples": list(batch.rows),
                "rows": line_rows([(*batch.rows, batch.digest.hex())]),
                "tokens": batch.global_tokens,
                "loss": loss(step),
                "stages": list(record.begun(step)),
            }
        )
        if (windows := record.at_window()) is not None:
            lines[-1]["windows"] = json.loads(json.dumps(windows))
        record.passed(step, loss(step))
    return lines


def test_the_check_decides_anew() -> None:
    data, plan = splits()
    lines = fed(90)
    report = check(lines, plan, data)
    assert report.wrong == ()
    assert (report.samples, report.lost, report.repeated) == (90 * BATCH, 0, 0)
    begun = lines[-1]["stages"][1]
    assert begun < 60
    assert (
        make_batch(Feed(data, plan.moved((0, begun))), Layout(micro_batch=BATCH), 0, 1).documents is not None
    )


def test_the_check_finds_a_stage_that_began_elsewhere() -> None:
    data, plan = splits()
    lines = fed(90)
    begun = lines[-1]["stages"][1]
    lines[begun]["stages"] = [0]  # the stage's first step claims the one before
    report = check(lines, plan, data)
    assert any(
        f"step {begun + 1} of generation 1.1 says stages after steps [0], expected" in text
        for text in report.wrong
    )
    lines = fed(90)
    lines[begun - LEAD - 2]["loss"] = 50.0  # what the decision followed from is another
    assert any("expected [0]" in text for text in check(lines, plan, data).wrong)
    lines = fed(90)
    del lines[40]["stages"]
    assert any("says no stages" in text for text in check(lines, plan, data).wrong)


def test_behind_a_line_that_is_lost_the_check_goes_on_from_the_next_window() -> None:
    data, plan = splits()
    lost = 9

    def lines_without(step: int) -> list[dict[str, Any]]:
        lines = fed(90)
        lines[step] = {**lines[step], "unproven": True, "rows": [], "loss": None}
        lines[step].pop("windows", None)
        return lines

    lines = lines_without(lost)
    assert [text for text in check(lines, plan, data).wrong if "stage" in text or "means" in text] == []
    begun = lines[-1]["stages"][1]
    lines[-1]["stages"] = [0, begun + 1]
    assert any("says stage 2 began after step" in text for text in check(lines, plan, data).wrong)
    lines = lines_without(lost)
    for line in lines[begun - 3 :]:
        line["stages"] = [0, begun - 3]
    assert any("says stages after steps" in text for text in check(lines, plan, data).wrong), (
        "an invented stage"
    )


def test_the_check_finds_means_that_are_not_those_of_the_losses() -> None:
    data, plan = splits()
    lines = fed(40)
    at = next(at for at, line in enumerate(lines) if at > 5 and "windows" in line)
    lines[at]["windows"]["means"][0] += 1e-9
    assert any("says other means of losses" in text for text in check(lines, plan, data).wrong)
    lines[at]["windows"] = {"starts": []}
    assert any("is not a ledger line" in text for text in check(lines, plan, data).wrong)


def test_a_loader_waits_for_a_decision_and_can_be_closed_meanwhile() -> None:
    data, plan = splits()
    record = StageRecord(RULE)

    def loader(start: int, **more: Any) -> BatchLoader:
        feed = Feed(data, plan, record)
        return BatchLoader(
            feed, layout=Layout(micro_batch=BATCH), dp_index=0, start_step=start, depth=2, **more
        )

    ahead = loader(0, passes_over=lambda step: 3 <= step <= 60)
    assert [ahead.next().step for _ in range(2)] == [1, 2]
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(ahead.next().step))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "step 61 is not decided after step 2"
    for step in range(1, 61):
        record.passed(step, None)
    waiting.join(5)
    assert got == [61]
    ahead.close()

    record = StageRecord(RULE)
    stuck = loader(100)
    waiting = threading.Thread(target=stuck.close)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(RuntimeError):
        stuck.next()
