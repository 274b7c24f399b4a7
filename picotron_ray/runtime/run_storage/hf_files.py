"""The files of a Hugging Face checkpoint: its config, and its tensors one by one. Nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.errors import ConfigError, install_extra

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def safetensors() -> Any:
    """The library. Raises ConfigError where it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            f"safetensors is not installed; for checkpoints of Hugging Face {install_extra('hf')}"
        ) from error
    return safetensors


def json_object(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON file's object. Raises ConfigError that names the file."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: saw a {type(found).__name__}, expected an object")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ConfigError where it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: expected a folder with config.json and safetensors files: {error}"
        ) from error
    return json_object(path, data)


def _named_files(folder: Path) -> list[str]:
    """Files that transformers would read: one, or those that the index lists. Raises ConfigError."""
    path = folder / INDEX
    if (folder / SINGLE).exists() or not path.exists():
        return [SINGLE]
    try:
        index = json_object(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"{path}: weight_map: saw {places!r:.40}, expected file names by tensor name")
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise ConfigError(
                f"{path}: weight_map: {tensor}: saw {name!r:.80}, expected the name of a file in this folder"
            )
    return sorted(set(places.values()))


class Files:
    """The tensors of a checkpoint, read one by one.

    Raises ConfigError where a file is missing or no safetensors file, or two files hold one tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, safetensors().safe_open
        self._where: dict[str, str] = {}
        for name in _named_files(folder):
            if not (folder / name).exists():
                raise ConfigError(f"{folder}: {name} is missing; expected safetensors files")
            with self._file(name) as file:
                for tensor in file.keys():  # noqa: SIM118 - it is no mapping
                    other = self._where.setdefault(tensor, name)
                    if other != name:
                        raise ConfigError(f"{folder}: {tensor} is in {other} and in {name}, expected once")

    def _file(self, name: str) -> Any:
        try:
            return self._open(str(self._folder / name), framework="pt")
        except Exception as error:
            raise ConfigError(f"{self._folder / name}: is no safetensors file: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and type of a tensor, from its file's header."""
        with self._file(self._where[name]) as file:
            part = file.get_slice(name)
            return tuple(part.get_shape()), str(part.get_dtype())

    def read(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        """A tensor as an array of ``dtype``."""
        import torch

        with self._file(self._where[name]) as file:
            found: np.ndarray[Any, Any] = file.get_tensor(name).to(getattr(torch, dtype)).numpy()
            return found


def bytes_by_dtype(folder: Path) -> dict[str, int]:
    """Bytes of a checkpoint's tensors by dtype, from the headers of its files; empty where there are none.

    Raises ConfigError where a file's header cannot be read.
    """
    names = [name for name in _named_files(folder) if (folder / name).exists()]
    found: dict[str, int] = {}
    for name in names:
        for entry in _header(folder / name).values():
            dtype = DTYPES.get(entry["dtype"], entry["dtype"].lower())
            begin, end = entry["data_offsets"]
            found[dtype] = found.get(dtype, 0) + end - begin
    return found


DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
MOST_HEADER = 100 * 2**20
"""Bytes of a header, as the format's own readers bound it."""


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: eight bytes of its length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            data = file.read(min(length, MOST_HEADER))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    header = json_object(path, data)
    header.pop("__metadata__", None)
    if not all(isinstance(one, dict) and {"dtype", "data_offsets"} <= one.keys() for one in header.values()):
        raise ConfigError(f"{path}: saw a header without dtypes and offsets; fetch the checkpoint again")
    return header
