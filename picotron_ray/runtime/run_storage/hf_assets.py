"""Config and tokenizer that a run keeps of the Hugging Face checkpoint that it began as.

Small files, stored as bytes under ``imported/`` of the run and written back by an export. A run that takes
over its weights (``init_from``) takes them over too. ``imported/record.json`` names them with their digests
and says which ids the tokenizer makes, so that a run is not fed with ids of another one. JSON is parsed;
a sentencepiece model is kept without a look inside, and nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, decode_json, encode_json, get_or_none
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tokenizer import FileTokenizer, open_tokenizer
from picotron_ray.errors import ConfigError, CorruptError
from picotron_ray.runtime.run_storage.hf_files import json_object
from picotron_ray.runtime.run_storage.kept_files import read_kept

FILE_BYTES = 1 << 30  # most; tokenizers have tens of MiB
PREFIX = "imported/"
IMPORTED = "Hugging Face checkpoint "
"""What an origin begins with; its folder follows."""
RECORD = f"{PREFIX}record.json"
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""Files that are a tokenizer; where there is none of them, a checkpoint came without."""
FILES = (
    *VOCABULARIES,
    "added_tokens.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class HfAssets:
    """Files and facts of one checkpoint.

    Fields:
        origin: where it came from, for messages.
        config: config.json of the checkpoint.
        files: bytes by name.
        largest_id: the tokenizer's; None where there is none, or nothing but a sentencepiece model.
    """

    origin: str
    config: dict[str, Any]
    files: dict[str, bytes]
    largest_id: int | None

    @property
    def has_tokenizer(self) -> bool:
        return any(name in self.files for name in VOCABULARIES)


def read(folder: Path, origin: str, config: dict[str, Any], vocabulary: int) -> HfAssets:
    """Read a checkpoint's folder, but for its tensors.

    Args:
        vocabulary: rows of the model's embedding.

    Raises ConfigError for a file that cannot be read, or a tokenizer of another vocabulary.
    """
    files = {name: _bytes(folder / name) for name in FILES if (folder / name).exists()}
    largest: int | None = None
    for name, data in files.items():
        if not name.endswith(".json"):
            continue
        ids = list(_ids(folder / name, json_object(folder / name, data)))
        if ids and max(ids) >= vocabulary:
            raise ConfigError(
                f"{folder / name}: saw token id {max(ids)}, expected ids below {vocabulary}, config.json's"
                " vocab_size: this tokenizer is of another vocabulary; take the model's own"
            )
        largest = max([*ids, -1 if largest is None else largest]) if ids else largest
    return HfAssets(origin, config, files, largest)


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: saw {size} bytes, expected at most {MOST_BYTES} of such a file")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _ids(path: Path, found: dict[str, Any]) -> Iterator[int]:
    """All token ids that one of the tokenizer's JSON files names."""
    try:
        if path.name == "tokenizer.json":
            words = found["model"]["vocab"]
            yield from range(len(words)) if isinstance(words, list) else map(_id, words.values())
            yield from (_id(token["id"]) for token in found.get("added_tokens") or ())
        elif path.name in ("vocab.json", "added_tokens.json"):
            yield from map(_id, found.values())
        elif path.name == "tokenizer_config.json":
            yield from map(int, found.get("added_tokens_decoder") or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: saw no vocabulary of whole numbers ({type(error).__name__}: {error}), expected what"
            " transformers saves; fetch the file again"
        ) from error


def _id(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r:.40} is no token id")
    return value


# --- in a run's storage ----------------------------------------------------------------------------------


def store(storage: Storage, kept: HfAssets) -> None:
    """Put it into a run's storage, the record last."""
    for name, data in kept.files.items():
        storage.put(PREFIX + name, data)
    record = {
        "origin": kept.origin,
        "config": kept.config,
        "largest_id": kept.largest_id,
        "files": {name: blake3(data).hexdigest() for name, data in kept.files.items()},
    }
    storage.put(RECORD, encode_json(record))


def load(storage: Storage) -> HfAssets | None:
    """Load what a run keeps; None where it did not begin as a checkpoint of Hugging Face.

    Raises CorruptError for a file that is missing or not what was stored.
    """
    data = get_or_none(storage, RECORD)
    if data is None:
        return None
    record = decode_json(RECORD, data)
    try:
        digests: Mapping[str, str] = record["files"]
        kept = {
            name: read_kept(storage, PREFIX + name, digests[name], RECORD, FILE_BYTES)
            for name in FILES
            if name in digests
        }
        return HfAssets(record["origin"], record["config"], kept, record["largest_id"])
    except (KeyError, TypeError) as error:
        raise CorruptError(f"{RECORD} is malformed: {error!r}", where=RECORD) from error


def copy_assets(source: Storage, target: Storage) -> None:
    """Copy what another run keeps into this one. Doing it again changes nothing."""
    kept = load(source)
    if kept is not None:
        store(target, kept)


def write(folder: Path, kept: HfAssets | None, tokenizer: Mapping[str, bytes] | None = None) -> None:
    """Write the files into an export, as they were imported, or as the data's own tokenizer has them."""
    for name, data in ({**(kept.files if kept else {}), **(tokenizer or {})}).items():
        (folder / name).write_bytes(data)


# --- the data of a run -----------------------------------------------------------------------------------


def source_note(job: JobConfig, kept: HfAssets | None) -> str | None:
    """Warning where imported weights are fed with ids of the byte tokenizer, or of one not compared.

    Raises ConfigError where they have a tokenizer of their own, and it gives tokens other ids.
    """
    sources = job.data.named_sources.values()
    if kept is None or all(source.source == "memmap" for source in sources):
        return None
    if job.data.tokenizer is not None:
        return _compared(job, kept)
    seen = f"data.source: saw {job.data.source}, whose ids are bytes"
    if kept.has_tokenizer:
        ids = "" if kept.largest_id is None else f", of ids up to {kept.largest_id}"
        raise ConfigError(
            f"{seen}, but the weights come from {kept.origin} with a tokenizer of their own{ids}; name its"
            " file in data.tokenizer, or say data.source=memmap"
        )
    return (
        f"{seen}; the weights come from {kept.origin}, which had no tokenizer: what these ids mean to it was"
        " not checked"
    )


def _compared(job: JobConfig, kept: HfAssets) -> str | None:
    """Compare the data's tokenizer with that of imported weights: each token must have one id in both."""
    if "tokenizer.json" not in kept.files:
        return (
            f"data.tokenizer: the weights come from {kept.origin}, which had no tokenizer.json: that its ids"
            " are those of data.tokenizer was not checked"
        )
    ours = open_tokenizer(job.data)
    assert isinstance(ours, FileTokenizer)
    theirs = FileTokenizer({"tokenizer.json": kept.files["tokenizer.json"]}, kept.origin)
    for token, number in theirs.words.items():
        if ours.words.get(token) != number:
            raise ConfigError(
                f"data.tokenizer: token {token!r} has id {ours.words.get(token)}, but {number} in the"
                f" tokenizer of {kept.origin}, where the weights come from; name that one"
            )
    return None
