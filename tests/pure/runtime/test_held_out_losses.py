"""Losses of held-out sets on their way: a worker's page, the run's record, its memo, status and metrics."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.catalogue import CATALOGUE
from picotron_ray.runtime.coordinator.event_log.memo import plain_facts, read_facts
from picotron_ray.runtime.coordinator.metrics import _training
from picotron_ray.runtime.coordinator.records import Facts, GenerationRecord
from picotron_ray.runtime.coordinator.summary import training_status
from picotron_ray.runtime.driver.console import progress_line, summary_lines
from picotron_ray.runtime.heartbeat import Page, read_page
from tests.support.runs.coordinator_world import job

NAMES = ("web", "code")


def told(**changes: Any) -> dict[str, Any]:
    return {"worker": "a", "eval_step": 4, "eval_loss": 2.0, "eval_set_losses": [3.0, 1.5], **changes}


def record(step: int) -> GenerationRecord:
    source = Source("init", step)
    return GenerationRecord.of(GenerationSpec(GenerationId(1, 1), (), Layout(), source, "init"))


def test_a_page_carries_losses_where_rank_0_has_some(tmp_path: Path) -> None:
    page = Page(tmp_path / "w.page", ElasticConfig())
    page.begin(1, 1, 0, 3)
    found = read_page(tmp_path / "w.page")
    assert found is not None
    assert "eval_set_losses" not in found.figures()
    page.put(eval_sets=2, eval_set_0=3.0, eval_set_1=1.5, eval_loss=2.0, eval_step=4)
    found = read_page(tmp_path / "w.page")
    assert found is not None
    assert found.figures()["eval_set_losses"] == (3.0, 1.5)
    assert "eval_set_losses" not in replace(found, rank=1).figures()


def test_the_record_has_the_newest_by_name_and_forgets_what_is_void() -> None:
    facts = Facts()
    pages = [told(eval_set_losses=[math.nan, 1.5])]
    facts.take_pages("n1", pages)
    facts.evaluated(pages[0], NAMES)
    facts.evaluated(told(eval_step=8), NAMES)
    assert facts.newest_sets() == {"web": 3.0, "code": 1.5}
    facts.evaluated(told(eval_step=-1, eval_set_losses=[9.0, 9.0]), NAMES)
    assert set(facts.set_evaluations) == {4, 8}
    again = read_facts(json.loads(json.dumps(plain_facts(facts))))
    assert again.set_evaluations == facts.set_evaluations
    facts.enter(record(5))
    assert facts.newest_sets() == {"web": None, "code": 1.5}
    assert facts.copied().set_evaluations == {4: {"web": None, "code": 1.5}}


def test_status_metrics_and_lines_name_the_sets() -> None:
    facts = Facts()
    facts.evaluated(told(), NAMES)
    status = training_status(job(), facts)
    assert status["eval_sets"] == {"web": 3.0, "code": 1.5}
    samples = {
        sample.labels["set"]: sample.value
        for sample in _training(status, facts.measured({}))
        if sample.labels
    }
    assert samples == {"web": 3.0, "code": 1.5}
    assert CATALOGUE["picotron_training_eval_set_loss_nats"].labels == ("set",)
    line = progress_line({**status, "state": "running", "eval_loss": 2.0})
    assert "eval_loss 2.0000 (bigram -)  web 3.0000  code 1.5000  " in line
    summary = {"run": "x", "status": "finished", "steps": 4, "wall_s": 1.0, "eval_sets": status["eval_sets"]}
    assert "held-out sets: web 3.0000, code 1.5000" in summary_lines(summary)
