"""``picotron-ray generate``: text from a commit's model. Heavy imports are inside."""

from __future__ import annotations

from typing import Annotated

import typer

from picotron_ray.commands.output import emit
from picotron_ray.commands.story import Which
from picotron_ray.launch import AsJson, reported

Step = Annotated[int | None, typer.Option(help="of the commit; default: the newest")]
Weights = Annotated[str, typer.Option(help="trained, or ema: their moving average")]


def generate(
    run: Which,
    prompt: Annotated[str | None, typer.Option(help="text to go on from; empty: a document's begin")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="file with the prompt instead; - is stdin")
    ] = None,
    step: Step = None,
    weights: Weights = "trained",
    max_tokens: Annotated[int, typer.Option(help="most tokens of a sample")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the most likely token, always")] = 1.0,
    top_k: Annotated[int, typer.Option(help="choose among so many most likely tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="choose among the likeliest tokens of this share")] = 1.0,
    seed: Annotated[int, typer.Option(help="the same seed gives the same text")] = 0,
    n: Annotated[int, typer.Option("--n", help="samples")] = 1,
    as_json: AsJson = False,
) -> None:
    """Generate text with the weights of a run's commit, in this process; it needs no cluster.

    Example: picotron-ray generate quickstart --prompt "def main(" --temperature 0.8
    """
    with reported(as_json):
        from picotron_ray.runtime.inference import generate as doing
        from picotron_ray.runtime.inference.decoding import Sampling

        text = doing.read_prompt(prompt, prompt_file)
        sampling = Sampling(temperature, top_k, top_p, seed)
        found = doing.generate(run, text, step, weights, max_tokens, n, sampling)
        if as_json:
            return emit(found)
        for number, sample in enumerate(found["samples"], 1):
            if n > 1:
                print(f"--- sample {number} of {n}: {sample['tokens']} tokens, {sample['finish']}")
            print(text + sample["text"])
    return None
