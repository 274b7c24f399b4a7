"""Codec of messages, to plain JSON values and back, driven by the dataclasses' own field types.

A message is ``{"type": class name, **fields}``; values inside it are plain objects without a type, which
the field's annotation supplies. Nothing is executed on the way in: only the classes of ``messages``
(and ``Layout``) can come out.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from picotron_ray.coordinator.messages import Command, Divergence, Event, GenerationSpec
from picotron_ray.failures import FailureKind

ATOMS = frozenset({str, int, float, bool, type(None)})
MESSAGES: dict[str, Any] = {kind.__name__: kind for union in (Event, Command) for kind in get_args(union)}


def encode(message: Event | Command) -> dict[str, Any]:
    """Turn an event or command into a JSON object."""
    return {"type": type(message).__name__, **plain(message)}


def decode(data: dict[str, Any]) -> Any:
    """Read the event or command of ``encode``; ValueError where it is none, or a field is not known."""
    kind = MESSAGES.get(str(data.get("type")))
    if kind is None:
        raise ValueError(
            f"message type {data.get('type')!r} is not known; allowed: {', '.join(sorted(MESSAGES))}"
        )
    return _reader(kind)({key: value for key, value in data.items() if key != "type"})


def plain(value: Any) -> Any:
    """Turn dataclasses into objects and tuples into lists; leave everything else as it is."""
    if type(value) in ATOMS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def decode_spec(data: dict[str, Any]) -> GenerationSpec:
    """Read a generation's spec, as ``plain`` wrote it (the log's and the agents' form)."""
    spec: GenerationSpec = _reader(typing.cast(Any, GenerationSpec))(data)
    return spec


def decode_divergence(data: Mapping[str, Any]) -> Divergence:
    """Read what members say of replicas that differ, as plain values."""
    found: Divergence = _reader(typing.cast(Any, Divergence))(data)
    return found


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _reader(annotation: Any) -> Callable[[Any], Any]:
    """Return a function that turns plain JSON into a value of ``annotation``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return _object_reader(typing.cast("type[Any]", annotation))
    if origin in (Union, types.UnionType):
        (kind,) = (arg for arg in args if arg is not type(None))
        read_some = _reader(kind)
        return lambda value: None if value is None else read_some(value)
    if origin is tuple:
        read_item = _reader(args[0])
        return lambda value: tuple(read_item(item) for item in value)
    if origin is dict:
        return dict
    if origin is Literal:
        return _literal_reader(args)
    if annotation is float:
        return float
    return _scalar_reader(annotation)


def _object_reader(kind: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    readers = {name: _reader(hints[name]) for name in _names(kind)}

    def read(data: Any) -> Any:
        unknown = data.keys() - readers.keys()
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
        return kind(**{name: readers[name](value) for name, value in data.items()})

    return read


def _literal_reader(allowed: tuple[Any, ...]) -> Callable[[Any], Any]:
    members = {member: member for member in allowed}  # a kind of failure is found by its text

    def read(value: Any) -> Any:
        if not isinstance(value, str | int):
            raise ValueError(f"saw {value!r}, allowed are {', '.join(map(repr, allowed))}")
        member = members.get(value, members.get(FailureKind.named(str(value))))
        if member is None:
            raise ValueError(f"saw {value!r}, allowed are {', '.join(map(repr, allowed))}")
        return member

    return read


def _scalar_reader(kind: type[Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"saw {value!r}, expected {kind.__name__}")
        return value

    return read
