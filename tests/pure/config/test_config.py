"""Config: reading, overriding, all mistakes at once, export without secrets, and what a resume may change."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.config.export import flatten, public_dict, to_yaml
from picotron_ray.config.json_schema import allowed, job_schema, key_schemas, nearest_key
from picotron_ray.config.load import _overlap, load_job, parse_job, read_source
from picotron_ray.config.resume import check_resume, compare, fingerprint, markdown, table, verdict
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.config.storage_urls import redact
from picotron_ray.errors import ConfigError

SOURCES: tuple[Literal["stdlib", "text", "jsonl", "memmap"], ...] = ("stdlib", "text", "jsonl", "memmap")
FAULT = 'chaos=[{fault: kill, target: "worker:0", step: 1}]'


def problems(source: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_job(source, overrides)
    return caught.value.problems


# --- reading -----------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: mine\nsteps: 7\noptimizer: {learning_rate: 1e-3}\n")
    job = load_job(str(path))
    assert (job.name, job.steps, job.optimizer.learning_rate) == ("mine", 7, 1e-3)


def test_a_missing_source_names_the_choices(tmp_path: Path) -> None:
    assert "did you mean quickstart?" in problems("quickstrat")[0]
    assert "no such file" in problems(str(tmp_path / "none.yaml"))[0]
    assert "cannot read" in problems(f"{tmp_path}/")[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00steps")
    assert "not UTF-8 text" in problems(str(tmp_path / "binary.yaml"))[0]
    (tmp_path / "control.yaml").write_bytes(b"name: a\x01b")
    (line,) = problems(str(tmp_path / "control.yaml"))
    assert "\n" not in line
    assert "fix the YAML" in line


def test_yaml_merge_keys_still_work(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: &m {layers: 2}\nname: a\n")
    assert load_job(str(path)).model.layers == 2
    path.write_text("model:\n  <<: {layers: 2, heads: 2}\n  <<: {kv_heads: 2}\n  heads: 4\n")
    assert load_job(str(path)).model.heads == 4


# --- overrides ---------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_apply_in_order() -> None:
    job = load_job(
        "tiny",
        ["steps=5", "steps=6", "optimizer.learning_rate=2e-4", "optimizer.clip_norm=null", "layout.tp=auto"],
    )
    assert (job.steps, job.optimizer.learning_rate, job.optimizer.clip_norm) == (6, 2e-4, None)
    assert load_job("tiny", ["storage.url=s3://bucket/a=b"]).storage.url == "s3://bucket/a=b"


def test_the_bare_word_off_is_no_false() -> None:
    """YAML reads it as one."""
    assert load_job("tiny", ["elastic.on_spike=off"]).elastic.on_spike == "off"
    assert load_job("tiny", ["elastic.on_spike=skip"]).elastic.on_spike == "skip"
    with pytest.raises(ConfigError, match=r"elastic\.on_spike: saw true, expected one of off, skip"):
        load_job("tiny", ["elastic.on_spike=on"])


def test_overrides_reach_into_faults() -> None:
    second = "chaos.1={fault: stop, target: 'worker:1', step: 2}"
    job = load_job("tiny", [FAULT, "chaos.0.step=3", second, "chaos.1.phase=optimizer"])
    assert [(fault.fault, fault.step, fault.phase) for fault in job.chaos] == [
        ("kill", 3, "forward"),
        ("stop", 2, "optimizer"),
    ]
    assert load_job("quickstart", ["chaos=[]"]).chaos == ()
    fresh = ["chaos.0.fault=kill", "chaos.0.target=coordinator", "chaos.0.step=1"]
    assert load_job("tiny", fresh).chaos[0].target == "coordinator"


def test_bad_overrides() -> None:
    assert problems("tiny", "steps") == (
        "steps: expected an override of the form key=value, such as steps=200",
    )
    assert "form key=value" in problems("tiny", "model..layers=3")[0]
    assert problems("tiny", "steps.x=3")[0] == "steps.x: steps is a single value, it has no x to set"
    deep = problems("tiny", "model.moe.top_k=2", "model.moe.top_k.x=3")[0]
    assert deep == "model.moe.top_k.x: model.moe.top_k is a single value, it has no x to set"
    assert "a list of 1, it has no 2 to set" in problems("tiny", FAULT, "chaos.2.step=3")[0]
    assert "fix the YAML" in problems("tiny", "steps=[1")[0]
    assert "did you mean optimizer.learning_rate?" in problems("tiny", "lr=1")[0]


def test_a_long_value_is_cut() -> None:
    (line,) = problems("tiny", f"precision={'x' * 200}")
    assert line.split(", expected")[0] == f"precision: saw '{'x' * 76}..."


def test_mistakes_are_reported_together() -> None:
    """A bad override, an unknown key, a bad value, a bad fault and a broken rule: five lines, none hidden."""
    lines = problems("tiny", "oops", "model.layer=3", "steps=none", FAULT, "chaos.0.fault=kil", "layout.tp=3")
    assert [line.partition(":")[0] for line in lines] == [
        "oops",
        "steps",
        "model.layer",
        "chaos.0.fault",
        "layout.tp",
    ]


def test_a_key_overlaps_what_it_holds_and_what_holds_it() -> None:
    pairs = {
        ("a", "a"): True,
        ("a", "a.b"): True,
        ("a.b", "a"): True,
        ("a", "ab"): False,
        ("a.b", "a.c"): False,
    }
    assert {pair: _overlap(*pair) for pair in pairs} == pairs


def test_a_rule_is_silent_about_a_broken_value() -> None:
    """model.heads is no number: nothing is said of what it would have divided."""
    assert len(problems("tiny", "model.heads=x", "model.kv_heads=3", "model.hidden_size=130")) == 1
    assert len(problems("tiny", "model=x", "layout.tp=2")) == 1


def test_a_broken_fault_does_not_blame_its_neighbour() -> None:
    bad = "chaos=[{fault: x, target: rank0, step: 1}, {fault: kill, target: 'worker:9', step: 1}]"
    assert [line.split(",")[0] for line in problems("tiny", bad)] == [
        "chaos.0.fault: saw 'x'",
        "chaos.0.target: saw 'rank0'",
        "chaos.1.target: saw worker:9",
    ]


def test_a_spare_worker_is_allowed_beside_a_fixed_layout() -> None:
    assert load_job("quickstart", ["layout.dp=3", "layout.tp=1", "layout.pp=1"]).layout.dp == 3


def test_bounds_are_inclusive() -> None:
    fault = "chaos=[{fault: kill, target: 'worker:1', step: 8}]"
    overrides = (
        fault,
        "checkpoint.resume_step=8",
        "cluster.min_workers=2",
        "cluster.local_cpus=2",
        "optimizer.schedule={kind: wsd, warmup_steps: 5, decay_steps: 3}",
        "elastic.node_timeout_s=2",
        "snapshot.interval_steps=1",
        "model.vocab_size=257",
        "layout.dp=2",
        "layout.micro_batch=8",
    )
    job = load_job("tiny", overrides)
    assert job.chaos[0].step == job.steps
    assert load_job("tiny", ["optimizer.schedule.warmup_steps=8"]).optimizer.schedule.warmup_steps == 8


def test_the_end_of_a_document_is_told_by_token_files_alone() -> None:
    ends = {source: DataConfig(source=source, path="x", end_token=5).document_end for source in SOURCES}
    assert ends == {"stdlib": 256, "text": 256, "jsonl": 256, "memmap": 5}
    assert DataConfig(source="memmap", path="x").document_end is None
    two = [{"name": name, "source": "memmap", "path": "x", "end_token": 5} for name in "ab"]
    assert DataConfig(sources=two).document_end == 5  # type: ignore[arg-type]
    assert DataConfig(source="text", path="x", tokenizer="t").document_end is None, "the tokenizer's"


def test_plain_data_round_trips() -> None:
    job = load_job("quickstart")
    assert parse_job(public_dict(job)) == job
    assert JobConfig.model_validate(json.loads(json.dumps(public_dict(job)))) == job
    assert pickle.loads(pickle.dumps(job)) == job


@given(
    rate=st.floats(1e-12, 1e3),
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,10}", fullmatch=True),
    steps=st.integers(1, 10**9),
    clip=st.none() | st.floats(1e-9, 1e9),
)
@settings(max_examples=30, deadline=None)
def test_yaml_round_trips(rate: float, name: str, steps: int, clip: float | None) -> None:
    """Names such as ``1e3``, ``null`` or ``2024-01-01`` stay strings, and numbers stay exact."""
    job = parse_job(
        {"name": name, "steps": steps, "optimizer": {"learning_rate": rate, "clip_norm": clip}, "seed": 3}
    )
    text = to_yaml(job)
    assert parse_job(yaml.safe_load(text)) == job


def test_to_yaml_reads_back_from_a_file(tmp_path: Path) -> None:
    job = load_job("quickstart", ["name=1e3x"])
    (tmp_path / "out.yaml").write_text(to_yaml(job))
    assert load_job(str(tmp_path / "out.yaml")) == job
    assert read_source(str(tmp_path / "out.yaml"))["name"] == "1e3x"


def test_yaml_keeps_the_order_of_keys_and_the_letters_of_values() -> None:
    text = to_yaml(JobConfig(storage=StorageConfig(url="/läufe")))
    assert list(yaml.safe_load(text)) == list(public_dict(JobConfig())) != sorted(public_dict(JobConfig()))
    assert "url: /läufe\n" in text


# --- schema ------------------------------------------------------------------------------------------


def test_schema_documents_every_key() -> None:
    schema = job_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["additionalProperties"] is False
    undocumented = [key for key, field in key_schemas().items() if not field.get("description")]
    assert undocumented == []
    assert "chaos.*.step" in key_schemas()
    json.dumps(schema)


def test_allowed_speaks_of_every_key() -> None:
    for key, field in key_schemas().items():
        assert allowed(field), key


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("modl.layers", "model.layers"),
        ("model.kvheads", "model.kv_heads"),
        ("model.learning_rate", "optimizer.learning_rate"),
        ("trainer.max_steps", "steps"),
        ("evaluat", "evaluate"),
        ("foo.cip_norm", "optimizer.clip_norm"),
        ("layout.tensor", "layout.tp"),
        ("layout.context_parallel", "layout.cp"),
        ("tensor_parallel_size", "layout.tp"),
        ("cluster.memory_margin", "layout.memory_margin"),
        ("zzzzzz", None),
    ],
)
def test_nearest_key(key: str, meant: str | None) -> None:
    assert nearest_key(key) == meant


# --- secrets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:9000/x?sig=abc#f", "http://host:9000/x"),
        ("s3://key:secret@bucket/p", "s3://bucket/p"),
        ("/data/file@v1?x", "/data/file@v1?x"),
        ("worker:2", "worker:2"),
        ("note:of?what#now", "note:of?what#now"),
        ("http://[::1/secret", "http://..."),
        ("a[b", "a[b"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_no_secret_is_exported() -> None:
    """Even for a job that was built without validation's refusal of credentials in a URL."""
    url = "https://user:hunter2@host?X-Amz-Signature=hunter2"
    job = JobConfig(storage=StorageConfig(url="s3://a:hunter2@bucket", endpoint_url=url))
    for text in (to_yaml(job), json.dumps(public_dict(job)), json.dumps(fingerprint(job))):
        assert "hunter2" not in text


