"""Chats as transformers renders them, with the ranges that it takes for answers."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.data.chat_template import ChatTemplate
from tests.support.data_kit import CHATML, MARKED

MESSAGES = [
    {"role": "user", "content": " How much is 3 and 3? "},
    {"role": "assistant", "content": "6 €"},
    {"role": "user", "content": "Thanks é"},
    {"role": "assistant", "content": "You are welcome."},
]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "description": "é <"}}]
SPACED = """{%- for m in messages %}
    {%- if loop.index0 == 2 %}{% continue %}{% endif %}
<{{ m.role }}>{{ m.content | trim }}
    {% if m.role == "assistant" %}
    {% generation %}
    {{ m.content }}
    {% endgeneration %}
    {% endif %}
    {%- endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{{ bos_token }}"""


@pytest.mark.parametrize("template", [CHATML, MARKED, SPACED], ids=["chatml", "marked", "spaced"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_text_and_answers_are_those_of_transformers(template: str, tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    marked = "generation %}" in template
    (text,), spans = render_jinja_template(
        [MESSAGES], tools, chat_template=template, return_assistant_tokens_mask=marked, bos_token="<s>"
    )
    ours, found = ChatTemplate(template, "x", {"bos_token": "<s>"}).render(MESSAGES, tools, "here")
    assert ours == text
    if marked:
        assert list(found) == [tuple(span) for span in spans[0]]
    else:
        assert [ours[a:b] for a, b in found] == ["6 €<|im_end|>\n", "You are welcome.<|im_end|>\n"]
