"""The policy on bad steps: what is left out, what ends the run and names its samples, what is remembered."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import NumericsError
from picotron_ray.train.update_policy import MOST_NAMED, SPIKE_WINDOW, UpdatePolicy, is_spike


def policy(steps: int = 1000, **elastic: Any) -> UpdatePolicy:
    data = {"global_batch": 8}
    return UpdatePolicy(JobConfig.model_validate({"steps": steps, "data": data, "elastic": elastic}))


def take(found: UpdatePolicy, step: int, loss: float, finite: bool = True) -> str:
    reason = found.judge(step, loss, 1.0, finite)
    found.passed(step, loss, reason)
    return reason


@pytest.mark.parametrize(
    ("loss", "finite"), [(2.0, False), (math.nan, True), (math.inf, True), (math.nan, False)]
)
def test_one_rank_that_is_not_finite_speaks_for_all(loss: float, finite: bool) -> None:
    found = policy()
    assert take(found, 1, 2.0) == ""
    assert take(found, 2, loss, finite) == "non-finite"
    assert found.skipped == 1


def test_judging_changes_nothing() -> None:
    found = policy(max_skipped_steps=1)
    for _ in range(3):
        assert found.judge(5, math.nan, 1.0, False) == "non-finite"
    assert found.extra() == {}


def test_stop_names_the_samples() -> None:
    text = r"^step 3 \(samples 16 to 23\): saw loss nan and gradient norm inf, .*on_nonfinite=stop.* step 2"
    with pytest.raises(NumericsError, match=text):
        policy(on_nonfinite="stop").judge(3, math.nan, math.inf, False)


def test_a_rewind_is_the_coordinators_to_decide_the_policy_reports_the_step() -> None:
    found = policy(on_nonfinite="rewind", max_skipped_steps=1)
    for _ in range(3):
        with pytest.raises(NumericsError, match=r"^step 3 \(samples 16 to 23\): saw loss nan") as error:
            found.judge(3, math.nan, 1.0, False)
    assert (error.value.bad_step, error.value.reason) == (3, "non-finite")
    found.pass_over()
    assert (found.skipped, found.judge(4, 2.0, 1.0, True)) == (1, ""), "that is no skipped step of the limit"
    again = policy(on_spike="rewind")
    for step in range(1, SPIKE_WINDOW + 1):
        take(again, step, 2.0 + 0.01 * (step % 2))
    with pytest.raises(NumericsError) as error:
        again.judge(SPIKE_WINDOW + 1, 9.0, 1.0, True)
    assert error.value.reason == "spike"


def test_the_last_step_is_not_skipped_where_it_is_not_finite() -> None:
    with pytest.raises(NumericsError, match=r"step 9 \(samples 64 to 71\).*the last step"):
        policy(steps=9).judge(9, math.nan, 1.0, False)
    assert policy(steps=9).judge(8, math.nan, 1.0, False) == "non-finite"


def test_one_too_many_in_the_window_ends_the_run_and_names_all_samples() -> None:
    found = policy(max_skipped_steps=2, skip_window_steps=10)
    for step in (1, 4, 11):
        assert take(found, step, math.nan), "the first one has left the window by then"
    with pytest.raises(NumericsError) as error:
        found.judge(13, math.nan, 1.0, False)
    for part in (
        "step 13 (samples 96 to 103)",
        "step 4 (samples 24 to 31) non-finite, step 11 (samples 80 to 87) non-finite",
        "bad steps within 10: 3, more than elastic.max_skipped_steps=2",
        "state of step 12 is kept",
    ):
        assert part in str(error.value)
    assert "step 1 " not in str(error.value)
    assert take(found, 14, math.nan), "and step 4 has left it here"
    assert found.skipped == 4


def test_none_is_allowed_where_the_limit_is_0() -> None:
    with pytest.raises(NumericsError, match=r"within 1000: 1, more than elastic\.max_skipped_steps=0; the"):
        policy(max_skipped_steps=0).judge(1, math.nan, 1.0, False)


def test_a_long_list_of_samples_is_cut() -> None:
    found = policy(max_skipped_steps=30)
    for step in range(1, 31):
        take(found, step, math.nan)
    with pytest.raises(NumericsError, match=r"before: 10 more, step 11 ") as error:
        found.judge(31, math.nan, 1.0, False)
    assert str(error.value).count("(samples") == MOST_NAMED + 1


def test_a_spike_is_above_both_limits_and_needs_a_full_window() -> None:
    noisy = [1.0, 3.0] * (SPIKE_WINDOW // 2)  # mean 2, standard deviation 1
    assert is_spike(8.01, noisy)
    assert not is_spike(7.99, noisy)
    assert not is_spike(8.01, noisy[1:])
    flat = [2.0] * SPIKE_WINDOW
    assert is_spike(2.41, flat)
    assert not is_spike(2.39, flat)


def test_spikes_are_skipped_only_where_asked_and_do_not_enter_the_mean() -> None:
    silent, asked = policy(), policy(on_spike="skip", max_skipped_steps=3)
    for step in range(1, SPIKE_WINDOW + 1):
        assert take(silent, step, 2.0) == take(asked, step, 2.0) == ""
    for step in range(SPIKE_WINDOW + 1, SPIKE_WINDOW + 4):
        assert take(silent, step, 50.0) == ""
        assert take(asked, step, 50.0) == "spike"
    assert take(asked, 104, 2.0) == ""
    with pytest.raises(NumericsError, match=r"\(spike\); bad .*step 101 \(samples 800 to 807\) spike"):
        asked.judge(105, 50.0, 1.0, True)
    assert silent.extra() == {}


def test_a_restored_run_decides_as_one_that_never_stopped() -> None:
    first = policy(on_spike="skip", max_skipped_steps=2, skip_window_steps=50)
    for step in range(1, SPIKE_WINDOW + 1):
        take(first, step, math.nan if step in (40, 90) else 2.0 + step / 1000)
    take(first, 101, 2.0)
    take(first, 102, 2.0)
    again = policy(on_spike="skip", max_skipped_steps=2, skip_window_steps=50)
    again.restore(json.loads(json.dumps(first.extra())))
    for found in (first, again):
        assert take(found, 103, 50.0) == "spike"
        assert found.skipped == 3
        with pytest.raises(NumericsError, match=r"step 90 .*step 103"):
            found.judge(104, math.nan, 1.0, False)
    assert first.extra() == again.extra()
    fresh = policy()
    fresh.restore({})
    assert fresh.skipped == 0
