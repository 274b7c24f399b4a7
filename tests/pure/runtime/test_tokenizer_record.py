"""The tokenizer that a run keeps, and the one that imported weights came with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tokenizer import open_tokenizer
from picotron_ray.errors import ConfigError, CorruptError
from picotron_ray.runtime.run_storage import hf_assets
from picotron_ray.runtime.run_storage.tokenizer_record import keep_tokenizer, load_tokenizer
from tests.support.data_kit import CHATML
from tests.support.data_kit import write_tokenizer as make


def job_of(folder: Path) -> JobConfig:
    return JobConfig(data=DataConfig(source="text", path="x", tokenizer=str(folder)))


def test_a_run_keeps_the_first_tokenizer_and_exports_have_it(tmp_path: Path) -> None:
    job, storage = job_of(make(tmp_path / "tok", template=CHATML)), LocalStorage(str(tmp_path), "run")
    keep_tokenizer(storage, job)
    (tmp_path / "tok" / "tokenizer_config.json").write_text("{}")
    keep_tokenizer(storage, job)
    kept = load_tokenizer(storage)
    assert kept is not None
    assert (kept.end, kept.digest) == (0, open_tokenizer(job.data).digest)
    (tmp_path / "out").mkdir()
    hf_assets.write(tmp_path / "out", None, kept.files)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == CHATML
    ours, theirs = (tmp_path / name / "tokenizer.json" for name in ("out", "tok"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_was_damaged_is_told(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "run")
    keep_tokenizer(storage, job_of(make(tmp_path / "tok")))
    storage.put("tokenizer/tokenizer.json", b"{}")
    with pytest.raises(CorruptError, match="does not match its digest"):
        load_tokenizer(storage)
    storage.delete("tokenizer/tokenizer.json")
    with pytest.raises(CorruptError, match="is missing"):
        load_tokenizer(storage)


def test_a_run_on_bytes_keeps_none_and_a_node_without_the_file_goes_on(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "run")
    keep_tokenizer(storage, JobConfig())
    keep_tokenizer(storage, job_of(tmp_path / "nowhere"))
    assert load_tokenizer(storage) is None


def test_the_datas_tokenizer_is_compared_with_that_of_the_weights(tmp_path: Path) -> None:
    """By the id of each of their tokens; more tokens do no harm."""
    job = job_of(make(tmp_path / "ours"))
    data = (tmp_path / "ours" / "tokenizer.json").read_bytes()
    kept = hf_assets.HfAssets("there", {}, {"tokenizer.json": data}, 5)
    assert hf_assets.source_note(job, kept) is None
    other = (make(tmp_path / "theirs", extra=2) / "tokenizer.json").read_bytes()
    with pytest.raises(ConfigError, match=r"^data.tokenizer: token '.*' has id .*, but .* of there"):
        hf_assets.source_note(job, hf_assets.HfAssets("there", {}, {"tokenizer.json": other}, 5))
    lone = hf_assets.HfAssets("there", {}, {"tokenizer.model": b""}, None)
    assert "was not checked" in str(hf_assets.source_note(job, lone))
