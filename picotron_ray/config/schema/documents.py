"""Config of documents that are rows or lie behind a URL: chats, gaps to fill in, tables, object stores."""

from __future__ import annotations

from pydantic import Field

from picotron_ray.config.schema.base import Section
from picotron_ray.config.schema.tokenizer import FillInTheMiddle


class S3Access(Section):
    """Object store of ``s3://`` paths of data, where it is not AWS; credentials are boto3's own.

    Example::

        data:
          source: jsonl
          path: s3://corpus/web/*.jsonl
          s3: {endpoint_url: "https://s3.example.com", path_style: true}
    """

    endpoint_url: str | None = Field(
        default=None, description="endpoint other than AWS; else AWS_ENDPOINT_URL says, where it is set"
    )
    region: str | None = Field(default=None, description="region")
    path_style: bool = Field(default=False, description="bucket in the path instead of the host name")


class DocumentSection(Section):
    """Documents of a source that are more than plain text.

    Example::

        data:
          source: jsonl
          path: chats.jsonl
          tokenizer: tokenizers/chat
          chat_template: tokenizer
          loss_mask: true
    """

    chat_template: str | None = Field(
        default=None,
        description="rows are chats, and their text is what this template makes of them: a file of Jinja, its"
        " text, or tokenizer for the one that data.tokenizer comes with. With loss_mask answers alone count",
    )
    messages_key: str = Field(
        default="messages", description="with chat_template: the key of a row's list of messages"
    )
    fill_in_the_middle: FillInTheMiddle | None = Field(
        default=None, description="move the middle of some documents to their end; needs data.tokenizer"
    )
    split: str = Field(default="train", description="hf: the split that is read")
    s3: S3Access = Field(default=S3Access(), description="object store of s3:// paths")