def test_an_unknown_key_is_named_without_its_value() -> None:
    (line,) = problems("tiny", "storage.secret_key=hunter2")
    assert line.startswith("storage.secret_key: saw an unknown key")
    assert "hunter2" not in line


# --- resume ------------------------------------------------------------------------------------------


def test_fingerprint_holds_what_may_not_change() -> None:
    keys = set(fingerprint(JobConfig()))
    assert {"seed", "precision", "model.layers", "data.global_batch", "optimizer.name"} <= keys
    assert not keys & {"steps", "data.prefetch_steps", "optimizer.learning_rate", "cluster.max_workers"}
    json.dumps(fingerprint(JobConfig()))


def test_compare_judges_each_changed_key() -> None:
    old = public_dict(load_job("quickstart"))
    new = load_job(
        "quickstart",
        [
            "steps=300",
            "chaos=[]",
            "optimizer.learning_rate=1e-4",
            "model.layers=2",
            "data.global_batch=16",
            "data.prefetch_steps=3",
            "optimizer.name=sgd",
            "seed=1",
        ],
    )
    assert dict(compare(old, new)) == {
        "steps": "warn",
        "chaos": "may",
        "optimizer.learning_rate": "warn",
        "model.layers": "refuse",
        "data.global_batch": "refuse",
        "data.prefetch_steps": "may",
        "optimizer.name": "refuse",
        "seed": "refuse",
    }
    assert compare(old, load_job("quickstart")) == []


