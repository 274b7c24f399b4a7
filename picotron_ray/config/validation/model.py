"""Rules between keys of the model and of its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import (
    LoraConfig,
    ModelConfig,
    MoeConfig,
    RopeScaling,
    RopeType,
    rotary_width,
)
from picotron_ray.models.families.registry import family_of, freeze_mistakes, target_mistakes


def _builder(job: JobConfig) -> Iterator[Problem]:
    """Keys that do not go with `model.builder`, or not without it."""
    model, plain = job.model, ModelConfig()
    own = ("loss", "arguments", "plan", "built")
    common = {"vocab_size", "freeze", "builder", *own}
    skipped = common if model.builder else set(ModelConfig.model_fields) - set(own)
    for key in ModelConfig.model_fields:
        if key not in skipped and getattr(model, key) != getattr(plain, key):
            text = "a value with model.builder, which takes only vocab_size, freeze, loss, arguments and plan"
            yield Problem(
                f"model.{key}",
                f"saw {text if model.builder else 'a value without model.builder'}; drop it",
                ("model.builder",),
            )
    try:
        json.dumps(model.arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        text = (
            f"saw something other than finite plain data: {error}; use numbers, strings, lists and mappings"
        )
        yield Problem("model.arguments", text)


def _model(job: JobConfig) -> Iterator[Problem]:
    model = job.model
    if model.builder is not None:
        return
    if model.heads % model.kv_heads:
        yield Problem(
            "model.kv_heads",
            f"saw {model.kv_heads}, which does not divide model.heads={model.heads}",
            ("model.heads",),
        )
    if model.mla.kv_lora_rank:
        return
    if model.head_dim is None and model.hidden_size % model.heads:
        yield Problem(
            "model.heads",
            f"saw {model.heads}, which does not divide model.hidden_size={model.hidden_size}; say"
            " model.head_dim where that is meant",
            ("model.hidden_size", "model.head_dim"),
        )
    elif model.head_size % 2 and family_of(model).rotary:
        yield Problem(
            "model.hidden_size" if model.head_dim is None else "model.head_dim",
            f"saw {model.hidden_size} with model.heads={model.heads}, a head size of {model.head_size};"
            " rotary positions need an even head size",
            ("model.heads", "model.head_dim"),
        )


OF_TYPE: dict[RopeType, tuple[str, ...]] = {
    "llama3": ("low_frequency_factor", "high_frequency_factor"),
    "linear": (),
    "dynamic": (),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Keys of ``model.rope_scaling`` that one type alone has."""


def _rope(job: JobConfig) -> Iterator[Problem]:
    """Keys of rotary positions that do not go together."""
    model, scaling, plain = job.model, job.model.rope_scaling, RopeScaling()
    at, of_type = "model.rope_scaling", f"model.rope_scaling.type={scaling.type}"
    if model.builder is not None:
        return
    others = {key for keys in OF_TYPE.values() for key in keys} - set(OF_TYPE[scaling.type])
    others |= {"original_length"} if scaling.type == "linear" else set()
    for key in RopeScaling.model_fields:
        if key in others and getattr(scaling, key) != getattr(plain, key):
            yield Problem(
                f"{at}.{key}", f"saw a value with {of_type}, which has none; drop it", (f"{at}.type",)
            )
    if scaling.type in ("linear", "yarn") and scaling.factor == 1.0:
        text = f"saw 1 with {of_type}, which stretches nothing; expected more, or drop the type"
        yield Problem(f"{at}.factor", text, (f"{at}.type",))
    for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
        least, most = getattr(scaling, low), getattr(scaling, high)
        if most <= least and high in OF_TYPE[scaling.type]:
            text = f"saw {most:g}, expected more than {low}={least:g}"
            yield Problem(f"{at}.{high}", text, (f"{at}.{low}",))
    if scaling.type == "yarn" and model.rope_theta <= 1.0:
        text = f"saw {model.rope_theta:g} with {of_type}, expected more than 1"
        yield Problem("model.rope_theta", text, (f"{at}.type",))
    yield from _turned_width(model)


def _turned_width(model: ModelConfig) -> Iterator[Problem]:
    """Parts of heads that rotary positions cannot turn; whole heads are judged with the heads."""
    turned = model.mla.qk_rope_head_dim if model.mla.kv_lora_rank else model.head_size
    width = rotary_width(turned, model.partial_rotary_factor)
    if model.rope_scaling.type == "dynamic" and width == 2:
        text = "saw dynamic where 2 elements of a head turn, whose base nothing moves; expected another type"
        yield Problem("model.rope_scaling.type", text, ("model.head_dim", "model.partial_rotary_factor"))
    if model.partial_rotary_factor != 1.0 and (width < 2 or width % 2):
        text = (
            f"saw {model.partial_rotary_factor:g} with heads of {model.head_size}, of which {width} would"
            " turn; expected a share that is an even number"
        )
        yield Problem("model.partial_rotary_factor", text, ("model.head_dim", "model.hidden_size"))


