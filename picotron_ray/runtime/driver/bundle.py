"""Bundle of a run for a bug report: a zip of JSON, of bounded size and without secrets.

Each part is gathered by itself: one that cannot be had is named with the reason, and the others are there.
Secrets are cut out twice: from values by their names, then from the text that is written.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.observability.redaction import Redactor, redact_values
from picotron_ray.runtime.driver.bundle_parts import BundleSource

PART_BYTES = 8 << 20
"""Of one part, before it is compressed; the newest lines of longer ones are kept."""
MOST_BYTES = 48 << 20
"""Of all parts together."""
Part = Callable[[], Any]


def write_bundle(run: str, to: Path | None, source: BundleSource | None = None) -> dict[str, Any]:
    """Write the bundle of a run; returns what is in it, and what is missing and why.

    Raises:
        ConfigError: nothing is known of the run, or the file is there already or cannot be written.
    """
    source = source or BundleSource(run)
    path = to or Path(f"{source.run}-bundle.zip")
    if path.exists():
        raise ConfigError(f"--to: {path} is there already; name another file")
    hide = Redactor(os.environ)
    temporary = path.with_name(f".{path.name}.new")
    files: dict[str, int] = {}
    missing: dict[str, str] = {}
    try:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, text in _gathered(source.parts(), hide, missing):
                archive.writestr(name, text)
                files[name] = len(text)
            index = {"run": source.run, "files": files, "missing": missing}
            archive.writestr("index.json", hide(json.dumps(index, indent=1)))
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"--to: {path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return {
        "run": source.run,
        "file": str(path),
        "bytes": path.stat().st_size,
        "files": sorted(files),
        "missing": missing,
    }


def _gathered(
    parts: Iterable[tuple[str, Part]], hide: Redactor, missing: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """(name, text) of the parts that there are, within the bounds."""
    left = MOST_BYTES
    for name, part in parts:
        try:
            value = part()
        except Exception as error:  # noqa: BLE001 - a report of what is broken meets what is broken
            known = isinstance(error, PicotronError)
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            missing[name] = hide(text if known else f"{type(error).__name__}: {text}")[:500]
            continue
        if value is None:
            missing[name] = "there is none"
            continue
        text = hide(_text(name, redact_values(value, hide)))
        kept = _newest(text, min(PART_BYTES, left))
        left -= len(kept)
        if len(kept) < len(text):
            missing[f"{name}, the older part"] = f"more than {PART_BYTES >> 20} MiB"
        yield name, kept


def _text(name: str, value: Any) -> str:
    if name.endswith(".jsonl"):
        return "".join(f"{json.dumps(each, ensure_ascii=False, default=str)}\n" for each in value)
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"


def _newest(text: str, most: int) -> str:
    """The last lines of a text, of at most so many characters."""
    if len(text) <= most:
        return text
    return text[len(text) - max(0, most) :].partition("\n")[2]