def test_check_resume_refuses_or_tells() -> None:
    old = public_dict(load_job("tiny"))
    told = check_resume(old, load_job("tiny", ["steps=9", "optimizer.beta1=0.8"]))
    assert told == [
        "steps: was 8, now 9; it changes the loss curve: the learning rate's cosine schedule ends at the"
        " last step",
        "optimizer.beta1: was 0.9, now 0.8; it changes the loss curve",
    ]
    constant = load_job("tiny", ["steps=9", "optimizer.schedule.kind=constant"])
    assert check_resume(old, constant)[0] == "steps: was 8, now 9; accepted"
    with pytest.raises(ConfigError) as caught:
        check_resume(old, load_job("tiny", ["model.layers=1", "seed=4", "steps=9"]))
    assert len(caught.value.problems) == 2
    assert "model.layers: was 2, now 1; it may not change within run tiny" in str(caught.value)
    long = check_resume(old, load_job("tiny", ["steps=90", *(f"chaos.{i}={FAULT[7:-1]}" for i in range(4))]))
    assert [len(line.split("now ")[1]) for line in long[1:]] == [60 + len("; accepted")]


def test_a_key_of_an_older_version_counts_as_its_default() -> None:
    old = public_dict(load_job("tiny"))
    del old["precision"]
    old["gone"] = 1
    assert compare(old, load_job("tiny")) == []
    assert compare(old, load_job("tiny", ["precision=fp64"])) == [("precision", "refuse")]
    assert verdict("elastic.grow") == "may"