def _family(job: JobConfig) -> Iterator[Problem]:
    """Keys that go with one family and not with another."""
    if job.model.builder is None:
        yield from family_of(job.model).problems(job.model, job.data.sequence_length)


def _moe(job: JobConfig) -> Iterator[Problem]:
    moe, plain = job.model.moe, MoeConfig()
    if moe.experts:
        if moe.top_k > moe.experts:
            text = f"saw {moe.top_k}, expected at most model.moe.experts={moe.experts}"
            yield Problem("model.moe.top_k", text, ("model.moe.experts",))
        yield from _groups(moe)
        for key, balance in (("loss_coefficient", "loss"), ("bias_rate", "bias")):
            value = getattr(moe, key)
            if moe.balance != balance and value != getattr(plain, key):
                text = f"saw {value:g} with model.moe.balance={moe.balance}, which has none; drop it or use"
                yield Problem(f"model.moe.{key}", f"{text} balance={balance}", ("model.moe.balance",))
        return
    for key in MoeConfig.model_fields:
        if getattr(moe, key) != getattr(plain, key):
            text = "saw a value with model.moe.experts=0, a dense model; say how many experts, or drop it"
            yield Problem(f"model.moe.{key}", text, ("model.moe.experts",))


def _groups(moe: MoeConfig) -> Iterator[Problem]:
    """Groups that a token's experts are chosen from."""
    groups, plain, key = moe.groups, MoeConfig(), "model.moe.groups"
    if groups == 1:
        for name in ("top_k_groups", "group_score"):
            if getattr(moe, name) != getattr(plain, name):
                text = f"saw {getattr(moe, name)} with {key}=1, of which there is nothing to choose; drop it"
                yield Problem(f"model.moe.{name}", text, (key,))
        return
    if moe.experts % groups:
        yield Problem(
            key,
            f"saw {groups}, which does not divide model.moe.experts={moe.experts}",
            ("model.moe.experts",),
        )
        return
    each = moe.experts // groups
    if moe.top_k_groups > groups:
        text = f"saw {moe.top_k_groups}, expected at most {key}={groups}"
        yield Problem("model.moe.top_k_groups", text, (key,))
    elif moe.top_k > moe.top_k_groups * each:
        text = f"saw {moe.top_k}, expected at most {moe.top_k_groups * each}: top_k_groups={moe.top_k_groups}"
        against = ("model.moe.top_k_groups", key, "model.moe.experts")
        yield Problem("model.moe.top_k", f"{text} of {each} experts each", against)
    if moe.group_score == "top-2" and each < 2:
        text = f"saw top-2 with {key}={groups} of one expert each; use max, or fewer groups"
        yield Problem("model.moe.group_score", text, (key, "model.moe.experts"))


def _finetuning(job: JobConfig) -> Iterator[Problem]:
    model, lora, plain = job.model, job.model.lora, LoraConfig()
    shape = tuple(f"model.{key}" for key in ModelConfig.model_fields if key not in ("freeze", "lora"))
    yield from (Problem("model.freeze", text, (*shape, "model.lora")) for text in freeze_mistakes(model))
    if model.builder is not None:
        return
    if not lora.rank:
        for key in LoraConfig.model_fields:
            if getattr(lora, key) != getattr(plain, key):
                text = "saw a value with model.lora.rank=0, no adapters; say a rank, or drop it"
                yield Problem(f"model.lora.{key}", text, ("model.lora.rank",))
        return
    if lora.dropout:
        text = f"saw {lora.dropout:g}, expected 0: a step must repeat bit by bit; drop it"
        yield Problem("model.lora.dropout", text, ("model.lora.rank",))
    for text in target_mistakes(model):
        yield Problem("model.lora.targets", text, (*shape, "model.lora.rank"))
    if job.precision == "fp8":
        text = f"saw {lora.rank} with precision=fp8, whose layers have no adapters; use bf16, or drop it"
        yield Problem("model.lora.rank", text, ("precision",))


RULES: tuple[Callable[[JobConfig], Iterator[Problem]], ...] = (
    _builder,
    _model,
    _rope,
    _family,
    _moe,
    _finetuning,
)
