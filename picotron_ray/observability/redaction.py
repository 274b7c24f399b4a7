"""Redaction: secrets are cut out of whatever leaves a process as text: log lines, and a bug report's files.

A secret is known by its value where the environment names it as one (``AWS_SECRET_ACCESS_KEY``), by what is
written before it (``password=``), by its form (``ghp_…``), or as user-info or query of a URL. One that has
none of these marks cannot be told from text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from picotron_ray.config.storage_urls import redact_words

HIDDEN = "***"
LEAST_VALUE = 8
"""Characters of an environment variable's value from which on it is looked for; shorter ones are words."""
_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|PRIVATE|WEBHOOK|(?:^|_)AUTH|(?:^|_)PAT$|_DSN$", re.IGNORECASE
)
_NO_SECRET_NAME = re.compile(r"(?:_SOCK|_FILE|_PATH|_DIR|_MODE|_ID)$", re.IGNORECASE)
_URL_NAME = re.compile(r"URL|URI|PROXY|ENDPOINT", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"""(?ix) (?P<name> [\w-]* (?: passw(?:or)?d | passphrase | secret | api[_-]?key | access[_-]?key
        | private[_-]?key | authorization | credential | (?<![a-z]) token (?!s|i[zs]|_?count|_?per) ) [\w-]* )
    (?P<between> \\?["']? \s* [:=] \s* \\?["']? (?: (?:bearer|basic) \s+ )? )
    (?! [\d.,+e-]+ (?:\s|$|["',;]) | (?:bearer|basic) \s ) (?P<value> [^\s"',;&)}\]\\]{6,} )"""
)
_FORMS = re.compile(
    r"""(?x) (?: A(?:KI|SI)A[0-9A-Z]{16} | gh[pousr]_\w{16,} | github_pat_\w{16,} | glpat-[\w-]{16,}
    | hf_[A-Za-z0-9]{16,} | sk-[\w-]{16,} | xox[abeprs]-[\w-]{10,} | AIza[\w-]{35}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,} | (?<=hooks\.slack\.com/) [\w/-]{8,}
    | (?i: (?<=bearer\s) | (?<=basic\s) ) [\w.~+/=-]{12,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?s:.*?)(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z) )"""
)


class Redactor:
    """Redactor of text; made once, as it learns the environment's secrets.

    >>> hide = Redactor({"WANDB_API_KEY": "0123456789abcdef"})
    >>> hide("key 0123456789abcdef, password=opensesame, at s3://me:pw@bucket/runs; tokens=123456")
    'key ***, password=***, at s3://bucket/runs; tokens=123456'
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = sorted(set(_secrets(environment)), key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, values))) if values else None

    def __call__(self, text: str) -> str:
        """Return the text with every known secret replaced by ``***``."""
        if self._values is not None:
            text = self._values.sub(HIDDEN, text)
        text = redact_words(text)
        text = _FORMS.sub(HIDDEN, text)
        return _ASSIGNED.sub(rf"\g<name>\g<between>{HIDDEN}", text)


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of that name holds a secret."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Values that must not be shown; of a URL only the password and what its query gives."""
    found = []
    for name, value in environment.items():
        if _URL_NAME.search(name) and "://" in value:
            found += re.findall(r"://[^\s/:@]*:([^\s/@]+)@", value) + re.findall(
                r"[?&][^=&]*=([^&\s]+)", value
            )
        if is_secret_name(name):
            found.append(value.strip())
    return [value for value in found if len(value) >= LEAST_VALUE]


def redact_values(value: Any, hide: Callable[[str], str] = str) -> Any:
    """Plain data in which what is named like a secret is hidden, also in lists of ``name`` and ``value``.

    Args:
        hide: applied to all other texts.

    >>> redact_values({"api_key": "x", "env": [{"name": "A_TOKEN", "value": "y"}], "steps": 3})
    {'api_key': '***', 'env': [{'name': 'A_TOKEN', 'value': '***'}], 'steps': 3}
    """
    if isinstance(value, Mapping):
        named = str(value.get("name", ""))
        hidden = {"value"} if "value" in value and is_secret_name(named) else set()
        return {
            key: HIDDEN if _hides(str(key), item) or key in hidden else redact_values(item, hide)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(item, hide) for item in value]
    return hide(value) if isinstance(value, str) else value


_SECRET_KEY = re.compile(
    r"(?i)passw(or)?d|passphrase|secret|api_?key|access_?key|private_?key|authorization|credential|webhook"
    r"|(^|_)token$"
)


def _hides(key: str, item: Any) -> bool:
    return isinstance(item, str) and bool(item) and bool(_SECRET_KEY.search(key))
