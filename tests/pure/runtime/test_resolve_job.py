"""The steps from a user's config to what runs: their order, what each door takes of them, and who said no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, PicotronError, naming
from picotron_ray.runtime.driver.resolve_job import (
    ELSEWHERE,
    FROM_WORDS,
    INIT_FROM,
    ON_THE_CLUSTER,
    ON_THE_MACHINE,
    OWN_PRECISION,
    OWN_RAY,
    RUNNING_RUN,
    START,
    ResolvedJob,
    ResolveStep,
    resolve,
    resolve_words,
)
from picotron_ray.runtime.driver.submission import Submission

PURE = ("addresses",)
"""Steps that look at nothing but the job."""


def names(steps: tuple[ResolveStep, ...]) -> list[str]:
    return [step.name for step in steps]


def test_the_order_of_the_steps() -> None:
    """As launch has always judged: what is refused first is what a user reads first."""
    assert names(FROM_WORDS) == ["paths", "deadline", "own model"]
    machine = ["nodes", "layout", "snapshot room", "services", "storage", "data", "start", "same run"]
    assert names(ON_THE_MACHINE) == machine
    assert names((ELSEWHERE,)) == ["elsewhere"], "the last, without the run's lock"
    assert names(ON_THE_CLUSTER) == ["own model", "precision", "room", "data", "init_from", "addresses"]
    others = (OWN_RAY, ELSEWHERE, *ON_THE_CLUSTER, RUNNING_RUN, OWN_PRECISION)
    for step in (*FROM_WORDS, *ON_THE_MACHINE, *others):
        said = step.take.__doc__ or ""
        assert ("Touches: " in said) != (step.name in PURE), f"{step.name} does not say what it touches"


def test_steps_are_taken_in_order_and_the_first_that_refuses_is_named() -> None:
    taken: list[str] = []

    def noting(name: str) -> ResolveStep:
        def take(at: ResolvedJob) -> ResolvedJob:
            taken.append(name)
            if name == "third":
                raise ConfigError("steps: no")
            return at.noting(name)

        return ResolveStep(name, take)

    steps = [noting(name) for name in ("first", "second", "third", "fourth")]
    assert resolve(ResolvedJob(JobConfig()), steps[:2]).notes == ("first", "second")
    taken.clear()
    with pytest.raises(ConfigError) as refused:
        resolve(ResolvedJob(JobConfig()), steps)
    assert taken == ["first", "second", "third"]
    assert refused.value.step == "third"
    assert ConfigError("elsewhere").step == "", "no instance marks the class"


def test_the_inner_steps_name_stays() -> None:
    with pytest.raises(PicotronError) as refused, naming("outer"), naming("inner"):
        raise PicotronError("x")
    assert refused.value.step == "inner"


def test_words_become_a_job_that_any_process_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    job = resolve_words("tiny", ["storage.url=runs", "steps=3"], FROM_WORDS, say=said.append).job
    assert (job.steps, job.storage.url) == (3, str(tmp_path / "runs"))
    assert said == []
    bare = Submission("raysubmit_1", {"team": "a"}, uploaded=False)
    with pytest.raises(ConfigError) as refused:
        resolve_words("tiny", ["storage.url=runs"], FROM_WORDS, bare, said.append)
    assert refused.value.step == "paths"
    assert said == ["run tiny in Ray job raysubmit_1 (team=a)"]
    with pytest.raises(ConfigError) as refused:
        resolve_words("tiny", ["steps=0"], FROM_WORDS)
    assert refused.value.step == "config"


def test_a_start_that_is_missing_is_refused_by_its_step(tmp_path: Path) -> None:
    job = load_job("tiny", [f"storage.url={tmp_path}", "init_from.run=gone"])
    for step in (INIT_FROM, START):
        with pytest.raises(ConfigError, match="gone") as refused:
            resolve(ResolvedJob(job), (step,))
        assert refused.value.step == step.name


# --- validate ----------------------------------------------------------------------------------------------


def validate(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["validate", *words])
    return result.exit_code, result.stdout, result.stderr


def test_validate_names_the_step_beside_the_lines_it_always_printed() -> None:
    code, out, err = validate("tiny", "steps=0")
    assert (code, out) == (2, "# refused by step: config\n")
    assert err == "error: steps: saw 0, expected an integer >= 1 and <= 1000000000000\n"
    code, out, _ = validate("tiny", "steps=0", "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["step"]) == (2, 2, "config")
    assert "refused" not in validate("tiny")[1]


@pytest.mark.parametrize(
    ("changed", "step", "line"),
    [
        (["model.layers=4"], "same run", "error: model.layers: was 2, now 4; it may not change within run"),
        (["storage.url=gs://a/b"], "config", "error: storage.url: saw 'gs://a/b'"),
    ],
)
def test_validate_against_a_run_names_the_step(
    tmp_path: Path, changed: list[str], step: str, line: str
) -> None:
    from picotron_ray.config.export import public_dict

    url = f"storage.url={tmp_path}"
    job = load_job("tiny", [url])
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "run.json").write_text(json.dumps({"config": public_dict(job)}))
    assert validate("tiny", url, "--resume") == (0, "nothing changed\n", "")
    code, out, err = validate("tiny", url, *changed, "--resume")
    assert (code, out) == (2, f"# refused by step: {step}\n")
    assert err.startswith(line)


def test_validate_names_the_users_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: JobConfig) -> None:
        raise ConfigError(f"model.builder: {job.model.builder} is not there")

    monkeypatch.setattr("picotron_ray.runtime.driver.custom_model.inspect_model", refuse)
    code, out, err = validate("tiny", "model={vocab_size: 264, builder: 'gone:build'}")
    assert (code, out) == (2, "# refused by step: own model\n")
    assert err == "error: model.builder: gone:build is not there\n"
    assert validate("tiny")[0] == 0, "nothing to build"


def test_validate_in_a_ray_job_names_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Submission("raysubmit_1", {}, uploaded=False)
    monkeypatch.setattr("picotron_ray.runtime.driver.submission.current", lambda: bare)
    code, out, _ = validate("tiny", "storage.url=runs")
    assert (code, out) == (2, "# refused by step: paths\n")


def test_validate_names_the_run_that_began_elsewhere(tmp_path: Path) -> None:
    from picotron_ray.config.export import public_dict

    words = [f"storage.url={tmp_path}", "init_from.run=gone"]
    job = load_job("tiny", words)
    (tmp_path / "tiny").mkdir()
    changed = {**public_dict(job), "init_from": {"run": "other"}}
    (tmp_path / "tiny" / "run.json").write_text(json.dumps({"config": changed}))
    code, out, _ = validate("tiny", *words, "--resume")
    assert (code, out) == (2, "# refused by step: same run\n")
