"""Files behind a URL: listed once, each with its size and a mark, and read in pieces.

``s3://`` goes through boto3, as the run's own storage does (`s3_files`); other schemes through fsspec, whose
packages of a scheme must be there: ``hf://`` needs huggingface_hub, ``hdfs://`` pyarrow with a Hadoop client.
"""

from __future__ import annotations

import glob
import posixpath
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from picotron_ray.config.schema.documents import S3Access
from picotron_ray.data.s3_files import find_objects
from picotron_ray.data.source_files import InputFile, shown
from picotron_ray.errors import DataError

BLOCK_BYTES = 8 << 20
_MARKS = ("ETag", "etag", "md5", "oid", "blob_id", "sha256", "checksum", "mtime", "last_modified", "created")


@dataclass(frozen=True, slots=True)
class UrlFile:
    """File of a file system that fsspec knows.

    Fields:
        url: for messages and as identity.
        size, mark: as they were when it was listed.
        system: the file system.
        path: the file's, there.
    """

    url: str
    name: str
    size: int
    mark: str
    system: Any
    path: str

    @property
    def where(self) -> str:
        """URL, for messages."""
        return shown(self.url)

    def identity(self) -> str:
        """URL, name, size and mark."""
        return f"{self.url}\0{self.name}\0{self.size}\0{self.mark}\n"

    def open(self) -> BinaryIO:
        """Open it for reading, in blocks."""
        try:
            return cast(BinaryIO, self.system.open(self.path, "rb", block_size=BLOCK_BYTES))
        except Exception as error:  # noqa: BLE001 - each package of a scheme raises its own
            raise unreachable(self.url, error) from None


def find_urls(url: str, s3: S3Access) -> list[InputFile]:
    """List the files of a URL: itself, all below it, or a glob's. Hidden ones are left out.

    Raises DataError for a scheme that nothing here reads, or a place that does not answer.
    """
    if url.startswith("s3://"):
        return list(find_objects(url, s3))
    system, path = _system(url)
    try:
        system.invalidate_cache()
        found, root = _listed(system, path)
    except FileNotFoundError:
        return []
    except Exception as error:  # noqa: BLE001 - each package of a scheme raises its own
        raise unreachable(url, error) from None
    scheme = url.partition("://")[0]
    files: list[InputFile] = []
    for place, info in sorted(found.items()):
        name = posixpath.relpath(place, root)
        if info.get("type") == "file" and not any(part.startswith(".") for part in name.split("/")):
            mark = next((str(info[key]) for key in _MARKS if info.get(key)), "")
            full = f"{scheme}://{place.lstrip('/') if scheme != 'file' else place}"
            files.append(UrlFile(full, name, int(info.get("size") or 0), mark, system, place))
    return files


def unreachable(url: str, error: Exception) -> DataError:
    """Make the error for a URL that its server, or the package that reads it, refuses."""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return DataError(f"data.path: cannot read {shown(url)}: {why}; check the URL, its rights and the network")


def _system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        return cast(tuple[Any, str], fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(
            f"data.path: {shown(url)}: nothing here reads that scheme ({why}); install what it names on every"
            " node, or copy the files to a path"
        ) from None
    except Exception as error:  # noqa: BLE001 - as above
        raise unreachable(url, error) from None


def _listed(system: Any, path: str) -> tuple[dict[str, Any], str]:
    """Return what is known of each file by its path, and the folder that names are relative to."""
    if glob.has_magic(path):
        fixed = path.split("*")[0].split("?")[0].split("[")[0]
        return system.glob(path, detail=True), fixed.rpartition("/")[0] or "/"
    if system.isfile(path):
        return {path: system.info(path)}, posixpath.dirname(path) or "/"
    return system.find(path, detail=True), path
