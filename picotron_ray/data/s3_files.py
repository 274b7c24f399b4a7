"""Objects of S3 as input files: listed with their etags, read by ranges of that very version."""

from __future__ import annotations

import glob
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError

from picotron_ray.config.schema.documents import S3Access
from picotron_ray.data.source_files import shown
from picotron_ray.errors import DataError

RANGE_BYTES = 8 << 20
TRIES = 8  # of a request, with waits that grow to 20 s between
MOST_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class S3File:
    """Object: its place, its name relative to the prefix asked for, and size and etag when it was listed."""

    client: Any
    bucket: str
    key: str
    name: str
    size: int
    etag: str

    @property
    def where(self) -> str:
        """URL, for messages."""
        return shown(f"s3://{self.bucket}/{self.key}")

    def identity(self) -> str:
        """URL, name, size and etag."""
        return f"s3://{self.bucket}/{self.key}\0{self.name}\0{self.size}\0{self.etag}\n"

    def open(self) -> BinaryIO:
        """Open it for reading by ranges."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self), RANGE_BYTES))


class _Ranges(io.RawIOBase):
    """Bytes of an object, a range for each read."""

    def __init__(self, file: S3File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._file.size)
        if self._at >= end:
            return 0
        try:
            data = self._range(self._at, end)
        except (ClientError, BotoCoreError) as error:
            raise _refused(self._file.where, error) from None
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _range(self, first: int, end: int) -> bytes:
        """Read a range, again where its body breaks off: the client tries requests again, not bodies."""
        file, words = self._file, f"bytes={first}-{end - 1}"
        for tried in range(1, TRIES + 1):
            reply = file.client.get_object(Bucket=file.bucket, Key=file.key, Range=words, IfMatch=file.etag)
            try:
                data: bytes = reply["Body"].read()
                return data
            except (HTTPClientError, IncompleteReadError):
                if tried == TRIES:
                    raise
                time.sleep(min(2.0**tried / 4, MOST_WAIT_S))
        raise AssertionError("the last try returns or raises")


def find_objects(url: str, access: S3Access) -> Iterator[S3File]:
    """List the objects of a URL: itself, all below it as a folder, or a glob's. Hidden ones are left out.

    Raises DataError where the bucket cannot be listed.
    """
    bucket, _, path = url.removeprefix("s3://").partition("/")
    if not bucket:
        raise DataError(f"data.path: {shown(url)} names no bucket; use s3://bucket/prefix")
    magic = glob.has_magic(path)
    fixed = re.split(r"[*?\[]", path)[0] if magic else path
    root = fixed.rpartition("/")[0] if magic else path.rstrip("/")
    fits = re.compile(_pattern(path)) if magic else None
    client = _client(url, access)
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=fixed):
            for item in page.get("Contents", ()):
                key = item["Key"]
                if key.endswith("/") or (fits and not fits.fullmatch(key)):
                    continue
                name = _name(key, root)
                if name and not any(part.startswith(".") for part in name.split("/")):
                    yield S3File(client, bucket, key, name, int(item["Size"]), item["ETag"])
    except (ClientError, BotoCoreError) as error:
        raise _refused(shown(url), error) from None


def _name(key: str, root: str) -> str:
    """Name relative to a folder, or an object's last part; "" where it does not lie in the folder."""
    if key == root:
        return key.rpartition("/")[2]
    return key.removeprefix(f"{root}/") if not root or key.startswith(f"{root}/") else ""


def _pattern(path: str) -> str:
    """Regular expression of a glob: ``*`` within a name, ``**`` over folders."""
    found = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", path):
        special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        if part.startswith("[") and part.endswith("]"):
            found += part.replace("[!", "[^")
        else:
            found += special.get(part) or re.escape(part)
    return found


def _client(url: str, access: S3Access) -> Any:
    style = {"addressing_style": "path" if access.path_style else "auto"}
    options = Config(
        retries={"mode": "standard", "total_max_attempts": TRIES},
        connect_timeout=5,
        read_timeout=30,
        s3=cast(Any, style),
    )
    try:
        return boto3.session.Session().client(
            "s3", endpoint_url=access.endpoint_url, region_name=access.region, config=options
        )
    except (BotoCoreError, ValueError) as error:
        raise DataError(f"data.path: {shown(url)}: {error}; check data.s3") from None


def _refused(where: str, error: ClientError | BotoCoreError) -> DataError:
    code = ""
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", ""))
    if code in ("PreconditionFailed", "412", "NoSuchKey", "404"):
        return DataError(
            f"data.path: {where} changed since it was listed ({code}); start again when nobody writes it"
        )
    why = " ".join(str(error).split())
    return DataError(f"data.path: cannot read {where}: {why}; check the URL, data.s3 and the credentials")
