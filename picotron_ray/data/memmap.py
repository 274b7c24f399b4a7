"""Memory-mapped token files: raw ids, one file per split, read in place.

A folder must hold ``train.bin`` and ``held_out.bin`` (or ``val.bin``, as nanoGPT names it); of a single
file the last ``held_out_fraction`` is held out. Files are read through once, for their largest id, their
digest and the baseline; the result is kept under the file's size and modification time.
"""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.cache import TokenSplits
from picotron_ray.data.samples import Tokens
from picotron_ray.data.source_files import require_file, shown, unreadable
from picotron_ray.data.split_writer import END, tail_tokens
from picotron_ray.errors import DataError

SCAN_TOKENS = 16 << 20
_HELD_OUT_NAMES = ("held_out.bin", "val.bin")


def memmap_splits(data: DataConfig, vocabulary: int, folder: Path) -> TokenSplits:
    """Open both splits of a memmap source. Raises DataError for missing or odd files, or too large ids.

    Args:
        vocabulary: ids must be below it.
        folder: where scan results are kept; a folder that cannot be written only costs a scan each time.
    """
    if data.path is None:
        raise DataError("data.path: missing, but data.source memmap needs a file or folder of token ids")
    path = os.path.expanduser(data.path)
    paths = _split_files(Path(path)) if os.path.isdir(path) else [Path(path)]
    streams = [_map(p, data.memmap_dtype) for p in paths]
    digests = []
    for file, tokens in zip(paths, streams, strict=True):
        largest, digest = _scan(file, tokens, folder)
        if largest >= vocabulary:
            raise DataError(
                f"data.path: {shown(file)} holds token id {largest}, beyond model.vocab_size {vocabulary};"
                f" set that to at least {largest + 1}, or check data.memmap_dtype {data.memmap_dtype}"
            )
        digests.append(digest)
    masks: list[Tokens] = []
    for file, tokens in zip(paths, streams, strict=True) if data.loss_mask else ():
        mask, digest = _mask(file, len(tokens), folder)
        masks.append(mask)
        digests.append(f"mask {digest}")
    if len(streams) == 1:
        cut = len(streams[0]) - tail_tokens(len(streams[0]), data.held_out_fraction)
        streams = [streams[0][:cut], streams[0][cut:]]
        masks = [part for mask in masks for part in (mask[:cut], mask[cut:])]
        digests.append(str(cut))
    if data.finds_documents:
        _check_end(streams[0], data.end_token, paths[0])
    pair = (masks[0], masks[1]) if masks else None
    ends = _ends(paths, streams) if data.finds_documents and len(paths) == 2 else None
    digests += [xxhash.xxh3_128_hexdigest(part) for part in ends or ()]
    return TokenSplits(streams[0], streams[1], "-".join(digests), bigram_entropy(streams[1]), pair, ends)


def _ends(files: list[Path], streams: list[Tokens]) -> tuple[Any, Any] | None:
    """Open the files that say where documents end, where they lie beside both token files."""
    paths = [file.with_suffix(".ends") for file in files]
    if not all(path.exists() for path in paths):
        return None
    found = []
    for path, tokens in zip(paths, streams, strict=True):
        ends = np.fromfile(path, END)
        if path.stat().st_size % END.itemsize or (np.diff(ends, prepend=0, append=len(tokens)) < 0).any():
            raise DataError(
                f"data.path: {shown(path)} does not hold ascending places of up to {len(tokens)}, 8 bytes"
                " each; write it anew, or remove it to part documents by data.end_token"
            )
        found.append(ends)
    return found[0], found[1]


def _mask(file: Path, tokens: int, folder: Path) -> tuple[Tokens, str]:
    """Open the mask beside a token file; with its digest."""
    path = file.with_suffix(".mask")
    if not path.exists():
        text = f"data.loss_mask: {shown(path)} is missing; expected it beside {shown(file)}, a byte per token"
        raise DataError(f"{text}, or data.loss_mask=false")
    mask = _map(path, "uint8")
    if len(mask) != tokens:
        raise DataError(
            f"data.loss_mask: {shown(path)} has {len(mask)} bytes, expected {tokens}, one per token of"
            f" {shown(file)}; write it anew"
        )
    largest, digest = _scan(path, mask, folder)
    if largest != 1:
        seen = "nothing but zeros" if not largest else f"the byte {largest}"
        raise DataError(
            f"data.loss_mask: {shown(path)} holds {seen}, expected 1 for tokens that count and 0 for others;"
            " write it anew"
        )
    return mask, digest


def _split_files(folder: Path) -> list[Path]:
    train = folder / "train.bin"
    held = next((folder / name for name in _HELD_OUT_NAMES if (folder / name).exists()), None)
    if held is None or not train.exists():
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise unreadable(folder, error) from None
        seen = ", ".join(shown(name) for name in names[:6]) or "nothing"
        raise DataError(
            f"data.path: {shown(folder)} holds {seen}; expected train.bin and held_out.bin"
            " (or val.bin), or one file"
        )
    return [train, held]


def _map(path: Path, dtype: str) -> Tokens:
    kind = np.dtype(dtype).newbyteorder("<")
    require_file(path)
    try:
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"data.path: {shown(path)} is empty; expected token ids of type {dtype}")
        if size % kind.itemsize:
            raise DataError(
                f"data.path: {shown(path)} has {size} bytes, not a multiple of {kind.itemsize} as {dtype}"
                " ids need; set data.memmap_dtype to what the file was written with"
            )
        return np.memmap(path, kind, "r")
    except OSError as error:
        raise unreadable(path, error) from None


def _check_end(tokens: Tokens, end: int | None, file: Path) -> None:
    """Raise DataError where no document ends: a wrong id would leave masks out without a word."""
    pieces = (tokens[at : at + SCAN_TOKENS] for at in range(0, len(tokens), SCAN_TOKENS))
    if not any((piece == end).any() for piece in pieces):
        raise DataError(
            f"data.end_token: saw {end}, which {shown(file)} never holds among the tokens to train on; set it"
            " to the id that ends a document there, or data.document_masks=false"
        )


def _scan(path: Path, tokens: Tokens, folder: Path) -> tuple[int, str]:
    """Find the largest id and the digest of a file; both are remembered in ``folder``."""
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{tokens.dtype.str}"
    memo = folder / f"scan-{xxhash.xxh3_128_hexdigest(identity.encode('utf-8', 'surrogateescape'))}.json"
    # not scanned yet, or a memo cut short: scan
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(memo.read_text("utf-8"))
        return int(known["largest"]), str(known["digest"])
    largest, hasher = 0, xxhash.xxh3_128()
    for start in range(0, len(tokens), SCAN_TOKENS):
        part = np.ascontiguousarray(tokens[start : start + SCAN_TOKENS])
        largest = max(largest, int(part.max()))
        hasher.update(part.data)
    _remember(memo, {"largest": largest, "digest": hasher.hexdigest()})
    return largest, hasher.hexdigest()


def _remember(memo: Path, result: dict[str, object]) -> None:
    fresh = memo.with_suffix(f".{os.getpid()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(result), "utf-8")
        fresh.replace(memo)
    except OSError:
        with suppress(OSError):  # a scan not remembered is only repeated
            fresh.unlink()
