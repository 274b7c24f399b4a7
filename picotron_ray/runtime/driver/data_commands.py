"""Commands on a run's data: what a step fed, from the config, or from the ledger of a stored run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import stream_ledger
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.curriculum import LEAD
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.ledger_line import shared_digest
from picotron_ray.data.plan.advance import StageRecord
from picotron_ray.data.plan.build_plan import source_seeds
from picotron_ray.data.plan.sample_plan import Feed, StagedPlan
from picotron_ray.data.shown_rows import shown_rows
from picotron_ray.data.statistics import source_statistics
from picotron_ray.data.tokenizer import open_tokenizer
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver.find_stored import find_storage
from picotron_ray.runtime.driver.resolve_job import resolve_words
from picotron_ray.runtime.driver.storage_commands import generation_of, newest_good
from picotron_ray.runtime.inference.stored_model import job_of_run
from picotron_ray.runtime.ray_cluster.names import cache_folder
from picotron_ray.runtime.run_storage.data_record import check_data


def job_of(word: str, overrides: list[str]) -> JobConfig:
    """Return the job of a config, or of a stored run where no config has that name.

    Raises ConfigError where there is neither.
    """
    try:
        return resolve_words(word, overrides).job
    except ConfigError as no_config:
        if overrides:
            raise
        try:
            return job_of_run(*find_storage(word))
        except ConfigError:
            raise no_config from None


def show_step(job: JobConfig, step: int, rank: int | None = None, most: int | None = None) -> dict[str, Any]:
    """Return the rows that a step feeds, or one rank's of them, decoded.

    Where the run's committed ledger has the step, the layout is the one that fed it, and the rows are
    compared with the ledger's digests.

    Args:
        step: 1-based.
        rank: of the layout; None: all rows.
        most: rows at most; None: all.

    Raises:
        ConfigError: a step that is none, a rank that is not in the layout, or a step of which only the run
            knows what it feeds.
        DataError: the data cannot be read, or is not what the run began with.
    """
    if not 1 <= step <= job.steps:
        raise ConfigError(f"--step: saw {step}, expected 1 to {job.steps} (steps)")
    if job.meta.strategy != "none":
        raise ConfigError(
            f"meta.strategy: saw {job.meta.strategy}, whose rows are tasks made by a number, and no text"
        )
    data = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder())
    line, layout = _recorded(job, data, step)
    feed = _feed(data, step, line)
    if line is not None and line.get("passed_over"):
        return {"step": step, "rows": [], "ledger": "passed over by a rewind: its rows were not fed"}
    whole = make_batch(feed, Layout(micro_batch=job.data.global_batch), 0, step)
    asked = whole if rank is None else _of_rank(feed, layout, rank, step)
    names = tuple(source.name for source in job.data.sources) or ("",)
    rows = [row.to_dict() for row in shown_rows(feed, asked, names, open_tokenizer(job.data))]
    compared = "not in a committed ledger"
    if line is not None and layout is not None:
        compared = _compared(line, feed, layout, step)
    return {
        "step": step,
        "rank": rank,
        "layout": str(layout) if layout is not None else None,
        "samples": list(asked.rows),
        "tokens": asked.global_tokens,
        "counted": asked.loss_tokens,
        "padding_ratio": 1 - asked.global_tokens / (job.data.global_batch * job.data.sequence_length),
        "stage": asked.stage or None,
        "digest": asked.digest.hex(),
        "ledger": compared,
        "rows": rows[:most],
        "left_off": max(0, len(rows) - most) if most is not None else 0,
    }


def statistics(job: JobConfig) -> list[dict[str, Any]]:
    """Return what each source of a job's data holds (`source_statistics`)."""
    data = job.data
    return [
        source_statistics(key, data, job.model.vocab_size, seed, cache_folder()).to_dict()
        for key, seed in zip(data.named_sources, source_seeds(data, job.seed), strict=True)
    ]


def _of_rank(feed: Feed, layout: Layout | None, rank: int, step: int) -> StepBatch:
    """Make the batch of a rank's replica."""
    if layout is None:
        raise ConfigError(
            f"--rank: saw {rank}, but no committed ledger has the step, and which rows a rank feeds is known"
            " once a layout has fed them; leave it out"
        )
    if not 0 <= rank < layout.world_size:
        raise ConfigError(f"--rank: saw {rank}, expected 0 to {layout.world_size - 1} of {layout}")
    return make_batch(feed, layout, layout.coordinates(rank).dp, step)


def _recorded(job: JobConfig, data: DataSplits, step: int) -> tuple[dict[str, Any] | None, Layout | None]:
    """Return the ledger's line of a step and the layout that fed it; None where no commit has it."""
    found = newest_good(job)
    if found is None:
        return None, None
    storage, log, manifest = found
    check_data(storage, job.name, data.fingerprint)
    line = _line_of(storage, manifest, step)
    if line is None:
        return None, None
    return line, _generation(log, line).layout


def _line_of(storage: Storage, manifest: Any, step: int) -> dict[str, Any] | None:
    for raw in stream_ledger(storage, manifest, after=step - 1):
        line: dict[str, Any] = json.loads(raw)
        if line["step"] == step:
            return line
        if line["step"] > step:
            break
    return None


def _generation(log: RunLog, line: dict[str, Any]) -> GenerationSpec:
    return generation_of(log, line["term"], line["n"])


def _feed(data: DataSplits, step: int, line: dict[str, Any] | None) -> Feed:
    """Return the feed whose plan holds for a step."""
    feed, plan = data.feed, data.plan
    if not isinstance(plan, StagedPlan) or plan.rule is None:
        return feed
    if line is None:
        if step <= LEAD + 1:  # nothing can have been decided for it
            return replace(feed, plan=plan.moved(StageRecord(plan.rule).begun(step)))
        raise ConfigError(
            f"--step: saw {step}, of which no committed ledger says what it fed: with"
            " data.curriculum.advance=auto the run decides it; name a step up to the newest commit"
        )
    return replace(feed, plan=plan.moved(tuple(line.get("stages", (0,)))))


def _compared(line: dict[str, Any], feed: Feed, layout: Layout, step: int) -> str:
    """Compare a step's rows, made anew for the layout that fed them, with the ledger's digests."""
    if line.get("unproven"):
        return "not to be compared: the step's own line was lost before it was committed"
    batches: list[StepBatch] = [make_batch(feed, layout, at, step) for at in range(layout.dp)]
    at, wrong = 0, 0
    for _, _, digest, *more in line["rows"]:
        count = more[0] if more else 1
        wrong += shared_digest([batch.digest for batch in batches[at : at + count]]).hex() != digest
        at += count
    if wrong or at != len(batches):
        return f"differs: {wrong} of {len(line['rows'])} digests are of other tokens"
    return "the same: all digests are those of these rows"
