"""Chats as text: a row's messages through a Jinja template, and which of its bytes are answers.

The template runs in Jinja's sandbox, with what transformers gives to one: ``messages``, ``tools``,
``add_generation_prompt``, the special tokens' texts, ``raise_exception``, loop controls and ``tojson``. There
is no clock (``strftime_now``), as equal rows must give equal text.

Answers are told apart in one of two ways. Where the template has ``{% generation %}`` and
``{% endgeneration %}``, as transformers knows them, what stands between them counts. Else an answer is what
the template adds by an assistant's message: the text up to and with it, without the text before it with the
prompt for an answer. So its end of turn counts, by which a model learns to stop, and the role's name before
it does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

from blake3 import blake3

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.source_files import shown
from picotron_ray.data.tokenizer import FileTokenizer, Tokenizer
from picotron_ray.errors import DataError

_MARK = token_hex(16)
OPEN, CLOSE = f"\x00<{_MARK}>\x00", f"\x00</{_MARK}>\x00"
"""Around answers while a template renders. Drawn by each process, so that no text can hold them."""
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
Spans = tuple[tuple[int, int], ...]


class ChatTemplate:
    """Template of chats.

    Args:
        text: of the template.
        where: names it in messages.
        special: texts of special tokens by the name that templates know.
    """

    def __init__(self, text: str, where: str, special: dict[str, str]) -> None:
        """Raises DataError for text that is no template."""
        from jinja2 import TemplateError

        self.where, self._special = where, special
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise DataError(
                f"data.chat_template: {where} is no Jinja template ({_line(error)}); correct it"
            ) from None
        self._marks = "endgeneration" in text
        self.digest = blake3(json.dumps([text, sorted(special.items())]).encode()).hexdigest()

    def render(self, messages: Sequence[Any], tools: Any, place: str) -> tuple[str, Spans]:
        """Render a chat.

        Args:
            place: names the row in messages.

        Returns its text, and the ranges of its characters that are answers, ascending.

        Raises DataError where the template fails, or answers cannot be told apart.
        """
        if self._marks:
            return _unmarked(self._rendered(messages, tools, place), self.where, place)
        whole = self._rendered(messages, tools, place)
        spans: list[tuple[int, int]] = []
        for at, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") != "assistant":
                continue
            before = self._rendered(messages[:at], tools, place, prompt=True)
            after = whole if at + 1 == len(messages) else self._rendered(messages[: at + 1], tools, place)
            if not (whole.startswith(after) and after.startswith(before) and len(before) < len(after)):
                raise DataError(
                    f"data.chat_template: {place}: the text up to message {at + 1} is not how the whole chat"
                    f" begins, so that {self.where} does not say where its answer lies; put"
                    " {% generation %} and {% endgeneration %} around answers in the template"
                )
            spans.append((len(before), len(after)))
        return whole, tuple(spans)

    def _rendered(self, messages: Sequence[Any], tools: Any, place: str, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=prompt, **self._special
            )
        except (TemplateError, *_FAILURES) as error:
            raise DataError(
                f"data.chat_template: {place}: {self.where} fails on this row ({_line(error)}); correct the"
                " row or the template"
            ) from None


def open_chat(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Open the template of a source; None where its rows are no chats. Raises DataError."""
    given = data.chat_template
    if given is None:
        return None
    special: dict[str, str] = {}
    if isinstance(tokenizer, FileTokenizer):
        special = {key: name for key in SPECIAL if (name := tokenizer.named(key)) is not None}
    if given == "tokenizer":
        return ChatTemplate(_of_tokenizer(tokenizer), "the tokenizer's template", special)
    if "{" in given:
        return ChatTemplate(given, "the template", special)
    path = Path(os.path.expanduser(given))
    try:
        return ChatTemplate(path.read_text("utf-8"), shown(path), special)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(
            f"data.chat_template: cannot read {shown(path)}: {why}; give a file of Jinja, the text of a"
            " template, or tokenizer"
        ) from None


def _of_tokenizer(tokenizer: Tokenizer) -> str:
    """Return the template that a tokenizer comes with."""
    if isinstance(tokenizer, FileTokenizer):
        if "chat_template.jinja" in tokenizer.files:
            return tokenizer.files["chat_template.jinja"].decode("utf-8", "replace")
        found = tokenizer.settings().get("chat_template")
        if isinstance(found, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    where = tokenizer.where if isinstance(tokenizer, FileTokenizer) else "the byte tokenizer"
    raise DataError(
        f"data.chat_template: {where} comes without a template; give a file of Jinja, or its text"
    )


def _environment() -> Any:
    """Make the sandbox, as transformers has it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2's own form

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **given: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **given)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def _unmarked(text: str, where: str, place: str) -> tuple[str, Spans]:
    """Take the marks out; returns the text and the ranges between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    for number, stretch in enumerate(text.split(OPEN)):
        inside, mark, outside = stretch.partition(CLOSE)
        if bool(mark) != bool(number) or CLOSE in outside:
            raise DataError(
                f"data.chat_template: {place}: {where} puts one {{% generation %}} into another; it must end"
                " each before the next begins"
            )
        if number and inside:
            spans.append((length, length + len(inside)))
        parts += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(parts), tuple(spans)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
