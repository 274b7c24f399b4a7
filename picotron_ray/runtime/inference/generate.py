"""``picotron-ray generate``: text that a commit's model makes of a prompt."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.inference.stored_model import CommittedModel, find_model, load_model
from picotron_ray.runtime.inference.text import ModelText, text_of

if TYPE_CHECKING:
    import torch

    from picotron_ray.runtime.inference.decoding import Sampling

MOST_BYTES = 1 << 24
"""Of a prompt's file."""


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt that one of both options gives; ``-`` is stdin.

    Raises:
        ConfigError: both or neither was given, or the file cannot be read as UTF-8.
    """
    if (prompt is None) == (file is None):
        seen = "neither" if prompt is None else "both"
        raise ConfigError(f"--prompt: saw {seen} of --prompt and --prompt-file, expected one of them")
    if file is None:
        assert prompt is not None
        return prompt
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(file).open("rb") as opened:
                data = opened.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"--prompt-file: {file} has more than {MOST_BYTES} bytes; give a shorter one")
        return data.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompt-file: {file} cannot be read as UTF-8 text: {error}") from error


def device_here() -> torch.device:
    """Return the CUDA device where there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prompt_ids(found: CommittedModel, text: ModelText, prompt: str) -> list[int]:
    """Return the ids of a prompt; an empty one is the end of the document before.

    Raises:
        ConfigError: it is empty where nothing ends a document, longer than the model's positions, or beyond
            its vocabulary.
    """
    ids = text.encode(prompt) or ([text.end_id] if text.end_id is not None else [])
    if not ids:
        raise ConfigError("--prompt: saw no text, and no token ends a document; give at least one token")
    if len(ids) > found.positions:
        raise ConfigError(
            f"--prompt: saw {len(ids)} tokens, expected at most {found.positions}, the positions that the"
            " model was trained on; give a shorter one"
        )
    if max(ids) >= found.job.model.vocab_size:
        raise ConfigError(
            f"--prompt: saw token {max(ids)}, beyond the model's vocabulary of {found.job.model.vocab_size}"
        )
    return ids


def generate(
    run: str, prompt: str, step: int | None, weights: str, most: int, samples: int, sampling: Sampling
) -> dict[str, Any]:
    """Go on from a prompt with the weights of a commit; nothing is loaded before all is checked.

    Raises as `find_model`, `text_of`, `prompt_ids` and `load_model`.
    """
    problems = sampling.problems()
    problems += [
        f"--{key}: saw {value}, expected 1 or more"
        for key, value in (("max-tokens", most), ("n", samples))
        if value < 1
    ]
    if problems:
        raise ConfigError(*problems)
    found = find_model(run, step, weights)
    text = text_of(found.job)
    ids = prompt_ids(found, text, prompt)
    from picotron_ray.runtime.inference.decoding import decode

    device = device_here()
    module = load_model(found, device)
    began = time.monotonic()
    decoded = decode(
        module,
        ids,
        most=most,
        positions=found.positions,
        vocabulary=text.vocabulary,
        sampling=sampling,
        samples=samples,
        end_id=text.end_id,
    )
    tokens = sum(len(sample.ids) for sample in decoded)
    return {
        "run": found.job.name,
        "step": found.step,
        "device": device.type,
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "seed": sampling.seed,
        "tokens_per_s": round(tokens / max(time.monotonic() - began, 1e-9), 1),
        "samples": [
            {"text": text.decode(sample.ids), "tokens": len(sample.ids), "finish": sample.finish}
            for sample in decoded
        ],
    }
