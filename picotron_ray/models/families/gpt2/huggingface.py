"""GPT2LMHeadModel's names and config, both ways. Torch-free.

Its linear layers are kept ``[in, out]`` (Conv1D), and the projections of q, k and v as one. Published files
name their tensors with or without the prefix ``transformer.``, and some hold causal masks beside the weights.
Dropout is not modelled here: what a config says of it is dropped, and an export says 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from picotron_ray.models.huggingface.config_reader import Keys
from picotron_ray.models.huggingface.mapping import Held, HuggingFaceMapping

if TYPE_CHECKING:
    from picotron_ray.config.schema.model import ModelConfig

ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_inner": None,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
"""Values that transformers takes for absent keys."""
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Keys that must have these values where they are there at all; anything else is not what ours computes.
FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
# Of a block: the tensor, what it holds of ours, whether its weight is kept transposed.
_BLOCK = (
    ("ln_1", ("attention_norm",), False),
    ("attn.c_attn", ("attention.wq", "attention.wk", "attention.wv"), True),
    ("attn.c_proj", ("attention.wo",), True),
    ("ln_2", ("mlp_norm",), False),
    ("mlp.c_fc", ("mlp.up",), True),
    ("mlp.c_proj", ("mlp.down",), True),
)


def _prefix(names: Collection[str]) -> str:
    """Prefix of the file's names; that of transformers where no file is looked at."""
    return "" if "wte.weight" in names else PREFIX


def tensors(model: ModelConfig, architecture: str, names: Collection[str] = ()) -> Iterator[Held]:
    """Tensors of a checkpoint with our parameters that each holds; each parameter comes once.

    Args:
        names: of the tensors in a checkpoint that is read.
    """
    at = _prefix(names)
    yield Held(("embed.weight",), (f"{at}wte.weight",))
    yield Held(("positions.weight",), (f"{at}wpe.weight",))
    for layer in range(model.layers):
        for theirs, ours, linear in _BLOCK:
            for leaf in ("weight", "bias"):
                yield Held(
                    tuple(f"layers.{layer}.{name}.{leaf}" for name in ours),
                    (f"{at}h.{layer}.{theirs}.{leaf}",),
                    transposed=linear and leaf == "weight",
                )
    for leaf in ("weight", "bias"):
        yield Held((f"norm.{leaf}",), (f"{at}ln_f.{leaf}",))
    if not model.tie_embeddings:
        yield Held(("head.weight",), ("lm_head.weight",))


def masks(model: ModelConfig, names: Collection[str]) -> set[str]:
    """Tensors of a checkpoint that are no parameters: the causal masks of older files."""
    at = _prefix(names)
    return {f"{at}h.{n}.attn.{mask}" for n in range(model.layers) for mask in ("bias", "masked_bias")}


def model_keys(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Our ``model`` section for its config.json. Raises ConfigError, one line that names the key."""
    keys = Keys(hf, DEFAULTS, _ALIASES)
    keys.fixed(FIXED)
    heads, hidden = keys.whole("n_head"), keys.whole("n_embd")
    return {
        "family": "gpt2",
        "vocab_size": keys.whole("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.whole_or_null("n_inner") or 4 * hidden,
        "layers": keys.whole("n_layer"),
        "heads": heads,
        "kv_heads": heads,
        "max_positions": keys.whole("n_positions"),
        "norm_eps": keys.number("layer_norm_epsilon"),
        "tie_embeddings": keys.flag("tie_word_embeddings"),
    }


def hf_config(model: ModelConfig, architecture: str, length: int) -> dict[str, Any]:
    """Keys of config.json that say what is computed; its longest row is that of its table."""
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_inner": model.intermediate_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_positions,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tie_embeddings,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


HUGGINGFACE = HuggingFaceMapping(
    defaults={ARCHITECTURE: DEFAULTS},
    model_types={ARCHITECTURE: "gpt2"},
    model_keys=model_keys,
    architecture_of=lambda model, imported: ARCHITECTURE,
    tensors=tensors,
    ignored=masks,
    config=hf_config,
)
