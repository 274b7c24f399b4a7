"""Config of how text becomes token ids: the tokenizer, chats, and gaps to fill in."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section


class FillInTheMiddle(Section):
    """Documents whose middle is moved to their end, so that a model learns to fill gaps.

    A document is cut at two characters, drawn from ``seed`` and its text alone. The three tokens are those of
    ``data.tokenizer``.

    Example::

        data:
          source: text
          path: src
          tokenizer: tokenizers/code
          fill_in_the_middle: {rate: 0.5, prefix: <fim_prefix>, middle: <fim_middle>, suffix: <fim_suffix>}
    """

    rate: float = Field(default=0.5, ge=0, le=1, description="share of the documents that are rearranged")
    spm_rate: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share of those whose suffix comes first (suffix, prefix, middle); else prefix, suffix,"
        " middle",
    )
    seed: int = Field(default=0, ge=0, description="of what is drawn; the job's seed changes nothing of it")
    prefix: str = Field(default="<|fim_prefix|>", description="token before the prefix")
    middle: str = Field(default="<|fim_middle|>", description="token before the middle")
    suffix: str = Field(default="<|fim_suffix|>", description="token before the suffix")


class TokenizerSection(Section):
    """Tokenizer of all text that a run reads.

    Example::

        data:
          source: text
          path: corpus/
          tokenizer: tokenizers/smollm2
    """

    tokenizer: str | None = Field(
        default=None,
        description="a tokenizer.json, or a folder with one, that every node can read; what ends a document"
        " is the eos_token of the tokenizer_config.json beside it, or end_token. Without it a byte is a"
        " token. Of memmap files it only shows ids as text",
    )
