"""Text of a run's model: the tokenizer of its data, checked against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from picotron_ray.config.schema.data import END_OF_DOCUMENT
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

END_SHOWN = "<|end of document|>"


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text to ids and back, as a run's data has it: a byte is its own id, and 256 ends a document.

    Fields:
        vocabulary: ids that stand for something are below it; the model may have more.
        end_id: ends a document; None: nothing says.
    """

    vocabulary: int
    end_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, for people: bytes of no character as U+FFFD."""
        held = list(ids)
        if any(token >= END_OF_DOCUMENT for token in held):
            at = next(place for place, token in enumerate(held) if token >= END_OF_DOCUMENT)
            shown = END_SHOWN if held[at] == END_OF_DOCUMENT else f"<|{held[at]}|>"
            return self.decode(held[:at]) + shown + self.decode(held[at + 1 :])
        return bytes(held).decode("utf-8", "replace")


def text_of(job: JobConfig) -> ModelText:
    """Open the tokenizer that the run was trained with.

    Raises:
        ConfigError: the run's token files were made by a tokenizer that nobody knows here, or ids reach
            beyond the model's vocabulary.
    """
    if "memmap" in {source.source for source in job.data.named_sources.values()}:
        raise ConfigError(
            "data.source: saw memmap, whose ids were made elsewhere; text cannot be turned into them here"
        )
    found = ModelText(END_OF_DOCUMENT + 1, END_OF_DOCUMENT)
    if found.vocabulary > job.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: saw {job.model.vocab_size}, expected at least the {found.vocabulary} ids of"
            " the tokenizer"
        )
    return found
