"""Config of the samples: where they come from and how they are cut into batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from picotron_ray.config.schema.curriculum import CurriculumConfig
from picotron_ray.config.schema.documents import DocumentSection
from picotron_ray.config.schema.tokenizer import TokenizerSection

END_OF_DOCUMENT = 256  # after the ids of the 256 bytes
DEFAULT_LENGTH = 128


class SourceConfig(DocumentSection):
    """Source of documents.

    Example::

        data:
          source: text
          path: corpus/
    """

    source: Literal["stdlib", "text", "jsonl", "memmap", "parquet", "arrow", "hf"] = Field(
        default="stdlib",
        description="stdlib: the Python standard library's own source files; text: UTF-8 files; jsonl: one"
        " JSON object per line; memmap: raw token ids in one file per split; parquet, arrow: tables; hf: a"
        " dataset of the library datasets",
    )
    path: str | None = Field(
        default=None,
        description="file, folder, glob or URL (s3://, hf://, hdfs://, memory://, …); of hf the folder that"
        " save_to_disk wrote, or a name on the hub; not used by stdlib",
    )
    text_key: str = Field(default="text", description="rows: the key, or column, that holds the text")
    prompt_key: str | None = Field(
        default=None,
        description="rows, for loss_mask: the key of a string that comes before the text and does not count"
        " in the loss",
    )
    spans_key: str | None = Field(
        default=None,
        description="rows, for loss_mask: the key of a list of [start, end], the characters of the text that"
        " count in the loss; end is excluded",
    )
    memmap_dtype: Literal["uint8", "uint16", "uint32"] = Field(
        default="uint16", description="memmap: type of a token id"
    )
    end_token: int | None = Field(
        default=None,
        ge=0,
        description="the id that ends a document: of memmap files, for document_masks; of text, instead of"
        " the tokenizer's eos_token. Bytes end with 256",
    )
    loss_mask: bool = Field(
        default=False,
        description="only some tokens count, such as answers, and the loss is the mean over those. memmap:"
        " beside each token file lies a file .mask, a byte per token: 1 where it counts as a target, else 0."
        " Rows: prompt_key, spans_key or chat_template says",
    )


class MixedSource(SourceConfig):
    """One of several sources, and its share of the rows.

    Example::

        data:
          sources:
            - {name: web, source: jsonl, path: web/*.jsonl, weight: 3}
            - {name: code, source: text, path: src, weight: [[0, 1], [10000, 2]]}
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="of the source, in messages")
    weight: float | tuple[tuple[int, float], ...] = Field(
        default=1.0,
        description="share of the rows, relative to the other sources' weights; or by step: [[0, 1.0], [1000,"
        " 0.5]] is 1.0 for the first 1,000 steps and 0.5 from then on",
    )
    repeat: bool = Field(
        default=True,
        description="false: a run that would need more rows than the source has is refused before it starts",
    )

    @property
    def weights(self) -> dict[int, float]:
        """Weight by the number of steps before it begins to hold, ascending from 0."""
        return {0: self.weight} if isinstance(self.weight, float) else dict(sorted(self.weight))


class DataConfig(SourceConfig, TokenizerSection):
    """Samples, and how they are cut into batches.

    A sample is ``sequence_length`` + 1 consecutive tokens of one stream, or a row of whole documents.

    Example::

        data:
          source: jsonl
          path: corpus/*.jsonl
          text_key: body
          sequence_length: 512
          global_batch: 64
    """

    sources: tuple[MixedSource, ...] = Field(
        default=(),
        description="several sources, instead of source and path; each row is of one of them",
    )
    sequence_length: int = Field(
        default=DEFAULT_LENGTH, ge=1, description="tokens per sample that are predicted"
    )
    global_batch: int = Field(
        default=32, ge=1, description="samples per optimizer step, the same at every layout"
    )
    global_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens per optimizer step, padding included, instead of global_batch: a multiple of"
        " sequence_length",
    )
    held_out_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="share of documents kept for evaluation"
    )
    batching: Literal["fixed", "packed", "buckets"] = Field(
        default="fixed",
        description="fixed: rows are cut from one stream, wherever documents begin; packed: rows hold whole"
        " documents side by side, which do not see each other, each from position 0; buckets: the same, but"
        " a row's documents are of one length bucket, each in a slot of its own; what is left of a row or"
        " slot is padding, which counts nowhere",
    )
    long_documents: Literal["split", "truncate", "drop"] | None = Field(
        default=None,
        description="packed, buckets: what becomes of documents longer than sequence_length + 1 tokens, or"
        " the widest slot: split into several, truncate to their beginning, or drop; without it they are"
        " refused",
    )
    buckets: tuple[int, ...] = Field(
        default=(),
        description="buckets: tokens of a slot in each, ascending; none: sequence_length + 1 and its halves"
        " down to 16",
    )
    max_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="packed, buckets: documents per optimizer step at most, shared evenly by its rows; null:"
        " as many as fit",
    )
    document_masks: bool = Field(
        default=False,
        description="a token attends only to tokens of its own document within the sample; loss and order of"
        " samples stay",
    )
    curriculum: CurriculumConfig = Field(
        default_factory=CurriculumConfig, description="easy rows first, by stages"
    )
    prefetch_steps: int = Field(default=2, ge=1, description="steps loaded ahead, off the critical path")

    @model_validator(mode="before")
    @classmethod
    def _rows_of_tokens(cls, values: Any) -> Any:
        """Take the rows of a step from its tokens; what does not fit together is the rules' to say."""
        given = values if isinstance(values, dict) else {}
        tokens, length = given.get("global_tokens"), given.get("sequence_length", DEFAULT_LENGTH)
        if type(tokens) is int and type(length) is int and length > 0 and "global_batch" not in given:
            return {**given, "global_batch": max(1, tokens // length)}
        return values

    @property
    def finds_documents(self) -> bool:
        """Whether it matters where in the tokens documents end."""
        return self.document_masks or self.batching != "fixed"

    @property
    def document_end(self) -> int | None:
        """The id that ends a document in all sources; None where another place than the config says."""
        sources = self.named_sources.values()
        if self.tokenizer is not None and any(source.source != "memmap" for source in sources):
            return None
        ends = {source.end_token if source.source == "memmap" else END_OF_DOCUMENT for source in sources}
        return ends.pop() if len(ends) == 1 else None

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a token attends only to tokens of its own document, or of its piece of the row."""
        return self.finds_documents or bool(self.curriculum.widths(self.sequence_length))

    @property
    def leaves_out(self) -> bool:
        """Whether some targets count in no loss: masked ones, or padding."""
        masked = any(source.loss_mask for source in self.named_sources.values())
        return masked or self.batching != "fixed"

    @property
    def asks_apart(self) -> tuple[str, str]:
        """Key and value that keep documents apart, where something does."""
        if self.batching != "fixed":
            return "data.batching", self.batching
        if self.curriculum.widths(self.sequence_length):
            return "data.curriculum.stages", "pieces of a stage's sequence_length"
        return "data.document_masks", str(self.document_masks).lower()

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        """Sources by the key under which messages name them: ``data``, or that of a source and its name."""
        if not self.sources:
            return {"data": self}
        return {f"data.sources.{source.name}": source for source in self.sources}
