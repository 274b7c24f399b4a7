"""Chats: what a template makes of rows, which tokens are answers, and templates that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.cache import byte_splits
from picotron_ray.data.chat_template import ChatTemplate
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.tokenizer import open_tokenizer
from picotron_ray.errors import DataError
from tests.support.data_kit import CHATML, MARKED, write_tokenizer

Row = dict[str, Any]


def chat(i: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"How much is {i} and {i}?"},
        {"role": "assistant", "content": f"{2 * i} €"},
        {"role": "user", "content": "Thanks é"},
        {"role": "assistant", "content": "You are welcome."},
    ]


ROWS: list[Row] = [{"messages": chat(i)} for i in range(30)]


def written(folder: Path, rows: list[Row]) -> None:
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def config(tmp_path: Path, template: str = "tokenizer", **given: Any) -> DataConfig:
    if not (tmp_path / "tok").exists():
        write_tokenizer(tmp_path / "tok", template=CHATML)
    base = {"source": "jsonl", "path": str(tmp_path / "chats.jsonl"), "tokenizer": str(tmp_path / "tok")}
    base |= {"chat_template": template, "loss_mask": True, "held_out_fraction": 0.2, "sequence_length": 96}
    return DataConfig(**{**base, **given})


def build(tmp_path: Path, data: DataConfig) -> DataSplits:
    return build_dataset(data, 300, 0, tmp_path / "cache")


def answers(tmp_path: Path, data: DataConfig) -> set[str]:
    """The stretches of training tokens that count, as text."""
    tokenizer, splits = open_tokenizer(data), byte_splits(data, tmp_path / "cache")
    assert splits.masks is not None
    mask, found = np.concatenate([[0], splits.masks[0], [0]]).astype(np.int8), set()
    starts, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        found.add(tokenizer.decode(splits.train[start:end].tolist()))
    return found


def test_answers_alone_count_with_their_ends(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    found = answers(tmp_path, config(tmp_path))
    last = "You are welcome.<|im_end|>\n<end>"
    assert last in found
    assert found - {last} <= {f"{2 * i} €<|im_end|>\n" for i in range(30)}
    assert len(found) > 15


def test_marks_of_a_template_say_what_counts(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    (tmp_path / "t.jinja").write_text(MARKED)
    for template in (MARKED, str(tmp_path / "t.jinja")):
        found = answers(tmp_path, config(tmp_path, template))
        assert "You are welcome.<|im_end|><end>" in found
        assert len(found) > 15


def test_bytes_take_templates_too(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    found = answers(tmp_path, config(tmp_path, CHATML, tokenizer=None))
    assert "You are welcome.<|im_end|>\n<|end of document|>" in found
    assert len(found) > 15


def test_special_tokens_of_a_template_are_tokens(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    data = config(tmp_path)
    tokens = byte_splits(data, tmp_path / "cache").train
    assert (tokens == open_tokenizer(data).id_of("<|im_start|>")).sum() % 4 == 0
    assert (tokens == open_tokenizer(data).id_of("<|im_start|>")).any()


def test_packed_rows_hold_whole_chats(tmp_path: Path) -> None:
    """Also where the template ends each answer as documents end, which no second end follows."""
    written(tmp_path, ROWS)
    ends = CHATML.replace("<|im_end|>\\n", "<end>")
    splits = build(tmp_path, config(tmp_path, ends, batching="packed", sequence_length=255))
    numbers = splits.train.documents(np.arange(splits.train.samples))
    counted = splits.train.counted(np.arange(splits.train.samples))
    rows = splits.train.rows(np.arange(splits.train.samples))
    assert numbers is not None
    assert counted is not None
    for row, number, mask in zip(rows, numbers, counted, strict=True):
        for document in range(number.max() + 1):
            mine = row[:-1][number == document]
            assert (mine == 0).sum() in (3, 4)  # one for each message; the last may be no input
        assert mask.any()


def test_without_masks_all_counts(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    splits = build(tmp_path, config(tmp_path, loss_mask=False))
    assert splits.train.counted(np.arange(1)) is None


def test_the_template_is_part_of_the_cache(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    first = build(tmp_path, config(tmp_path)).fingerprint
    assert build(tmp_path, config(tmp_path, f"Hi. {CHATML}")).fingerprint != first


@pytest.mark.parametrize(
    ("row", "template", "words"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, CHATML, "has no answer of an assistant"),
        ({"messages": []}, CHATML, "data.messages_key: {} has no list of messages under 'messages'"),
        ({"turns": []}, CHATML, "(seen: keys turns); name the right key"),
        (
            {"messages": [7, {"role": "assistant", "content": "x"}]},
            "{{ messages[0] + 'x' }}",
            "fails on this row",
        ),
        (
            {"messages": chat(1), "bad": True},
            "{% if messages|length > 3 %}{{ raise_exception('too\nlong') }}{% endif %}x",
            "data.chat_template: {}: the template fails on this row (TemplateError: too long)",
        ),
        (
            {"messages": chat(1)},
            "{{ messages|length }}",
            "data.chat_template: {}: the text up to message 2 is not how the whole chat begins",
        ),
        ({"messages": chat(1)}, "{{ messages.__class__.__mro__ }}", "SecurityError"),
        (
            {"messages": chat(1)},
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "puts one {% generation %} into another",
        ),
    ],
)
def test_a_row_that_fails_is_named_by_file_and_line(
    tmp_path: Path, row: Row, template: str, words: str
) -> None:
    good = [] if template != CHATML else ROWS[:3]
    written(tmp_path, [*good, row])
    with pytest.raises(DataError) as caught:
        build(tmp_path, config(tmp_path, template))
    line = str(caught.value)
    assert "\n" not in line
    place = f"{tmp_path}/chats.jsonl:{len(good) + 1}"
    assert place in line
    assert words.replace("{}", place, 1) in line if "{}" in words else words in line


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    for template, words in (
        ("{% if %}", "the template is no Jinja template"),
        (str(tmp_path / "none.jinja"), "cannot read"),
    ):
        with pytest.raises(DataError, match=f"^data.chat_template: .*{words}"):
            build(tmp_path, config(tmp_path, template))
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match="comes without a template"):
        build(tmp_path, config(tmp_path))


def test_there_is_no_clock() -> None:
    found = ChatTemplate("{{ strftime_now is defined }}{{ eos_token }}", "x", {"eos_token": "<e>"})
    assert found.render([], None, "here")[0] == "False<e>"
