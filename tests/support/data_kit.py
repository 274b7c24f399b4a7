"""Tokenizers and templates that tests make for themselves; nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<end>", "<|im_start|>", "<|im_end|>", "<pre>", "<mid>", "<suf>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def write_tokenizer(
    folder: Path, end: str | None = "<end>", template: str | None = None, extra: int = 0
) -> Path:
    """Write a byte-level BPE of some merges into a folder.

    Args:
        end: its eos_token; None: no tokenizer_config.json.
        extra: more tokens that no text holds, for large vocabularies.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[f"<unused{number}>" for number in range(extra)] + list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trainer.vocab_size = 300 + extra
    made.train_from_iterator(["how much is the answer, user and assistant: it is the sum"] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if end is not None:
        settings: dict[str, Any] = {"eos_token": end}
        settings |= {} if template is None else {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
