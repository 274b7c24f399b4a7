"""Text sources: files are found, named and read, document by document.

A document is a file (stdlib, text) or a line (jsonl, `jsonl_record`). Its *split key* decides whether it
is held out: the file's name relative to the folder that was asked for, so that a copy elsewhere splits the
same way; for a line of jsonl, which has no name, its text with its prompt, so that equal documents never
stand on both sides. Files are read in pieces, so a file may be larger than memory; a jsonl line may not.
"""

from __future__ import annotations

import codecs
import glob
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.jsonl_record import Span, not_utf8, read_record
from picotron_ray.errors import DataError

PIECE_BYTES = 16 << 20
# Not part of every distribution's standard library, or not the library itself.
_STDLIB_SKIPS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "ensurepip"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Input file: its path, and its name relative to the folder asked for (posix separators)."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class Document:
    """Document: its split key, and its bytes in pieces, to be read once.

    Fields:
        counted: ranges of its bytes that count in the loss, ascending; None: all do.
    """

    key: bytes
    pieces: Iterator[bytes]
    counted: tuple[Span, ...] | None = None


def shown(path: str | Path) -> str:
    """Show a path in a message: one line of valid UTF-8, whatever bytes the file's name is made of."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def unreadable(path: str | Path, error: OSError | ValueError) -> DataError:
    """Make the error for a file or folder that the system refuses."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return DataError(
        f"data.path: cannot read {shown(path)}: {why}; give a file, folder or glob that this user can read"
    )


def find_files(data: DataConfig) -> list[SourceFile]:
    """List all input files of the source, sorted by name. Raises DataError when there are none."""
    if data.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, _STDLIB_SKIPS) if f.path.suffix == ".py"]
        where = f"the standard library's folder {root}"
    else:
        if data.path is None:
            raise DataError(f"data.path: missing, but data.source {data.source} needs a file, folder or glob")
        files = _expand(os.path.expanduser(data.path))
        where = shown(data.path)
    if not files:
        raise DataError(f"data.path: no files in {where}; give a file, folder or glob that holds some")
    return sorted(files, key=lambda file: file.name)


def _expand(path: str) -> list[SourceFile]:
    """List the regular files of a path: itself, all below a folder (hidden ones not), or a glob's."""
    if os.path.isdir(path):
        return list(_walk(Path(path), set()))
    if os.path.exists(path) or not glob.has_magic(path):
        require_file(path)
        return [SourceFile(Path(path), os.path.basename(path))]
    # names are relative to the part before the first wildcard, as they are for a folder
    fixed = Path(path.split("*")[0].split("?")[0].split("[")[0])
    root = fixed if path.startswith(f"{fixed}{os.sep}") else fixed.parent
    found = [Path(match) for match in glob.glob(path, recursive=True)]
    return [SourceFile(f, f.relative_to(root).as_posix()) for f in found if f.is_file()]


def require_file(path: str | Path) -> None:
    """Raise DataError unless ``path`` is a regular file: a pipe or device would block or never end."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(path, error) from None
    if not regular:
        raise DataError(f"data.path: {shown(path)} is neither a regular file nor a folder; give one of those")


def _walk(root: Path, skip: set[str]) -> Iterator[SourceFile]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(d for d in folders if d not in skip and not d.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield SourceFile(path, path.relative_to(root).as_posix())


def read_documents(data: DataConfig, files: list[SourceFile]) -> Iterator[Document]:
    """Read all documents, in the files' order; each must be consumed before the next is asked for.

    Raises DataError for a file that cannot be read, is not UTF-8 (text, jsonl) or not JSON lines
    (`jsonl_record`).
    """
    for file in files:
        if data.source == "jsonl":
            yield from _lines(file, data)
        else:
            yield Document(file.name.encode("utf-8", "surrogateescape"), _pieces(file, data.source == "text"))


def _pieces(file: SourceFile, check: bool) -> Iterator[bytes]:
    """Read a file's bytes; with ``check`` they must be UTF-8 (nothing is re-encoded)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    try:
        with file.path.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                if check:
                    decoder.decode(piece)
                done += len(piece)
                yield piece
            if check:
                decoder.decode(b"", final=True)
    except OSError as error:
        raise unreadable(file.path, error) from None
    except UnicodeDecodeError as error:
        # the decoder counts from the bytes that it carried over from the last piece
        raise not_utf8(shown(file.path), f"near byte {done + error.start}") from None


def _lines(file: SourceFile, data: DataConfig) -> Iterator[Document]:
    try:
        with file.path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    record = read_record(line, f"{shown(file.path)}:{number}", data)
                    yield Document(record.text, iter((record.text,)), record.counted)
    except OSError as error:
        raise unreadable(file.path, error) from None
