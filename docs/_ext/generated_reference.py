"""Reference pages rendered at build time from the code: config keys, commands, metrics.

Directives::

    ```{config-reference}   a table per section of the config, from its JSON Schema
    ```{cli-reference}      every command of ``picotron-ray`` with its arguments and options
    ```{metrics-reference}  every metric that a run serves
    ```{alerts-reference}   every rule over telemetry

A page refers to a key by the role ``confval``, as in {confval}`layout.tp`; an unknown key fails the build.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from picotron_ray.cli import app as commands
from picotron_ray.config.json_schema import allowed, key_schemas
from picotron_ray.observability.alerts.rules import TABLE
from picotron_ray.observability.catalogue import CATALOGUE

TOP = "Top level"
LONGEST_PATTERN = 60
"""Characters of a regular expression that a table shows; the description says the same in words."""


class ConfigReference(SphinxDirective):
    """One table per top-level section: key, type, default, description."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        return [self._section(name, keys) for name, keys in config_sections().items()]

    def _section(self, name: str, keys: Mapping[str, Mapping[str, Any]]) -> nodes.section:
        section = _section(name, f"config-{name.lower().replace(' ', '-')}")
        rows = [self._row(key, schema) for key, schema in keys.items()]
        section += _table(("key", "type", "default", "meaning"), (26, 20, 12, 42), rows)
        return section

    def _row(self, key: str, schema: Mapping[str, Any]) -> list[nodes.Node]:
        anchor = nodes.make_id(f"key-{key.replace('*', 'item')}")
        self.env.domains.standard_domain.note_object("confval", key, anchor, location=self.get_location())
        name = nodes.literal("", key)
        name["ids"] = [anchor]
        known = "default" in schema
        default = nodes.literal("", json.dumps(schema["default"])) if known else _text("required")
        return [name, _text(key_type(schema)), default, _text(schema["description"])]


class CommandReference(SphinxDirective):
    """One section per command: its help, then its arguments and options."""

    def run(self) -> list[nodes.Node]:
        return [_command(name, command) for name, command in leaf_commands(typer.main.get_command(commands))]


class MetricsReference(SphinxDirective):
    """One row per metric of the catalogue."""

    def run(self) -> list[nodes.Node]:
        rows = [
            [
                nodes.literal("", metric.name),
                _text(metric.kind),
                _text(", ".join(metric.all_labels)),
                _text(metric.server),
                _text(metric.help),
            ]
            for metric in CATALOGUE.values()
        ]
        return [_table(("metric", "kind", "labels", "served by", "meaning"), (30, 10, 16, 12, 32), rows)]


class AlertsReference(SphinxDirective):
    """One row per rule of the table."""

    def run(self) -> list[nodes.Node]:
        rows = [
            [
                nodes.literal("", rule.name),
                _text(rule.severity),
                nodes.literal("", rule.figure),
                _text(f"{rule.kind} {rule.threshold:g}" + (f", with {rule.beside}" if rule.beside else "")),
                _text(str(rule.windows)),
                _text(f"{rule.means}. {rule.advice}." + (" GPUs only." if rule.gpu else "")),
            ]
            for rule in TABLE
        ]
        heads = ("rule", "severity", "figure", "condition", "windows", "meaning, and what to do next")
        return [_table(heads, (14, 8, 18, 14, 6, 40), rows)]


def config_sections() -> dict[str, dict[str, Mapping[str, Any]]]:
    """Top-level section → its keys, dotted, sections themselves left out."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {TOP: {}}
    for key, schema in key_schemas().items():
        head, dot, _ = key.partition(".")
        if "$ref" not in schema:
            found.setdefault(head if dot else TOP, {})[key] = schema
    return found


def key_type(schema: Mapping[str, Any]) -> str:
    """The values that a key takes, in words; a long pattern is left to the description."""
    if len(schema.get("pattern", "")) > LONGEST_PATTERN:
        return "a string, as described"
    return allowed(schema)


def leaf_commands(group: Any, path: str = "picotron-ray") -> Iterator[tuple[str, Any]]:
    """Every command below ``group`` with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaf_commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _command(name: str, command: Any) -> nodes.section:
    section = _section(name, name.removeprefix("picotron-ray "))
    section += nodes.paragraph("", command.help or "")
    rows = [
        [nodes.literal("", spelling), _text(help_text)]
        for spelling, help_text in map(_parameter, command.params)
        if spelling != "--help"
    ]
    if rows:
        section += _table(("argument", "meaning"), (35, 65), rows)
    return section


def _parameter(parameter: Any) -> tuple[str, str]:
    """How one parameter is typed, and what it means with its default."""
    spelling = ", ".join(parameter.opts)
    if parameter.param_type_name == "argument":
        spelling = parameter.metavar or (parameter.name or "").upper()
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return spelling, (parameter.help or "") + (f" (default: {default})" if plain else "")


def _section(title: str, name: str) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(name)], names=[nodes.fully_normalize_name(name)])
    section += nodes.title("", title)
    return section


def _text(text: str) -> nodes.Text:
    return nodes.Text(text)


def _table(head: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[nodes.Node]]) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in widths), cols=len(head))
    group += nodes.thead("", _cells([nodes.Text(title) for title in head]))
    group += nodes.tbody("", *map(_cells, rows))
    return nodes.table("", group, classes=["colwidths-given"])


def _cells(values: Sequence[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", value)) for value in values))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("config-reference", ConfigReference)
    app.add_directive("cli-reference", CommandReference)
    app.add_directive("metrics-reference", MetricsReference)
    app.add_directive("alerts-reference", AlertsReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
