"""`data prepare`: the bytes of the token cache, whatever the parts, whoever kills it, and what it refuses."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from data_kit import CHATML, write_tokenizer
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.batch import make_batch
from picotron_ray.data.cache import TextSource, text_splits
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.prepare import part as parts
from picotron_ray.data.prepare.part import PartCounts, PartJob
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver.prepare_data import one_by_one, prepare

FILES = 7


def quiet(line: dict[str, Any]) -> None:
    """Progress that nobody reads."""


def pairs(folder: Path, files: int = FILES) -> Path:
    """JSONL of prompts and answers, of which each third row is the same."""
    folder.mkdir(parents=True)
    for number in range(files):
        rows = [
            {"prompt": f"how much is {at}?", "text": f"the sum, {at * at} it is" if at % 3 else "the answer"}
            for at in range(number * 5, number * 5 + 5)
        ]
        (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def masked(tmp_path: Path, **given: object) -> DataConfig:
    path = tmp_path / "pairs"
    fixed = {"source": "jsonl", "path": str(path if path.exists() else pairs(path)), "held_out_fraction": 0.3}
    fixed |= {"loss_mask": True, "prompt_key": "prompt", "sequence_length": 16, "global_batch": 4}
    return DataConfig.model_validate({**fixed, **given})


def plain(tmp_path: Path) -> DataConfig:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"{number % 4} words " * (number % 5))
    return DataConfig(source="text", path=str(folder), held_out_fraction=0.3, sequence_length=8)


def one_file(tmp_path: Path) -> DataConfig:
    (tmp_path / "one.txt").write_text("a text of one document alone")
    return DataConfig(source="text", path=str(tmp_path / "one.txt"), held_out_fraction=0.3, sequence_length=3)


def chats(tmp_path: Path) -> DataConfig:
    """Each message ends with the id that ends a document."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "<|im_end|>", CHATML)
    rows = [
        {"messages": [{"role": role, "content": f"the sum of {at}"} for role in ("user", "assistant")]}
        for at in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = {"source": "jsonl", "path": str(tmp_path / "chats.jsonl"), "chat_template": "tokenizer"}
    given |= {"tokenizer": str(tokenizer), "held_out_fraction": 0.3, "global_batch": 2, "sequence_length": 63}
    return DataConfig.model_validate({**given, "batching": "packed"})


def contents(folder: Path) -> dict[str, bytes]:
    """All files, but for where they lie."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["meta.json"] = found["meta.json"].replace(str(folder).encode(), b"HERE")
    return found


@pytest.mark.parametrize("make", [plain, masked, one_file, chats])
@pytest.mark.parametrize("shards", [1, 3, 50])
def test_the_bytes_are_those_of_the_token_cache(
    make: Callable[[Path], DataConfig], shards: int, tmp_path: Path
) -> None:
    data = make(tmp_path)
    made = prepare(data, tmp_path / "out", shards, dedupe=False, say=quiet)
    cache = text_splits(TextSource.of(data), tmp_path / "cache")
    for at, name in enumerate(("train", "held_out")):
        tokens = np.fromfile(tmp_path / f"out/{name}.bin", "<u2")
        np.testing.assert_array_equal(tokens, (cache.train, cache.held_out)[at])
        assert made["sources"]["data"]["tokens"][name] == len(tokens) > 0
        if cache.masks is not None:
            np.testing.assert_array_equal(np.fromfile(tmp_path / f"out/{name}.mask", "u1"), cache.masks[at])
        if make is chats:
            assert cache.ends is not None
            np.testing.assert_array_equal(np.fromfile(tmp_path / f"out/{name}.ends", "<i8"), cache.ends[at])
    assert not (tmp_path / "out.parts").exists()


@pytest.mark.parametrize("make", [plain, masked, chats])
def test_steps_feed_the_same_rows(make: Callable[[Path], DataConfig], tmp_path: Path) -> None:
    data = make(tmp_path)
    made = prepare(data, tmp_path / "out", 3, dedupe=False, say=quiet)
    prepared = DataConfig.model_validate(made["data"])
    assert prepared.source == "memmap"
    both = [build_dataset(each, 512, 7, tmp_path / "cache") for each in (data, prepared)]
    for step in range(1, 6):
        layout = Layout(micro_batch=data.global_batch)
        direct, other = (make_batch(found.feed, layout, 0, step) for found in both)
        assert direct.digest == other.digest
        for name in ("tokens", "counted", "documents"):
            np.testing.assert_array_equal(getattr(direct, name), getattr(other, name))
    assert both[0].bigram_entropy == both[1].bigram_entropy


def killed(data: DataConfig, out: Path, shards: int, after: int) -> bool:
    """Run in a process that is killed at one of the files that it opens, makes, renames or removes."""
    child = os.fork()
    if not child:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
                seen += str(arguments[0]).startswith(str(out))
                if seen > after:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            prepare(data, out, shards, dedupe=True, say=quiet)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_twice_at_drawn_moments_the_bytes_are_the_same(tmp_path: Path) -> None:
    data, draw, kills = masked(tmp_path), random.Random(7), 0
    prepare(data, tmp_path / "whole", 2, dedupe=True, say=quiet)
    wanted = contents(tmp_path / "whole")
    for number in range(20):
        out = tmp_path / f"out{number}"
        for _ in range(2):
            kills += killed(data, out, draw.randint(1, FILES), draw.randint(0, 100))
        prepare(data, out, 3, dedupe=True, say=quiet)
        assert contents(out) == wanted
        assert sorted(path.name for path in tmp_path.glob(f"{out.name}*")) == [out.name]
    assert kills >= 25


def counting(into: list[str]) -> Callable[[Sequence[PartJob]], Iterable[tuple[int, PartCounts]]]:
    def run(jobs: Sequence[PartJob]) -> Iterable[tuple[int, PartCounts]]:
        into.extend(job.place.name for job in jobs)
        return one_by_one(jobs)

    return run


def stopped(jobs: Sequence[PartJob]) -> Iterable[tuple[int, PartCounts]]:
    yield from list(one_by_one(jobs[:4]))
    raise KeyboardInterrupt


def test_finished_parts_are_kept_and_damaged_ones_made_anew(tmp_path: Path) -> None:
    data, seen, said = masked(tmp_path), list[str](), list[dict[str, Any]]()
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "out", 50, dedupe=False, run=stopped, say=quiet)
    damaged = tmp_path / "out.parts/parts/00-000001/u16"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    prepare(data, tmp_path / "out", 1, dedupe=False, run=counting(seen), say=said.append)
    assert seen == ["00-000001", "00-000004", "00-000005", "00-000006"]
    assert said[0] == {"parts": FILES, "kept": 3}
    prepare(data, tmp_path / "whole", 1, dedupe=False, say=quiet)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    prepare(data, tmp_path / "out", 1, dedupe=False, run=counting(seen), say=said.append)
    assert len(seen) == 4  # a finished result is told, not made again


def test_of_equal_documents_the_first_stays(tmp_path: Path) -> None:
    """Of all sources; documents whose tokens are the same and count otherwise are others."""
    rows = {"a": ["one", "two", "one"], "b": ["three", "two", "four", "three"]}
    for name, texts in rows.items():
        (tmp_path / name).mkdir()
        for at, text in enumerate(texts):
            (tmp_path / name / f"{at}.txt").write_text(text)
    sources = [{"name": name, "source": "text", "path": str(tmp_path / name)} for name in rows]
    data = DataConfig.model_validate({"sources": sources, "held_out_fraction": 0.4})
    made = prepare(data, tmp_path / "out", 2, dedupe=True, say=quiet)["sources"]
    assert {name: made[name]["duplicates"] for name in rows} == {"a": 1, "b": 2}
    both = b"".join(
        bytes(np.fromfile(tmp_path / f"out/{name}/{part}.bin", "<u2").clip(0, 255).astype("u1"))
        for name in rows
        for part in ("train", "held_out")
    )
    assert sorted(both.split(b"\xff")[:-1]) == [b"four", b"one", b"three", b"two"]
    (tmp_path / "c").mkdir()
    spans = [{"text": "same", "spans": span} for span in ([[0, 4]], [[0, 2]], [[0, 4]], [[0, 2]])]
    (tmp_path / "c/rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in spans))
    given = {"source": "jsonl", "path": str(tmp_path / "c"), "loss_mask": True, "spans_key": "spans"}
    other = DataConfig.model_validate({**given, "held_out_fraction": 0.5})
    assert prepare(other, tmp_path / "other", 1, dedupe=True, say=quiet)["sources"]["data"]["duplicates"] == 2


def refused(data: DataConfig, out: Path, dedupe: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        prepare(data, out, 2, dedupe=dedupe, say=quiet)
    (line,) = str(caught.value).splitlines()
    return line.replace(str(out.parent), "HERE")


def test_bad_input_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = masked(tmp_path), tmp_path / "out"
    prepare(data, out, 2, dedupe=False, say=quiet)
    before = contents(out)
    assert refused(data, out, dedupe=True) == (
        "--out: HERE/out holds tokens of another config, of other files or without the same --dedupe; name an"
        " empty folder, or one that is not there"
    )
    assert contents(out) == before
    assert refused(data, tmp_path / "pairs").startswith("--out: HERE/pairs holds 0.jsonl, 1.jsonl, 2.jsonl,")
    memmap = DataConfig(source="memmap", path=str(out))
    assert refused(memmap, tmp_path / "new").startswith(
        "data.source: saw memmap, whose tokens are there already;"
    )
    assert not (tmp_path / "new").exists()
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "new", FILES, dedupe=False, run=stopped, say=quiet)
    assert refused(data, tmp_path / "new", dedupe=True).startswith(
        "--out: HERE/new.parts holds parts of another"
    )

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts, "_fill", full)
    assert refused(data, tmp_path / "new") == (
        "--out: cannot write HERE/new: No space left on device; free space or name another folder. Finished"
        " parts stay in HERE/new.parts"
    )


def test_one_command_at_a_time(tmp_path: Path) -> None:
    data = masked(tmp_path)

    def nested(jobs: Sequence[PartJob]) -> Iterable[tuple[int, PartCounts]]:
        line = refused(data, tmp_path / "out")
        assert line == "--out: another command writes HERE/out.parts; wait for it, or stop it"
        return one_by_one(jobs)

    prepare(data, tmp_path / "out", 2, dedupe=False, run=nested, say=quiet)


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    data = masked(tmp_path)

    def changing(jobs: Sequence[PartJob]) -> Iterable[tuple[int, PartCounts]]:
        (tmp_path / "pairs/6.jsonl").write_text('{"prompt": "other", "text": "rows"}\n')
        return one_by_one(jobs)

    with pytest.raises(
        DataError, match=r"^data.path: 6.jsonl \(of .*\) changed since the files were listed;"
    ):
        prepare(data, tmp_path / "out", FILES, dedupe=False, run=changing, say=quiet)


def test_odd_ends_of_token_files_are_refused(tmp_path: Path) -> None:
    made = prepare(chats(tmp_path), tmp_path / "out", 1, dedupe=False, say=quiet)
    np.array([5, 3], "<i8").tofile(tmp_path / "out/train.ends")
    with pytest.raises(DataError, match=r"^data.path: .*train.ends does not hold ascending places of up to"):
        build_dataset(DataConfig.model_validate(made["data"]), 512, 7, tmp_path / "cache")


def test_the_command_ends_with_a_section_that_is_a_config(tmp_path: Path) -> None:
    """By processes of this machine; a second call tells the same and makes nothing."""
    pairs(tmp_path / "a"), pairs(tmp_path / "b")
    fixed = {"source": "jsonl", "loss_mask": True, "prompt_key": "prompt"}
    sources = [{"name": name, "path": str(tmp_path / name), **fixed} for name in "ab"]
    data = {"sources": sources, "global_tokens": 64, "sequence_length": 16, "held_out_fraction": 0.3}
    (tmp_path / "run.yaml").write_text(json.dumps({"name": "prepared", "data": data}))
    command = ["data", "prepare", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out"), "--shards", "2"]
    told = CliRunner().invoke(cli.app, command, env={"RAY_ADDRESS": ""}).stdout
    config = yaml.safe_load(told.partition("train from it with:\n")[2])
    job = resolve_section(config["data"])
    assert [source.path for source in job.sources] == [str(tmp_path / "out" / name) for name in "ab"]
    assert (job.global_tokens, job.sources[0].loss_mask) == (64, True)
    again = CliRunner().invoke(cli.app, [*command, "--json"], env={"RAY_ADDRESS": ""}).stdout
    assert json.loads(again)["data"] == config["data"]


def resolve_section(data: dict[str, Any]) -> DataConfig:
    """A job's data, its rules included."""
    return load_job("quickstart", [f"data={json.dumps(data)}"]).data


def test_another_tokenizer_on_a_node_is_refused(tmp_path: Path) -> None:
    data = chats(tmp_path)

    def changing(jobs: Sequence[PartJob]) -> Iterable[tuple[int, PartCounts]]:
        write_tokenizer(tmp_path / "tokenizer", "<|im_end|>", CHATML, extra=3)
        return one_by_one(jobs)

    with pytest.raises(DataError, match=r"^data.tokenizer: the tokenizer or chat template of .* is not that"):
        prepare(data, tmp_path / "out", 1, dedupe=False, run=changing, say=quiet)
