"""Notes of studies: the same study goes on, another one is refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.load import load_job, parse_job
from picotron_ray.errors import ConfigError
from tuning import commands, sweep
from tuning.notes import begun
from tuning.plan import SweepOptions
from tuning.study_options import StudyOptions

RATES = "optimizer.learning_rate=log:1e-4..1e-2"


def test_a_study_resumes_after_an_upgrade_that_brought_keys_and_not_with_other_values(tmp_path: Path) -> None:
    job = parse_job({"name": "tiny", "storage": {"url": str(tmp_path)}})
    storage, options = open_storage(job.storage, "s"), StudyOptions(name="s", kind="lr")
    assert begun(storage, "study", job, options, {"space": {"a": "1"}}) is None
    noted = json.loads(storage.get("study.json"))
    del noted["job"]["kernels"], noted["options"]["interval"]
    storage.put("study.json", json.dumps(noted).encode())
    assert begun(storage, "study", job, options, {"space": {"a": "1"}}) == noted
    for other, space, key in (
        (job, {"a": "2"}, "a"),
        (parse_job({"name": "tiny", "steps": 7}), {"a": "1"}, "steps"),
    ):
        with pytest.raises(ConfigError, match=f"other values of .*{key}"):
            begun(storage, "study", other, options, {"space": space})


def test_another_space_is_refused_before_ray_and_before_storage_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(commands, "connected", started)
    job = load_job("quickstart", ["chaos=[]", f"storage.url={tmp_path}", "optimizer.schedule.warmup_steps=0"])
    options = StudyOptions(name="s", kind="lr", objective="eval_loss", search="grid")
    noted = options.model_copy(update={"space": (RATES,)})
    begun(open_storage(job.storage, "s"), "study", job, noted, {"space": {}})
    there = {path for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(InterruptedError):  # the same one would go on
        commands.run(job, options, [RATES], None, Console())
    for words in ([], ["optimizer.learning_rate=log:1e-4..1e-1"], [RATES, "optimizer.weight_decay=0,0.1"]):
        with pytest.raises(ConfigError, match="began with other values of space; set them back") as caught:
            commands.run(job, options, words, None, Console())
        assert len(str(caught.value).splitlines()) == 1
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {
        path for path in there if path.is_file()
    }


def test_a_name_of_a_run_or_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "connected", lambda *_: pytest.fail("Ray was started"))
    monkeypatch.setattr(sweep, "connected", lambda *_: pytest.fail("Ray was started"))
    job = load_job("quickstart", ["chaos=[]", f"storage.url={tmp_path}"])
    for kind in ("run", "sweep"):
        open_storage(job.storage, f"a-{kind}").put(f"{kind}.json", b"{}")
        options = StudyOptions(name=f"a-{kind}", kind="batch", search="grid")
        with pytest.raises(ConfigError, match=f"saw 'a-{kind}', a {kind} in .*; choose another --name"):
            commands.run(job, options, [], None, Console())
    open_storage(job.storage, "a-study").put("study.json", b"{}")
    with pytest.raises(ConfigError, match="saw 'a-study', a study in"):
        sweep.run(job, SweepOptions(name="a-study"), None, Console())