def test_a_schedule_may_have_been_called_by_an_alias_or_a_name_that_is_gone() -> None:
    new = load_job("tiny", ["layout.schedule=gpipe"])
    for was, changed in (("afab", []), ("gpipe", []), ("gone", [("layout.schedule", "may")])):
        old = public_dict(new)
        old["layout"]["schedule"] = was
        assert compare(old, new) == changed


def test_every_key_has_a_verdict_and_the_docs_hold_the_table() -> None:
    said = dict(table())
    assert said.keys() == flatten(public_dict(JobConfig())).keys()
    assert (said["steps"], said["seed"], said["optimizer.learning_rate"]) == ("warn", "refuse", "warn")
    assert said["init_from.run"] == said["init_from.optimizer_state"] == "refuse"
    text = (Path(__file__).parents[3] / "deploy" / "resume-keys.md").read_text()
    expected = f"\n\n{markdown()}"
    assert text.endswith(expected), "write the output of `picotron-ray config-schema --on-resume` there"


# --- imports -----------------------------------------------------------------------------------------


def test_neither_torch_nor_ray_is_loaded() -> None:
    code = (
        "import sys\n"
        "from picotron_ray.config.export import to_yaml\n"
        "from picotron_ray.config.json_schema import job_schema\n"
        "from picotron_ray.config.load import load_job\n"
        "from picotron_ray.config.resume import check_resume\n"
        "from picotron_ray.planner.search import choose_layout\n"
        "job = load_job('quickstart'); job_schema(); to_yaml(job); choose_layout(job, 4)\n"
        "heavy = {'torch', 'ray', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_launch_filled_in_is_no_change() -> None:
    job = JobConfig()
    saved = public_dict(
        job.model_copy(update={"metrics": job.metrics.model_copy(update={"host": "127.0.0.1"})})
    )
    assert check_resume(saved, job) == []
    named = job.model_copy(update={"metrics": job.metrics.model_copy(update={"host": "0.0.0.0"})})
    assert check_resume(saved, named) == ["metrics.host: was '127.0.0.1', now '0.0.0.0'; accepted"]
