"""Text of a run's model: the tokenizer of its data, checked against the model's vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.tokenizer import Tokenizer, open_tokenizer
from picotron_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelText:
    """Text to ids and back, as a run's data has it.

    Fields:
        tokenizer: of the data.
    """

    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        """Ids that stand for something are below it; the model may have more."""
        return self.tokenizer.vocabulary

    @property
    def end_id(self) -> int | None:
        """Id that ends a document; None: nothing says."""
        return self.tokenizer.end_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end. Special tokens written out in it are these tokens."""
        return [int(token) for token in self.tokenizer.encode([text], special=True)[0]]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, for people: bytes of no character as U+FFFD."""
        return self.tokenizer.decode(ids)


def text_of(job: JobConfig) -> ModelText:
    """Open the tokenizer that the run was trained with.

    Raises:
        ConfigError: the run's token files were made by a tokenizer that nobody knows here, or ids reach
            beyond the model's vocabulary.
        DataError: the tokenizer's file is gone, or is none.
    """
    memmap = "memmap" in {source.source for source in job.data.named_sources.values()}
    if memmap and job.data.tokenizer is None:
        raise ConfigError(
            "data.source: saw memmap, whose ids were made elsewhere; say data.tokenizer=... to turn text into"
            " them"
        )
    found = ModelText(open_tokenizer(job.data))
    if found.vocabulary > job.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: saw {job.model.vocab_size}, expected at least the {found.vocabulary} ids of"
            " the tokenizer"
        )
    return found
