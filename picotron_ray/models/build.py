"""The definition of the model that a config names: a decoder of our families, or the user's own module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.shards import Box
from picotron_ray.models.custom import CustomDefinition
from picotron_ray.models.decoder.table import tied_copies
from picotron_ray.models.decoder.tensor_plan import ATTENTION_MODULES, mixture_modules, position_modules
from picotron_ray.models.definition import NO_ENDS, InitialValue, ModelDefinition, StageEnds
from picotron_ray.models.families.registry import family_of, finetuned_table
from picotron_ray.models.finetune import targeted
from picotron_ray.models.layers.init import initial_value
from picotron_ray.models.layers.lora import add_adapters
from picotron_ray.models.layers.moe import Router
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.models.transformer import Transformer


class DecoderDefinition(ModelDefinition):
    """A decoder of one of the model families."""

    sequence_parallel = True
    attention = ATTENTION_MODULES

    def __init__(self, config: ModelConfig) -> None:
        family = family_of(config)
        self.config, self.hidden_size = config, config.hidden_size
        self.table, self.styles = finetuned_table(config), family.tensor_plan(config)
        self.positions, self.mixtures = position_modules(config), mixture_modules(config)
        self.fused_linear, self.functions = family.fused_modules(config), family.compiled_functions(config)
        self.copies = tied_copies(config, self.table)

    def build(self, first: int, last: int, *, embed: bool, head: bool) -> nn.Module:
        with torch.device("meta"):
            model = Transformer(self.config, first_layer=first, last_layer=last, embed=embed, head=head)
        lora = self.config.lora
        if lora.rank:
            add_adapters(model, targeted(self.table, lora), lora.rank, lora.alpha)
        return model

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        assert isinstance(module, Transformer)
        return list(module.layers.values())

    def ends(self, module: nn.Module) -> StageEnds:
        assert isinstance(module, Transformer)
        embedding = tuple(part for part in (module.embed, module.positions) if part is not None)
        head = tuple(part for part in (module.norm, module.head) if part is not None)
        shared = self.config.tie_embeddings and embedding and head
        return NO_ENDS if shared else StageEnds(embedding, head)

    def tie(self, module: nn.Module) -> None:
        assert isinstance(module, Transformer)
        module.tie()

    def close_norms(self, module: nn.Module) -> int:
        assert isinstance(module, Transformer)
        return module.close_norms()

    def freeze(self, module: nn.Module) -> int:
        specs = self.specs
        for name, part in module.named_modules():
            if isinstance(part, Router) and part.bias is not None:
                part.held = specs[f"{name}.bias"].frozen
        return super().freeze(module)

    def initial(self, seed: int) -> InitialValue:
        def of_box(spec: ParameterSpec, box: Box) -> Tensor:
            return initial_value(
                spec.name, spec.shape, seed, init_std=spec.init_std, init_bound=spec.init_bound, box=box
            )

        return of_box


def definition_of(config: ModelConfig, seed: int) -> ModelDefinition:
    """The definition of the model that a config names.

    Args:
        seed: ``job.seed``, under which a module of the user's is built.

    Raises ConfigError for a module that cannot be built, or is not what launch looked into.
    """
    return DecoderDefinition(config) if config.builder is None else CustomDefinition(config, seed)
