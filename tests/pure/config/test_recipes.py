"""The packaged recipes: published sizes, what the user must give, and workers that hold them."""

from __future__ import annotations

import pytest

from picotron_ray.config.load import load_job, recipe_names
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.data.chat_template import ChatTemplate
from picotron_ray.errors import ConfigError
from picotron_ray.planner.datasheet import GPU
from picotron_ray.planner.model_sizes import flops_per_token, parameter_count
from picotron_ray.planner.search import choose_layout

# Parameters of the published checkpoints (the sizes of their tensors; a tied head counts once).
PUBLISHED = {
    "smollm-135m": 134_515_008,
    "smollm-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "olmo2-1b": 1_484_916_736,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
SELF_CONTAINED = ("quickstart", "sinusoids", "tiny")  # on the standard library's source, or made tasks
CHATS = ("sft-chat",)  # on the user's chats


def recipe(name: str) -> JobConfig:
    return load_job(name, [] if name in SELF_CONTAINED else ["data.path=/corpus"])


def test_every_recipe_is_known_here() -> None:
    assert recipe_names() == sorted([*PUBLISHED, *SELF_CONTAINED, *CHATS])


@pytest.mark.parametrize("name", recipe_names())
def test_it_loads_under_its_own_name(name: str) -> None:
    assert recipe(name).name == name


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_as_many_parameters_as_the_published_model(name: str) -> None:
    assert parameter_count(recipe(name).model) == PUBLISHED[name]


def test_a_token_goes_through_a_tenth_of_the_mixture() -> None:
    """3.3 billion active parameters, by the model's own card; attention scores left out."""
    assert flops_per_token(recipe("qwen3-30b-a3b").model, 0) / 6 == pytest.approx(3.3e9, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_without_data_it_says_so_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(name)
    (line,) = caught.value.problems
    assert line == (
        "data.path: saw nothing, expected a file or folder of token ids for data.source=memmap;"
        " say data.path=..."
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_token_ids_fit_their_type(name: str) -> None:
    job = recipe(name)
    bits = int(job.data.memmap_dtype.removeprefix("uint"))
    assert 2 ** (bits // 2) < job.model.vocab_size <= 2**bits


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_fewest_workers_that_it_names_hold_it(name: str) -> None:
    """By the planner's estimate, on its assumed GPUs of 80 GB, eight a node."""
    job = recipe(name)
    fewest = job.cluster.min_workers
    layout = choose_layout(job, fewest, GPU, (8,) * (fewest // 8)).layout
    assert layout.world_size == fewest
    assert layout_problems(job, layout) == []


def test_the_name_of_a_run_in_a_configs_place_is_told_what_to_give() -> None:
    with pytest.raises(
        ConfigError, match=r"saw night-7, neither .*where that is a run's name, give its config"
    ):
        load_job("night-7")
    with pytest.raises(ConfigError, match=r"did you mean quickstart\?$"):
        load_job("quickstrat")


def test_chats_are_packed_and_their_answers_count() -> None:
    """The recipe's template tells answers apart."""
    job = recipe("sft-chat")
    assert (job.data.batching, job.data.loss_mask) == ("packed", True)
    assert job.data.chat_template is not None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    text, spans = ChatTemplate(job.data.chat_template, "x", {}).render(messages, None, "here")
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert [text[a:b] for a, b in spans] == ["Ho<|im_end|>\n"]
