"""Storage in S3 or a server that speaks its protocol, through boto3.

Credentials come from boto3's own chain (environment, files, instance role); a custom certificate
authority from AWS_CA_BUNDLE. Conditional puts are ``If-None-Match: *``: 412 means that somebody else was
first, 409 that a race is not decided yet (tried again, which gives 412 or succeeds). botocore's own
retries are off: this module retries with jitter until ``storage.retry_deadline_s``, so that an outage of
minutes can be waited out and the limit is the user's. A put_if_absent whose reply was lost is tried again
and, where the object is there by then, compared.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

from picotron_ray.checkpoint.storage.base import StoredObject, delete_each
from picotron_ray.checkpoint.storage.tls_errors import tls_advice
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

_ABSENT = {"NoSuchKey", "404", "NotFound"}
_TAKEN = {"PreconditionFailed", "412"}
_RACE = {"409", "ConditionalRequestConflict", "ConcurrentModification", "OperationAborted"}
_BUSY = {
    "SlowDown",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
    "Throttling",
    "BadDigest",
    *_RACE,
}
_NO_BATCHES = {  # what servers say that do not know DeleteObjects, or not with the checksums of today
    "NotImplemented",
    "MethodNotAllowed",
    "InvalidArgument",
    "InvalidRequest",
    "InvalidDigest",
    "MalformedXML",
    "MissingContentMD5",
    "MissingSecurityHeader",
    "405",
    "501",
}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_DENIED = {
    "AccessDenied": "the credentials may not do this",
    "403": "the credentials are refused",
    "Forbidden": "the credentials are refused",
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is invalid",
    "KMS.NotFoundException": "storage.kms_key is no key of this account and region",
    "KMS.DisabledException": "the key of storage.kms_key is disabled",
    "KMS.KMSInvalidStateException": "the key of storage.kms_key cannot be used in its state",
}
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 5.0
T = TypeVar("T")


class S3Storage:
    """Objects under ``s3://<bucket>/<prefix>/<run>/``."""

    def __init__(self, config: StorageConfig, run: str) -> None:
        """Make a client; nothing is contacted yet.

        Raises:
            StorageError: the URL names no bucket, or the endpoint is no URL.
        """
        bucket, _, prefix = config.url.removeprefix("s3://").partition("/")
        if not bucket:
            raise StorageError(f"storage.url {config.url} names no bucket; use s3://bucket/prefix")
        self._bucket = bucket
        self._prefix = "".join(f"{part}/" for part in (prefix.strip("/"), run) if part)
        self._deadline_s = config.retry_deadline_s
        key = config.kms_key
        self._encryption = {} if key is None else {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}
        self._deletes_many = True  # until the server says that it cannot
        options = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=30,
            max_pool_connections=16,
            s3={"addressing_style": "path" if config.path_style else "auto"},
        )
        try:
            self._client: Any = boto3.session.Session().client(
                "s3", endpoint_url=config.endpoint_url, region_name=config.region, config=options
            )
        except (BotoCoreError, ValueError) as error:
            raise StorageError(f"storage of {config.url}: {error}; check storage.endpoint_url") from error

    @property
    def where(self) -> str:
        return f"s3://{self._bucket}/{self._prefix.rstrip('/')}"

    def put(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self._client.put_object(**self._at(key), **self._encryption, Body=data))

    def put_if_absent(self, key: str, data: bytes) -> None:
        def put() -> None:
            self._client.put_object(**self._at(key), **self._encryption, Body=data, IfNoneMatch="*")

        try:
            self._call(key, put)
        except AlreadyExistsError:
            if self.get(key) != data:
                raise

    def get(self, key: str) -> bytes:
        return self._call(key, lambda: _body(self._client.get_object(**self._at(key))))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        span = f"bytes={start}-{start + length - 1}"

        def read() -> bytes:
            try:
                return _body(self._client.get_object(**self._at(key), Range=span))
            except ClientError as error:
                if _code(error) in ("InvalidRange", "416"):  # starts behind the end
                    return b""
                raise

        return self._call(key, read)

    def size(self, key: str) -> int | None:
        try:
            return int(self._call(key, lambda: self._client.head_object(**self._at(key)))["ContentLength"])
        except NotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        more: dict[str, str] = {}
        while True:
            page = self._call(prefix, partial(self._page, prefix, more))
            for item in page.get("Contents", ()):
                yield StoredObject(
                    item["Key"].removeprefix(self._prefix), item["Size"], item["LastModified"].timestamp()
                )
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def folders(self) -> Sequence[str]:
        """List the folders right below the prefix, without what they hold."""
        found: set[str] = set()
        more: dict[str, str] = {}
        while True:
            page = self._call("", partial(self._page, "", {**more, "Delimiter": "/"}))
            found |= {item["Prefix"] for item in page.get("CommonPrefixes", ())}
            if not page.get("IsTruncated"):
                return [name.removeprefix(self._prefix).rstrip("/") for name in found]
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        self._call(key, lambda: self._client.delete_object(**self._at(key)))

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        if time.monotonic() > until_s:
            return keys
        if not self._deletes_many:
            return self._delete_each(keys, until_s)
        wanted = {"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True}

        def delete() -> Any:
            try:
                return self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            except ClientError as error:
                if _code(error) in _NO_BATCHES:
                    return None
                raise

        try:
            reply = self._call(keys[0], delete, until_s)
        except StorageUnavailableError:
            return keys
        if reply is None:
            self._deletes_many = False  # one at a time is what all servers can do
            return self._delete_each(keys, until_s)
        return [key for error in reply.get("Errors", ()) if (key := self._left(error))]

    def _left(self, error: dict[str, str]) -> str:
        """Key of an object that is to be deleted another time; "" where it is not there.

        Raises:
            StorageError: it may not be deleted.
        """
        key = error["Key"].removeprefix(self._prefix)
        answered = {"ResponseMetadata": {"HTTPStatusCode": 200}}
        refused = self._refused(key, ClientError({"Error": error, **answered}, "DeleteObjects"))
        if refused is None:
            return key
        if isinstance(refused, NotFoundError):
            return ""
        raise refused

    def _delete_each(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        left: list[str] = []

        def delete(key: str) -> None:
            try:
                self._call(key, lambda: self._client.delete_object(**self._at(key)), until_s)
            except StorageUnavailableError:
                left.append(key)

        return [*delete_each(delete, keys, until_s), *left]

    def _page(self, prefix: str, more: dict[str, str]) -> Any:
        return self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix + prefix, **more)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _call(self, key: str, action: Callable[[], T], until_s: float | None = None) -> T:
        """Run an idempotent request until it succeeds, is refused, or the deadline has passed.

        Args:
            until_s: the deadline, by ``time.monotonic``; None: as configured.
        """
        deadline = time.monotonic() + self._deadline_s if until_s is None else until_s
        wait, tries = _FIRST_WAIT_S, 0
        while True:
            tries += 1
            try:
                return action()
            except (ClientError, BotoCoreError) as error:
                refused = self._refused(key, error, tries)
                if refused is not None:
                    raise refused from error
                if time.monotonic() + wait > deadline:
                    raise StorageUnavailableError(
                        f"{self.where} did not answer for {self._deadline_s:g} s at {key}:"
                        f" {_one_line(error)}; check storage.endpoint_url and the network"
                    ) from error
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _refused(self, key: str, error: ClientError | BotoCoreError, tries: int = 1) -> StorageError | None:
        """Translate an error after which trying again cannot help; None where it may.

        Args:
            tries: of this call so far.
        """
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StorageError(f"{self.where}: {error}; set AWS_ACCESS_KEY_ID or a profile")
        if isinstance(error, SSLError):
            advice = tls_advice(error, tries)
            return StorageError(f"{self.where}: {_one_line(error)}; {advice}") if advice else None
        if isinstance(error, ParamValidationError):
            return StorageError(f"{self.where}: {_one_line(error)}; check storage.url")
        if not isinstance(error, ClientError):
            return None
        code = _code(error)
        if code == "NoSuchBucket":
            return StorageError(f"bucket {self._bucket} does not exist; create it or correct storage.url")
        if code in _ABSENT:
            return NotFoundError(f"{key} does not exist in {self.where}")
        if code in _TAKEN:
            return AlreadyExistsError(f"{key} exists already in {self.where}")
        if code in _FULL:
            return StorageFullError(
                f"{self.where} is full ({code}); free space or lower checkpoint.keep_last"
            )
        if code in _DENIED:
            return StorageError(
                f"{self.where}: {_DENIED[code]} ({code}); check the credentials and storage.url"
            )
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in _BUSY or status >= 500 or status in (0, 408, 429):
            return None
        return StorageError(
            f"{self.where}: the server refused {key} with {_one_line(error)}; check storage.*"
        )


def _body(reply: Any) -> bytes:
    """An answer's bytes, whole: botocore checks length and checksum, and raises errors of its own.

    As a context its stream would give the bare one below it, which does neither.
    """
    stream = reply["Body"]
    try:
        data: bytes = stream.read()
    finally:
        stream.close()
    return data


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
