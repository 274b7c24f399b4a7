"""Storage addresses: their form, and how secrets are kept out of what is printed or stored.

Credentials come from boto3's own chain (environment, profile, instance role). A URL that carries them is
refused, and wherever a URL is shown its user-info and query are cut off first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit, urlunsplit

from picotron_ray.config.schema.service import StorageConfig

# Amazon's naming rules: 3 to 63 of lower-case letters, digits, dots and hyphens, alphanumeric at both ends.
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_CREDENTIALS = "put credentials into the environment (AWS_ACCESS_KEY_ID, ...) or an AWS profile"


def redact(text: str) -> str:
    """``text`` without the user-info, query and fragment of a URL; other strings are returned unchanged."""
    parts = _split(text)
    if parts is None:
        scheme = text.partition("://")[0]
        return f"{scheme}://..." if "://" in text else text
    if not parts.scheme or "://" not in text:
        return text
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


_USER = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/\"'<>@]*@")
_QUERY = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://[^\s\"'<>?#]*)[?#][^\s\"'<>]*")


def redact_words(text: str) -> str:
    """``text`` with every URL in it redacted, as in the message of a library's error.

    >>> redact_words("no answer from https://me:secret@host/a?key=1, gave up")
    'no answer from https://host/a, gave up'
    """
    return _QUERY.sub(_without_query, _USER.sub(r"\1", text)) if "://" in text else text


def _without_query(found: re.Match[str]) -> str:
    end = found[0][-1]
    return found[1] + (end if end in ".,;:)" else "")


def _split(text: str) -> SplitResult | None:
    try:
        return urlsplit(text)
    except ValueError:  # such as an unclosed IPv6 bracket
        return None


def _has_secret(parts: SplitResult) -> bool:
    return "@" in parts.netloc or bool(parts.query)


def url_problems(storage: StorageConfig) -> Iterator[tuple[str, str]]:
    """(key of the section, what is wrong with it) for every mistake in the storage's addresses."""
    yield from _url(storage.url)
    if storage.endpoint_url is not None:
        yield from _endpoint(storage.endpoint_url)
    if not storage.url.startswith("s3:"):
        given = {
            "endpoint_url": storage.endpoint_url is not None,
            "region": storage.region is not None,
            "path_style": storage.path_style,
            "kms_key": storage.kms_key is not None,
        }
        for key in (name for name, is_given in given.items() if is_given):
            yield key, f"saw a value with the local folder {redact(storage.url)}; only s3:// storage uses it"


def server_problems(url: str) -> Iterator[str]:
    """Say what is wrong with the address of a tracker's server."""
    parts = _split(url)
    if parts is None or ("://" in url and parts.scheme == ""):
        yield f"saw {redact(url)!r}, expected a URL"
    elif "://" in url and _has_secret(parts):
        yield (
            f"saw credentials or a query in {redact(url)!r}; put them into the environment"
            " (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, WANDB_API_KEY)"
        )


def _url(url: str) -> Iterator[tuple[str, str]]:
    if not url.strip():
        yield "url", f"saw {url!r}, expected a local folder or s3://bucket/prefix"
        return
    if "://" not in url and not url.startswith("s3:"):
        return
    parts = _split(url)
    if parts is None or parts.scheme != "s3" or "://" not in url:
        yield "url", f"saw {redact(url)!r}, expected a local folder or s3://bucket/prefix"
    elif _has_secret(parts):
        yield "url", f"saw credentials or a query in {redact(url)!r}; {_CREDENTIALS}"
    elif not _BUCKET.match(parts.netloc):
        yield (
            "url",
            f"saw bucket {parts.netloc!r}, expected 3 to 63 lower-case letters, digits, dots or hyphens as in"
            " s3://bucket/prefix",
        )


def _endpoint(url: str) -> Iterator[tuple[str, str]]:
    parts = _split(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        yield "endpoint_url", f"saw {redact(url)!r}, expected http://host:port or https://host:port"
    elif _has_secret(parts):
        yield "endpoint_url", f"saw credentials or a query in {redact(url)!r}; {_CREDENTIALS}"
