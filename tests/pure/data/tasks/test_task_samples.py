"""Tasks as rows: a pure function of the seed and their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import make_batch
from picotron_ray.data.ledger import check
from picotron_ray.data.ledger_line import line_rows
from picotron_ray.data.tasks.families import sequences, sinusoids
from picotron_ray.data.tasks.open_tasks import open_data
from picotron_ray.data.tasks.task_samples import Tasks, TaskSamples
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout

MODEL = "model={vocab_size: 40, builder: 'mine:build'}"


def job_of(tasks: str = "sinusoids", *overrides: str) -> JobConfig:
    words = ["data={global_batch: 6, sequence_length: 9}", f"meta={{strategy: maml, tasks: '{tasks}'}}"]
    return load_job("tiny", [MODEL, *words, *overrides])


def test_rows_are_the_same_whatever_the_layout_and_whenever_they_are_made() -> None:
    feed = open_data(job_of(), Path()).feed
    whole = make_batch(feed, Layout(micro_batch=6), 0, 5)
    for dp in (2, 3, 4):
        layout = Layout(dp=dp, micro_batch=2)
        parts = [make_batch(feed, layout, index, 5) for index in range(dp)]
        rows = np.concatenate([part.tokens[part.weights > 0] for part in parts])
        np.testing.assert_array_equal(rows, whole.tokens[0])
        assert {part.global_tokens for part in parts} == {6 * 10}
    np.testing.assert_array_equal(feed.rows(24, 30), whole.tokens[0])


def test_words_are_the_very_numbers() -> None:
    data = open_data(job_of(), Path())
    x, y = sinusoids(np.random.default_rng([0, 0, 7]), 15)
    words = data.train.rows(np.array([7])).astype(np.uint32).view(np.float32).reshape(15, 2)
    np.testing.assert_array_equal(words, np.concatenate([x, y], axis=1).astype(np.float32))


def test_seeds_and_held_out_tasks_differ_and_the_held_out_are_always_the_same() -> None:
    one, other = open_data(job_of(), Path()), open_data(job_of("sinusoids", "seed=1"), Path())
    number = np.array([3])
    assert not np.array_equal(one.train.rows(number), other.train.rows(number))
    assert not np.array_equal(one.train.rows(number), one.held_out.rows(number))
    np.testing.assert_array_equal(one.held_out.rows(number), other.held_out.rows(number))
    assert one.fingerprint != other.fingerprint
    assert one.fingerprint == open_data(job_of(), Path()).fingerprint


def test_the_fingerprint_sees_sizes_and_what_tasks_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_data(job_of(), Path()).fingerprint
    assert open_data(job_of("sinusoids", "meta.support=4", "meta.query=11"), Path()).fingerprint != plain
    monkeypatch.setattr("picotron_ray.data.tasks.families.AMPLITUDES", (0.1, 4.0))
    assert open_data(job_of(), Path()).fingerprint != plain


def test_the_ledger_proves_tasks() -> None:
    data, layout, lines = open_data(job_of(), Path()), Layout(dp=2, micro_batch=3), []
    for step in (1, 2):
        batches = [make_batch(data.feed, layout, index, step) for index in range(2)]
        rows = line_rows(tuple((*batch.rows, batch.digest.hex()) for batch in batches))
        samples = [(step - 1) * 6, step * 6]
        lines.append(
            {"step": step, "term": 1, "n": 1, "samples": samples, "rows": rows, "tokens": 60, "loss": 1.0}
        )
    report = check([_json(line) for line in lines], data.plan, data.train)
    assert (report.steps, report.lost, report.repeated, report.wrong) == (2, 0, 0, ())
    lines[1]["rows"] = lines[0]["rows"]
    assert check([_json(line) for line in lines], data.plan, data.train).wrong


def _json(line: dict[str, Any]) -> str:
    import json

    return json.dumps(line)


def test_sequences_follow_one_rule_a_task() -> None:
    """Whatever the kind, the step from a token at an even place is one map for all rows."""
    for number in range(20):
        inputs, targets = sequences(np.random.default_rng(number), 30, vocabulary=11, length=8)
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        for parity in (0, 1):
            one, then = (side[:, parity::2].ravel().tolist() for side in (inputs, targets))
            pairs = set(zip(one, then, strict=True))
            assert len(pairs) == len({first for first, _ in pairs})


def three(generator: np.random.Generator, examples: int) -> Any:
    return 3


def large(generator: np.random.Generator, examples: int) -> Any:
    return np.full((examples, 2), 40), np.zeros((examples, 2), int)


def negative(generator: np.random.Generator, examples: int) -> Any:
    return np.full((examples, 2), -1), np.zeros((examples, 2), int)


def few(generator: np.random.Generator, examples: int) -> Any:
    return np.zeros((1, 2)), np.zeros((examples, 2))


def endless(generator: np.random.Generator, examples: int) -> Any:
    return np.full((examples, 2), np.inf), np.zeros((examples, 2))


def changing(generator: np.random.Generator, examples: int) -> Any:
    width = int(generator.integers(1, 5))
    return np.zeros((examples, width)), np.zeros((examples, 1))


NUMBER = 4


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("no_such_module:tasks", "meta.tasks: saw no_such_module:tasks, but importing no_such_module raises"),
        (f"{__name__}:gone", f"meta.tasks: saw {__name__}:gone, but {__name__} has no gone"),
        (f"{__name__}:NUMBER", f"meta.tasks: {__name__}:NUMBER is a int, expected a function"),
        (f"{__name__}:three", "task 0: it raises TypeError: 'int' object is not iterable; expected (inputs,"),
        (f"{__name__}:large", "saw the token id 40 in its inputs, expected ids below model.vocab_size=40"),
        (f"{__name__}:negative", "saw the token id -1 in its inputs, expected ids below"),
        (f"{__name__}:few", "saw inputs [1, 2] of float64, expected 15 rows of numbers"),
        (f"{__name__}:endless", "saw inputs that are not finite"),
        (f"{__name__}:changing", "other than those of task 0"),
    ],
)
def test_a_family_that_cannot_be_used_is_one_line(tasks: str, said: str) -> None:
    with pytest.raises(DataError) as refused:
        open_data(job_of(tasks), Path())
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_are_not_for_a_model_of_tokens() -> None:
    job = load_job(
        "tiny", [f"meta={{strategy: maml, tasks: '{__name__}:few'}}", "meta.support=1", "meta.query=1"]
    )
    job = job.model_copy(update={"meta": job.meta.model_copy(update={"tasks": f"{__name__}:pair"})})
    with pytest.raises(DataError, match=r"saw inputs of \[2\] floats an example, but the model takes"):
        open_data(job, Path())


def pair(generator: np.random.Generator, examples: int) -> Any:
    return np.zeros((examples, 2)), np.zeros((examples, 2))


def test_totals_count_what_is_judged() -> None:
    tasks = Tasks(sinusoids, "sinusoids", (0, 0), 2)
    samples = TaskSamples(tasks, tasks.shape(5, 10))
    assert samples.totals(np.arange(4)) == (40, None)
    assert (samples.mean_tokens, samples.sequence_length) == (10.0, 29)
