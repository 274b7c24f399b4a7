"""Hand-written bad configs: each is refused by one line that names the key and what to do about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError

# name → (the config, the key that the line must start with, words that it must contain)
BAD: dict[str, tuple[str, str, str]] = {
    "gradients in 16 bits of a run in 32": (
        "comm: {reduce_dtype: bf16}",
        "comm.reduce_dtype",
        "saw bf16 with precision=fp32; use fp32, or precision=bf16",
    ),
    "gradients in 16 bits of replicas": (
        "precision: bf16\ncomm: {reduce_dtype: bf16}\nlayout: {zero: 0}",
        "comm.reduce_dtype",
        "whose replicas have comm.gradients=bf16, which keeps what rounding leaves; use that, or zero=1",
    ),
    "blocks together of replicas": (
        "comm: {zero_blocks: 4}\nlayout: {zero: 0}",
        "comm.zero_blocks",
        "saw 4 with layout.zero=0, under which no weights are gathered; use 1 or zero=1",
    ),
    # keys
    "unknown section": ("modle: {layers: 2}", "modle", "did you mean model?"),
    "key in an unknown section": (
        "plan: {memory_margin: 0.2}",
        "plan.memory_margin",
        "did you mean layout.memory_margin?",
    ),
    "unknown key": ("model: {layer: 2}", "model.layer", "did you mean model.layers?"),
    "key of another section": ("learning_rate: 0.1", "learning_rate", "optimizer.learning_rate?"),
    "another trainer's name": ("batch_size: 8", "batch_size", "did you mean data.global_batch?"),
    "number for a key": ("model: {3: 4}", "model.3", "unknown key"),
    "null for a key": ("null: 4", "null", "unknown key"),
    "mapping for a value": (
        "model: {layers: {count: 2}}",
        "model.layers",
        "saw a mapping, expected an integer",
    ),
    "alias of itself": ("model: &x {layers: *x}", "config", "nested more than 20 deep"),
    "dotted key in a file": ("model.layers: 4", "model.layers", "expected it nested, `model: {layers: ...`"),
    "list for a key": ("? [a, b]\n: 3", "", "fix the YAML"),
    "hopeless key": ("qqqqqq: 1", "qqqqqq", "config-schema"),
    "key in a fault": (
        'chaos: [{fault: kill, target: "worker:0", step: 1, fase: forward}]',
        "chaos.0.fase",
        "did you mean chaos.0.phase?",
    ),
    "section is a number": ("data: 3", "data", "expected a mapping of keys"),
    "section is empty": ("optimizer:", "optimizer", "saw null"),
    "key given twice": ("steps: 5\nsteps: 6", "", " line 2: key 'steps' is given twice; fix the YAML"),
    # types and bounds
    "integer as text": ('steps: "5"', "steps", "saw '5', expected an integer >= 1 and"),
    "fraction of a step": ("steps: 2.5", "steps", "saw 2.5, expected an integer"),
    "truth as a number": ("seed: true", "seed", "saw true, expected an integer >= 0"),
    "seed beyond 63 bits": ("seed: 1e30", "seed", "saw 1e+30, expected an integer"),
    "huge seed": ("seed: 9223372036854775808", "seed", "<= 9223372036854775807"),
    "negative": ("steps: -1", "steps", "saw -1, expected an integer >= 1 and <= 1000000000000"),
    "no steps": ("steps: 0", "steps", "saw 0"),
    "not finite": ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate", "a finite number > 0"),
    "beta of one": ("optimizer: {beta1: 1.0}", "optimizer.beta1", ">= 0 and < 1"),
    "mistyped choice": (
        "optimizer: {schedule: {kind: cosin}}",
        "optimizer.schedule.kind",
        "one of constant, cosine, wsd, did you mean cosine?",
    ),
    "choice by another name": ("cluster: {device: gpu}", "cluster.device", "did you mean cuda?"),
    "path for the packaged text": (
        "data: {path: corpus}",
        "data.path",
        "say data.source=text (jsonl, memmap)",
    ),
    "precision": ("precision: fp4", "precision", "one of fp64, fp32, tf32, bf16, fp16, fp8, auto"),
    "fp8 on a CPU": (
        "precision: fp8\ncluster: {device: cpu}",
        "precision",
        "saw fp8, which CPUs do not have; use fp32 or bf16",
    ),
    "fp8 and widths": (
        "precision: fp8\nmodel: {intermediate_size: 344}",
        "precision",
        "saw fp8, which multiplies multiples of 16, but model.intermediate_size: 344; use bf16",
    ),
    "fp8 and what tp leaves": (
        "precision: fp8\nmodel: {intermediate_size: 336}\nlayout: {tp: 2}",
        "precision",
        "saw fp8 with tp=2, which multiplies multiples of 16, but model.intermediate_size: 168; use bf16",
    ),
    "fp8 and the rows": (
        "precision: fp8\ndata: {sequence_length: 24}",
        "precision",
        "tokens of a row: 24",
    ),
    "fp8 and the widths of heads": (
        "precision: fp8\nmodel: {hidden_size: 48, heads: 6, kv_heads: 3, intermediate_size: 336}\n"
        "layout: {cp: 2, tp: 3}\ndata: {sequence_length: 96}\ncluster: {max_workers: 6}",
        "precision",
        "saw fp8 with tp=3 cp=2, which multiplies multiples of 16, but key heads: 8; use bf16",
    ),
    "fp8 of a model of your own": (
        "precision: fp8\nmodel: {builder: 'a:b'}",
        "precision",
        "saw fp8 with model.builder, whose linear layers are not looked into",
    ),
    "fp8 without a compiler": (
        "precision: fp8\ndata: {sequence_length: 128}\nkernels: {compile: false}",
        "kernels.compile",
        "saw false with precision=fp8, whose casts are slower than what products gain unless",
    ),
    "fp8 and a split backward pass": (
        "precision: fp8\ndata: {sequence_length: 128}\nlayout: {schedule: zbv, pp: 2}\nmodel: {layers: 4}",
        "precision",
        "saw fp8 with layout.schedule=zbv, which splits the backward pass of compiled blocks",
    ),
    "fp8 and selective recomputation": (
        "precision: fp8\ndata: {sequence_length: 128}\nlayout: {recompute: selective}",
        "precision",
        "saw fp8 with layout.recompute=selective, which does not see into compiled blocks",
    ),
    "fp8 and activations in 8 bits": (
        "precision: fp8\ndata: {sequence_length: 128}\nlayout: {recompute: int8}",
        "layout.recompute",
        "saw int8 with precision=fp8, whose compiled blocks decide what they keep",
    ),
    "fp8 and a compiled norm": (
        "precision: fp8\ndata: {sequence_length: 128}\nkernels: {norm: compiled}",
        "kernels.norm",
        "saw compiled with precision=fp8, which compiles all of a block",
    ),
    "fp8 and collectives of our own under tp": (
        "precision: fp8\ndata: {sequence_length: 128}\nlayout: {tp: 2}\ncomm: {activations: ring}",
        "comm.activations",
        "saw ring with precision=fp8, whose compiled blocks hold the backend's collectives",
    ),
    "scales without fp8": (
        "fp8: {scaling: rowwise}",
        "fp8.scaling",
        "saw rowwise with precision=fp32, which has none; drop it or use precision=fp8",
    ),
    "rowwise scales and a gather in 8 bits": (
        "precision: fp8\ndata: {sequence_length: 128}\nfp8: {scaling: rowwise, gather: fp8}",
        "fp8.gather",
        "saw fp8 with fp8.scaling=rowwise, whose scales are of rows of a shard and would have to travel too",
    ),
    "scales of 32 values and a gather in 8 bits": (
        "precision: fp8\ndata: {sequence_length: 128}\nfp8: {scaling: mxfp8, gather: fp8}",
        "fp8.gather",
        "saw fp8 with fp8.scaling=mxfp8, whose scales are of 32 values",
    ),
    "a gather in 8 bits of nothing": (
        "precision: fp8\ndata: {sequence_length: 128}\nfp8: {gather: fp8}\nlayout: {zero: 0}",
        "fp8.gather",
        "saw fp8 with layout.zero=0, which gathers no weights",
    ),
    "a gather in 8 bits of unequal shards": (
        "precision: fp8\ndata: {sequence_length: 128, global_batch: 9}\nfp8: {gather: fp8}\n"
        "layout: {zero: 3, dp: 3, micro_batch: 3}\ncluster: {max_workers: 3}\n"
        "model: {intermediate_size: 336}",
        "fp8.gather",
        "saw fp8 over 3 shards, which do not divide model.hidden_size: 128",
    ),
    "mxfp8 and widths": (
        "precision: fp8\nfp8: {scaling: mxfp8}\nmodel: {intermediate_size: 336}\n"
        "data: {sequence_length: 128}",
        "precision",
        "saw mxfp8, which multiplies multiples of 32, but model.intermediate_size: 336",
    ),
    "fp8 and adaptive precision": (
        "precision: fp8\nadaptive_precision: {error_bound: 0.01}",
        "adaptive_precision.error_bound",
        "saw 0.01 with precision=fp8, whose layers are no parts that it can switch",
    ),
    "an error bound without low precision": (
        "adaptive_precision: {error_bound: 0.01}",
        "adaptive_precision.error_bound",
        "saw 0.01 with precision=fp32",
    ),
    "an error bound where auto has no low precision": (
        "precision: auto\nadaptive_precision: {error_bound: 0.01}\ncluster: {device: cpu}",
        "adaptive_precision.error_bound",
        "saw 0.01 with precision=fp32",
    ),
    "a kernel that no precision of auto has there": (
        "precision: auto\nkernels: {attention: cudnn}\ncluster: {device: cpu}",
        "kernels.attention",
        "expected auto or one of flash, math on cpu",
    ),
    "tensor cores of a CPU": (
        "precision: tf32\ncluster: {device: cpu}",
        "precision",
        "saw tf32, which CPUs do not have",
    ),
    "run name": ("name: My Run", "name", "saw 'My Run', expected a string that matches"),
    "degree": ("layout: {tp: all}", "layout.tp", "saw 'all', expected an integer >= 1 or auto"),
    "zero stage": ("layout: {zero: 4}", "layout.zero", "one of 0, 1, 2, 3 or auto"),
    "list for a mapping": ("chaos: {fault: kill}", "chaos", "expected a list"),
    # model
    "heads and kv heads": (
        "model: {heads: 4, kv_heads: 3}",
        "model.kv_heads",
        "does not divide model.heads=4",
    ),
    "hidden and heads": ("model: {hidden_size: 130}", "model.heads", "does not divide model.hidden_size=130"),
    "odd head size": ("model: {hidden_size: 12}", "model.hidden_size", "a head size of 3"),
    "rotary positions in GPT-2": (
        "model: {family: gpt2, kv_heads: 4, max_positions: 128, rope_theta: 5000.0}",
        "model.rope_theta",
        "saw a value with model.family=gpt2, which has none",
    ),
    "grouped queries in GPT-2": (
        "model: {family: gpt2, max_positions: 128}",
        "model.kv_heads",
        "saw 2 with model.family=gpt2, expected model.heads=4",
    ),
    "no positions in GPT-2": (
        "model: {family: gpt2, kv_heads: 4}",
        "model.max_positions",
        "saw nothing with model.family=gpt2, expected at least data.sequence_length=128",
    ),
    "too few positions": (
        "model: {family: gpt2, kv_heads: 4, max_positions: 64}",
        "model.max_positions",
        "saw 64 with model.family=gpt2, expected at least data.sequence_length=128",
    ),
    "arguments that are no plain data": (
        "model: {builder: 'a:b', arguments: {scale: .nan}}",
        "model.arguments",
        "saw something other than finite plain data: Out of range float values are not JSON compliant",
    ),
    "a ramp of frequencies without a length": (
        "model: {rope_scaling: {low_frequency_factor: 4.0}}",
        "model.rope_scaling.high_frequency_factor",
        "saw 4, expected more than low_frequency_factor=4",
    ),
    "an unknown type of stretched positions": (
        "model: {rope_scaling: {type: su}}",
        "model.rope_scaling.type",
        "saw 'su', expected one of llama3, linear, dynamic, yarn",
    ),
    "a key of another type of stretched positions": (
        "model: {rope_scaling: {type: linear, factor: 2.0, beta_fast: 8.0}}",
        "model.rope_scaling.beta_fast",
        "saw a value with model.rope_scaling.type=linear, which has none; drop it",
    ),
    "a first length where all is stretched": (
        "model: {rope_scaling: {type: linear, factor: 2.0, original_length: 64}}",
        "model.rope_scaling.original_length",
        "saw a value with model.rope_scaling.type=linear, which has none; drop it",
    ),
    "a type that stretches nothing": (
        "model: {rope_scaling: {type: yarn}}",
        "model.rope_scaling.factor",
        "saw 1 with model.rope_scaling.type=yarn, which stretches nothing; expected more, or drop the type",
    ),
    "a ramp of YaRN without a length": (
        "model: {rope_scaling: {type: yarn, factor: 2.0, beta_slow: 40.0}}",
        "model.rope_scaling.beta_fast",
        "saw 32, expected more than beta_slow=40",
    ),
    "a base of one in YaRN": (
        "model: {rope_theta: 1.0, rope_scaling: {type: yarn, factor: 2.0}}",
        "model.rope_theta",
        "saw 1 with model.rope_scaling.type=yarn, expected more than 1",
    ),
    "one pair whose base grows": (
        "model: {head_dim: 2, rope_scaling: {type: dynamic, factor: 2.0}}",
        "model.rope_scaling.type",
        "saw dynamic where 2 elements of a head turn, whose base nothing moves; expected another type",
    ),
    "a part of a head that is no pairs": (
        "model: {partial_rotary_factor: 0.1}",
        "model.partial_rotary_factor",
        "saw 0.1 with heads of 32, of which 3 would turn; expected a share that is an even number",
    ),
    "learned positions in Llama": (
        "model: {max_positions: 128}",
        "model.max_positions",
        "with model.family=llama, whose positions are rotary",
    ),
    "vocabulary below bytes": ("model: {vocab_size: 256}", "model.vocab_size", "at least 257"),
    # data
    "no path": ("data: {source: text}", "data.path", "expected a file, folder or glob"),
    "path with stdlib": ("data: {path: /tmp}", "data.path", "with data.source=stdlib, which reads none"),
    "token files at a URL": ("data: {source: memmap, path: 's3://b/x'}", "data.path", "saw a URL"),
    "a dataset at a URL": ("data: {source: hf, path: 'hf://datasets/x'}", "data.path", "saw a URL"),
    "a tokenizer at a URL": ("data: {tokenizer: 's3://b/x'}", "data.tokenizer", "expected the path of a"),
    "a template without rows": (
        "data: {source: text, path: x, chat_template: x.jinja}",
        "data.chat_template",
        "saw one with data.source=text, which has no rows",
    ),
    "a tokenizer's template without a tokenizer": (
        "data: {source: jsonl, path: x, chat_template: tokenizer}",
        "data.chat_template",
        "saw tokenizer without data.tokenizer",
    ),
    "a key of messages without a template": (
        "data: {source: jsonl, path: x, messages_key: turns}",
        "data.messages_key",
        "saw 'turns' without data.chat_template",
    ),
    "a template and prompts": (
        "data: {source: jsonl, path: x, chat_template: x.jinja, loss_mask: true, prompt_key: q}",
        "data.prompt_key",
        "saw 'q' with data.chat_template",
    ),
    "gaps to fill in of bytes": (
        "data: {source: text, path: x, fill_in_the_middle: {}}",
        "data.fill_in_the_middle",
        "saw one without data.tokenizer",
    ),
    "gaps to fill in of token files": (
        "data: {source: memmap, path: x, fill_in_the_middle: {}}",
        "data.fill_in_the_middle",
        "saw one with data.source=memmap",
    ),
    "gaps to fill in of chats": (
        "data: {source: jsonl, path: x, tokenizer: t, chat_template: t.jinja, fill_in_the_middle: {}}",
        "data.fill_in_the_middle",
        "saw one with data.chat_template",
    ),
    "a split of files": ("data: {split: test}", "data.split", "saw 'test' with data.source=stdlib"),
    "an object store of a folder": (
        "data: {source: text, path: x, s3: {region: r}}",
        "data.s3",
        "data.path is no s3:// URL",
    ),
    "masks of token files that do not say where documents end": (
        "data: {source: memmap, path: /x, document_masks: true}",
        "data.end_token",
        "saw null with data.document_masks=true; say which id ends a document",
    ),
    "an end token of text": ("data: {end_token: 0}", "data.end_token", "which ends documents by itself"),
    "an end token beyond the vocabulary": (
        "data: {source: memmap, path: /x, end_token: 264}",
        "data.end_token",
        "saw 264, expected an id below model.vocab_size=264",
    ),
    "document masks of a model of your own": (
        "data: {document_masks: true}\nmodel: {builder: 'a:b'}",
        "data.document_masks",
        "attends as it was built",
    ),
    "document masks and a kernel that takes none": (
        "precision: bf16\ncluster: {device: cuda}\ndata: {document_masks: true}\nkernels: {attention: cudnn}",
        "kernels.attention",
        "saw cudnn, expected auto or one of flash, flash-attn, efficient, math on cuda with precision bf16"
        " and document masks",
    ),
    "a window and a kernel that takes none": (
        "precision: bf16\ncluster: {device: cuda}\nmodel: {sliding_window: 8}\nkernels: {attention: cudnn}",
        "kernels.attention",
        "saw cudnn, expected auto or one of flash, flash-attn, efficient, math on cuda with precision bf16"
        " and a sliding window",
    ),
    "document masks, context parallelism and cudnn": (
        "precision: fp16\ncluster: {device: cuda}\ndata: {document_masks: true}\n"
        "kernels: {attention: cudnn}\nlayout: {cp: 2}",
        "kernels.attention",
        "saw cudnn, expected auto or one of flash, flash-attn, efficient, math on cuda with precision fp16",
    ),
    # layout
    "tp and kv heads": (
        "cluster: {max_workers: 8}\nlayout: {tp: 4}",
        "layout.tp",
        "does not divide model.kv_heads=2; nearest layouts that fit: dp=1 tp=2 pp=1",
    ),
    "tp and the sequence": (
        "data: {sequence_length: 127}\nlayout: {tp: 2}",
        "layout.tp",
        "data.sequence_length=127",
    ),
    "cp and the sequence": (
        "cluster: {max_workers: 6}\nlayout: {cp: 3}",
        "layout.cp",
        "saw 3: data.sequence_length=128 does not divide into 2 x 3 chunks; nearest layouts that fit:",
    ),
    "kernel and device": (
        "cluster: {device: cpu}\nkernels: {attention: cudnn}",
        "kernels.attention",
        "saw cudnn, expected auto or one of flash, math on cpu",
    ),
    "kernel and context parallelism": (
        "precision: fp64\nkernels: {attention: efficient}\nlayout: {cp: 2}",
        "kernels.attention",
        "saw efficient, expected auto or one of math on cuda with precision fp64",
    ),
    "kernel and width of heads": (
        "precision: bf16\ncluster: {device: cuda}\nmodel: {head_dim: 12}\nkernels: {attention: efficient}",
        "kernels.attention",
        "saw efficient, expected auto or one of math on cuda with precision bf16 and heads of 12",
    ),
    "kernel and width of heads in fp32": (
        "precision: fp32\ncluster: {device: cuda}\nmodel: {head_dim: 10}\nkernels: {attention: efficient}",
        "kernels.attention",
        "saw efficient, expected auto or one of math on cuda with precision fp32 and heads of 10",
    ),
    "cp and tp": (
        "data: {sequence_length: 12}\nmodel: {heads: 4, kv_heads: 4}\nlayout: {cp: 2, tp: 4}\n"
        "cluster: {max_workers: 8}",
        "layout.cp",
        "saw 2 with tp=4, which does not divide 6 tokens per rank",
    ),
    "tp and the vocabulary": (  # 6 ids in parts of 2: three ranks have them all
        "data: {source: memmap, path: made-up, end_token: 1}\nmodel: {vocab_size: 6, kv_heads: 4}\n"
        "layout: {tp: 4}",
        "layout.tp",
        "saw 4 with model.vocab_size=6, which leaves the last rank without a row",
    ),
    "pp and layers": (
        "cluster: {max_workers: 6}\nlayout: {pp: 6}",
        "layout.pp",
        "saw 6, more than model.layers=4; every stage needs a layer; nearest layouts that fit: dp=1",
    ),
    "virtual stages and layers": (
        "model: {layers: 3}\nlayout: {pp: 2, schedule: looped-bfs, virtual_stages: 2}",
        "layout.pp",
        "saw 2 x 2 stages each, more than model.layers=3; every stage needs a layer",
    ),
    "virtual stages of a schedule": (
        "model: {layers: 6}\nlayout: {pp: 2, schedule: zbv, virtual_stages: 3}",
        "layout.virtual_stages",
        "saw 3, expected 2 for schedule zbv",
    ),
    "rounds of a schedule": (
        "data: {global_batch: 11}\nlayout: {pp: 2, schedule: interleaved-1f1b, micro_batch: 1, dp: 1, tp: 2}",
        "layout.pp",
        "interleaved-1f1b needs a multiple of 5 micro-batches",
    ),
    "a split backward pass and ZeRO-3": (
        "layout: {pp: 2, dp: 2, zero: 3, schedule: dualpipev}",
        "layout.zero",
        "gradients come out wrong",
    ),
    "a split backward pass and recomputation": (
        "layout: {pp: 2, schedule: zbv, recompute: full}",
        "layout.recompute",
        "saw full with schedule zbv, which splits the backward pass",
    ),
    "a recompute policy that is none": (
        "layout: {recompute: some}",
        "layout.recompute",
        "saw 'some', expected",
    ),
    "heads of their own width": ("model: {head_dim: 7}", "model.head_dim", "need an even head size"),
    "Ulysses and key heads": (
        "cluster: {max_workers: 4}\nlayout: {cp: 4, context: ulysses}",
        "layout.cp",
        "saw 4 with layout.context=ulysses, which does not divide model.kv_heads=2: each key head goes to one"
        " rank; use ring or all-gather; nearest layouts that fit:",
    ),
    "Ulysses and key heads of a tensor-parallel rank": (
        "cluster: {max_workers: 4}\nlayout: {cp: 2, tp: 2, context: ulysses}",
        "layout.cp",
        "saw 2 with layout.context=ulysses, which does not divide model.kv_heads=2 / tp=2: each key head goes"
        " to one rank; use ring or all-gather",
    ),
    "experts that do not divide": (
        "model: {moe: {experts: 6}}\nlayout: {ep: 4}",
        "layout.ep",
        "saw 4, which does not divide model.moe.experts=6",
    ),
    "experts and replicas": (
        "model: {moe: {experts: 6}}\nlayout: {ep: 3, dp: 4, tp: 1, pp: 1}",
        "layout.ep",
        "saw 3, which does not divide dp x cp = 4",
    ),
    "grouped experts in double precision": (
        "precision: fp64\nmodel: {moe: {experts: 4}}\nkernels: {experts: grouped}",
        "kernels.experts",
        "saw grouped with precision=fp64",
    ),
    "grouped experts and widths": (
        "precision: bf16\nmodel: {moe: {experts: 4, intermediate_size: 30}}\nkernels: {experts: grouped}",
        "kernels.experts",
        "saw grouped in bf16, which multiplies multiples of 8, but model.moe.intermediate_size: 30; use loop",
    ),
    "grouped experts and what tp leaves": (
        "precision: fp32\nmodel: {moe: {experts: 4, intermediate_size: 12}}\nkernels: {experts: grouped}\n"
        "layout: {tp: 2}",
        "kernels.experts",
        "saw grouped in fp32 with tp=2, which multiplies multiples of 4, but model.moe.intermediate_size: 6;",
    ),
    "grouped experts and the hidden size": (
        "precision: auto\nkernels: {experts: grouped}\n"
        "model: {hidden_size: 36, heads: 2, kv_heads: 2, moe: {experts: 4, intermediate_size: 30}}",
        "kernels.experts",
        "saw grouped in bf16, which multiplies multiples of 8, but model.hidden_size: 36, model.moe",
    ),
    "grouped experts of a dense model": (
        "kernels: {experts: grouped}",
        "kernels.experts",
        "saw grouped with model.moe.experts=0",
    ),
    "padded rows of a dense model": (
        "kernels: {expert_exchange: padded}",
        "kernels.expert_exchange",
        "saw padded with model.moe.experts=0",
    ),
    "more chunks than experts of a rank": (
        "model: {moe: {experts: 6}}\nkernels: {expert_chunks: 4}\nlayout: {ep: 2, dp: 4, tp: 1, pp: 1}",
        "kernels.expert_chunks",
        "saw 4, expected at most the 3 experts of a rank, with layout.ep=2",
    ),
    "experts of a dense model by load": (
        "layout: {expert_placement: by_load}",
        "layout.expert_placement",
        "saw by_load with model.moe.experts=0, a dense model; drop it",
    ),
    "experts by load on one rank": (
        "model: {moe: {experts: 4}}\nlayout: {expert_placement: by_load, ep: 1}",
        "layout.expert_placement",
        "saw by_load with layout.ep=1, where every rank has all experts; use a larger ep, auto, or even",
    ),
    "experts by load and moments in 8 bits": (
        "model: {moe: {experts: 4}}\nlayout: {expert_placement: by_load}\noptimizer: {moments: 8bit}",
        "layout.expert_placement",
        "saw by_load with optimizer.moments=8bit, whose blocks span the experts of a rank",
    ),
    "compiled blocks and selective recomputation": (
        "kernels: {compile: true}\nlayout: {recompute: selective}",
        "kernels.compile",
        "does not see into compiled blocks",
    ),
    "compiled blocks and a split backward pass": (
        "kernels: {compile: true}\nlayout: {schedule: zbv, pp: 2, tp: 1}\nmodel: {layers: 4}",
        "kernels.compile",
        "saw true with layout.schedule=zbv",
    ),
    "linear cross-entropy of a model of your own": (
        "kernels: {loss: linear}\nmodel: {builder: 'a:b'}",
        "kernels.loss",
        "saw linear; a model of your own gives logits",
    ),
    "fused projections of a model of your own": (
        "kernels: {projections: fused}\nmodel: {builder: 'a:b'}",
        "kernels.projections",
        "saw fused; a model of your own",
    ),
    "overlapped tensor parallelism over one rank": (
        "kernels: {tp_overlap: ring}\nlayout: {tp: 1}",
        "kernels.tp_overlap",
        "saw ring with layout.tp=1, which sends nothing that it could hide",
    ),
    "overlapped tensor parallelism of a model of your own": (
        "kernels: {tp_overlap: ring}\nmodel: {builder: 'a:b'}",
        "kernels.tp_overlap",
        "saw ring; a model of your own calls its linear layers by itself",
    ),
    "overlapped tensor parallelism in fp8": (
        "precision: fp8\nkernels: {tp_overlap: ring}\ndata: {sequence_length: 128}",
        "kernels.tp_overlap",
        "saw ring with precision=fp8, which scales whole tensors",
    ),
    "overlapped tensor parallelism and a split backward pass": (
        "kernels: {tp_overlap: ring}\nlayout: {schedule: zbv, pp: 2, tp: 2}\nmodel: {layers: 4}",
        "kernels.tp_overlap",
        "saw ring with layout.schedule=zbv, each half of whose backward pass would send",
    ),
    "symmetric memory on CPUs": (
        "kernels: {tp_overlap: symmetric-memory}\ncluster: {device: cpu}",
        "kernels.tp_overlap",
        "saw symmetric-memory, but workers run on CPUs, where torch has none",
    ),
    "an overlap that is none": (
        "kernels: {tp_overlap: async}",
        "kernels.tp_overlap",
        "one of none, ring, symmetric-memory",
    ),
    "operations of an optimizer that was not chosen": (
        "kernels: {optimizer: foreach}\noptimizer: {name: sgd}",
        "kernels.optimizer",
        "saw foreach with optimizer.name=sgd",
    ),
    "a compiled gate of GPT-2": (
        "kernels: {activation: compiled}\nmodel: {family: gpt2, kv_heads: 4, max_positions: 128}",
        "kernels.activation",
        "saw compiled with model.family=gpt2, which has no SwiGLU; leave it at eager",
    ),
    "a compiled gate of experts": (
        "kernels: {activation: compiled}\nmodel: {moe: {experts: 4}}",
        "kernels.activation",
        "saw compiled with model.moe.experts=4",
    ),
    "a compiled norm of a model of your own": (
        "kernels: {norm: compiled}\nmodel: {builder: 'a:b'}",
        "kernels.norm",
        "saw compiled; a model of your own computes as it was built: leave it at auto",
    ),
    "a closed form of a model of your own": (
        "kernels: {norm: closed-form}\nmodel: {builder: 'a:b'}",
        "kernels.norm",
        "saw closed-form with a model of your own, which computes as it was built",
    ),
    "a closed form of LayerNorm": (
        "kernels: {norm: closed-form}\nmodel: {family: gpt2, kv_heads: 4, max_positions: 128}",
        "kernels.norm",
        "saw closed-form with model.family=gpt2, which has LayerNorm; leave it at auto",
    ),
    "a closed form in a compiled block": (
        "kernels: {norm: closed-form, compile: true}",
        "kernels.norm",
        "saw closed-form with kernels.compile=true",
    ),
    "a compiled norm of a compiled block": (
        "kernels: {norm: compiled, compile: true}",
        "kernels.norm",
        "saw compiled with kernels.compile=true",
    ),
    "a compiled norm and a split backward pass": (
        "kernels: {norm: compiled}\nlayout: {schedule: zbv, pp: 2, tp: 1}\nmodel: {layers: 4}",
        "kernels.norm",
        "saw compiled with layout.schedule=zbv, which splits the backward pass, and that of a compiled norm"
        " runs once; use another schedule or auto",
    ),
    "a chunk of a loss that is not cut": (
        "kernels: {loss: logits, loss_chunk: 64}",
        "kernels.loss_chunk",
        "saw 64 with kernels.loss=logits, which cuts nothing",
    ),
    "no tokens at a time": ("kernels: {loss: linear, loss_chunk: 0}", "kernels.loss_chunk", "saw 0"),
    "copies of what nothing cuts": (
        "layout: {zero: 0, replicate: 2}",
        "layout.replicate",
        "saw 2 with layout.zero=0",
    ),
    "copies and replicas": (
        "layout: {zero: 3, replicate: 4, dp: 4}",
        "layout.replicate",
        "saw 4, expected a divisor of dp x cp = 4 below it",
    ),
    "copies and experts": (
        "model: {moe: {experts: 4}}\nlayout: {ep: 4, dp: 4, zero: 2, replicate: 2}",
        "layout.replicate",
        "leaves 2 ranks per copy, not a multiple of ep=4",
    ),
    "expert parallelism of a dense model": ("layout: {ep: 2}", "layout.ep", "a model without experts"),
    "more experts per token than there are": (
        "model: {moe: {experts: 2, top_k: 3}}",
        "model.moe.top_k",
        "saw 3, expected at most model.moe.experts=2",
    ),
    "loss mask of bytes": (
        "data: {loss_mask: true}",
        "data.loss_mask",
        "has no masks; use jsonl or memmap, or drop it",
    ),
    "loss mask of records that do not say it": (
        "data: {source: jsonl, path: /x, loss_mask: true}",
        "data.loss_mask",
        "saw true with neither data.prompt_key nor data.spans_key, expected the one that says",
    ),
    "two loss masks": (
        "data: {source: jsonl, path: /x, loss_mask: true, prompt_key: p, spans_key: s}",
        "data.loss_mask",
        "saw true with both data.prompt_key and data.spans_key, expected the one that says",
    ),
    "prompts that count": (
        "data: {source: jsonl, path: /x, prompt_key: p}",
        "data.prompt_key",
        "saw 'p' with data.loss_mask=false, where all tokens count; say data.loss_mask=true, or drop it",
    ),
    "spans of token files": (
        "data: {source: memmap, path: /x, loss_mask: true, spans_key: s}",
        "data.spans_key",
        "saw 's' with data.source=memmap, whose documents have no keys; drop it",
    ),
    "prompts that are the text": (
        "data: {source: jsonl, path: /x, loss_mask: true, prompt_key: text}",
        "data.prompt_key",
        "saw 'text', which is data.text_key too",
    ),
    "freeze that matches nothing": (
        'model: {freeze: ["embedd.*"]}',
        "model.freeze",
        "saw 'embedd.*', which names no parameter; the nearest is embed.weight",
    ),
    "freeze that leaves nothing": (
        'model: {freeze: ["*"]}',
        "model.freeze",
        "name all 39 trained parameters",
    ),
    "freeze of all adapters": (
        'model: {lora: {rank: 4}, freeze: ["*.lora_?"]}',
        "model.freeze",
        "name all 16 trained parameters; leave some of them out",
    ),
    "adapters of a norm": (
        'model: {lora: {rank: 4, targets: ["*.mlp_norm"]}}',
        "model.lora.targets",
        "names layers.0.mlp_norm, no linear layer of a block; the nearest is layers.0.mlp.down",
    ),
    "adapters of stacked experts": (
        'model: {moe: {experts: 4}, lora: {rank: 4, targets: ["*.experts.*"]}}',
        "model.lora.targets",
        "names layers.0.mlp.experts.gate, no linear layer",
    ),
    "adapters of a router": (
        'model: {moe: {experts: 4}, lora: {rank: 4, targets: ["*.router"]}}',
        "model.lora.targets",
        "names layers.0.mlp.router, no linear layer",
    ),
    "adapters of the head": (
        "model: {lora: {rank: 4, targets: [head]}}",
        "model.lora.targets",
        "names head, no linear layer of a block",
    ),
    "adapters of a mistyped layer": (
        'model: {lora: {rank: 4, targets: ["*.wqq"]}}',
        "model.lora.targets",
        "saw '*.wqq', which names no linear layer; the nearest is ",
    ),
    "adapters without a target": (
        "model: {lora: {rank: 4, targets: []}}",
        "model.lora.targets",
        "saw a list of 0",
    ),
    "dropout of adapters": (
        "model: {lora: {rank: 4, dropout: 0.1}}",
        "model.lora.dropout",
        "saw 0.1, expected 0",
    ),
    "keys of adapters without a rank": ("model: {lora: {alpha: 8}}", "model.lora.alpha", "say a rank"),
    "adapters in fp8": (
        "precision: fp8\nmodel: {lora: {rank: 4}}\ncluster: {device: cuda}",
        "model.lora.rank",
        "whose layers have no adapters",
    ),
    "adapters of a model of your own": (
        'model: {builder: "m:f", lora: {rank: 4}}',
        "model.lora",
        "which takes only vocab_size, freeze, loss, arguments and plan; drop it",
    ),
    "keys of a mixture in a dense model": ("model: {moe: {top_k: 4}}", "model.moe.top_k", "experts=0"),
    "tp and the experts": (
        "model: {moe: {experts: 2, intermediate_size: 9}}\nlayout: {tp: 2}",
        "layout.tp",
        "model.moe.intermediate_size=9",
    ),
    "tp and the expert of all tokens": (
        "model: {moe: {experts: 2, shared_intermediate_size: 9}}\nlayout: {tp: 2}",
        "layout.tp",
        "saw 2, which does not divide model.moe.shared_intermediate_size=9; nearest",
    ),
    "world": (
        "cluster: {max_workers: 3}\nlayout: {pp: 2}",
        "layout.pp",
        "does not divide cluster.max_workers=3",
    ),
    "too few workers": (
        "layout: {dp: 4, tp: 2}",
        "layout.dp",
        "= 8 workers, more than cluster.max_workers=4",
    ),
    "dp and the batch": ("data: {global_batch: 2}\nlayout: {dp: 4}", "layout.dp", "data.global_batch=2"),
    "too few micro-batches": (
        "layout: {pp: 4, micro_batch: 16}",
        "layout.pp",
        "saw 4 stages but 2 micro-batches per step",
    ),
    "micro-batch and the batch": ("layout: {micro_batch: 64}", "layout.micro_batch", "data.global_batch=32"),
    # cluster, schedule, snapshots, commits
    "workers": ("cluster: {min_workers: 5}", "cluster.min_workers", "at most cluster.max_workers=4"),
    "CPU slots": ("cluster: {min_workers: 4, local_cpus: 2}", "cluster.local_cpus", "too few for"),
    "node timeout": (
        "elastic: {node_timeout_s: 1.5}",
        "elastic.node_timeout_s",
        "twice elastic.heartbeat_s=1",
    ),
    "skipping every step": (
        "elastic: {max_skipped_steps: 5, skip_window_steps: 5}",
        "elastic.max_skipped_steps",
        "less than elastic.skip_window_steps=5",
    ),
    "going back at every step": (
        "elastic: {max_rewinds: 20, skip_window_steps: 20}",
        "elastic.max_rewinds",
        "saw 20, expected less than elastic.skip_window_steps=20, or the run may go back for ever",
    ),
    "no label": (
        "cluster: {failure_domain_label: rack//3}",
        "cluster.failure_domain_label",
        "saw 'rack//3', which no label of a Ray node is called; expected letters, digits",
    ),
    "what is not offered": (
        "elastic: {on_nonfinite: again}",
        "elastic.on_nonfinite",
        "one of skip, rewind, stop",
    ),
    "warm-up": (
        "steps: 10\noptimizer: {schedule: {warmup_steps: 11}}",
        "optimizer.schedule.warmup_steps",
        "at most steps=10",
    ),
    "decay": (
        "steps: 10\noptimizer: {schedule: {kind: wsd, warmup_steps: 6, decay_steps: 5}}",
        "optimizer.schedule.decay_steps",
        "expected at most 4",
    ),
    "decay of a cosine": (
        "optimizer: {schedule: {decay_steps: 5}}",
        "optimizer.schedule.decay_steps",
        "use kind=wsd",
    ),
    "the bias of a balance by loss": (
        "model: {moe: {experts: 4, intermediate_size: 32, bias_rate: 0.1}}",
        "model.moe.bias_rate",
        "saw 0.1 with model.moe.balance=loss, which has none; drop it or use balance=bias",
    ),
    "the loss of a balance by bias": (
        "model: {moe: {experts: 4, intermediate_size: 32, balance: bias, loss_coefficient: 0.5}}",
        "model.moe.loss_coefficient",
        "saw 0.5 with model.moe.balance=bias, which has none; drop it or use balance=loss",
    ),
    "the end of a constant rate": (
        "optimizer: {schedule: {kind: constant, final_ratio: 0.5}}",
        "optimizer.schedule.final_ratio",
        "saw 0.5 with kind=constant, whose rate stays; drop it or use cosine or wsd",
    ),
    "recomputation of nothing": (
        "layout: {recompute: middle-0}\nmodel: {layers: 4}",
        "layout.recompute",
        "saw middle-0, which computes none of 4 blocks again; use none, or another number",
    ),
    "recomputation of every hundredth block": (
        "layout: {recompute: every-100}\nmodel: {layers: 4}",
        "layout.recompute",
        "saw every-100, which computes none of 4 blocks again; use none, or another number",
    ),
    "recomputation of nothing in one stage of two": (
        "layout: {recompute: 'every-2,every-100', pp: 2}\nmodel: {layers: 4}",
        "layout.recompute",
        "saw every-100, which computes none of 4 blocks again; use none, or another number",
    ),
    "virtual stages of one rank": (
        "layout: {pp: 1, virtual_stages: 4}",
        "layout.virtual_stages",
        "saw 4 with layout.pp=1, which has no stages; drop it or use pp",
    ),
    "momentum without muon": (
        "optimizer: {momentum: 0.9}",
        "optimizer.momentum",
        "saw 0.9 with optimizer.name=adamw, which has none; drop it or use optimizer.name=muon",
    ),
    "determinism of ways that are chosen by time": (
        "kernels: {deterministic: true}\ncomm: {selector: true}",
        "kernels.deterministic",
        "saw true with comm.selector=true, which takes the way that was fastest",
    ),
    "determinism of a run that adapts": (
        "kernels: {deterministic: true}\nadapt: {apply: [micro-batch, rows]}",
        "kernels.deterministic",
        "saw true with adapt.apply=micro-batch, rows, which changes the run by what is measured of it",
    ),
    "determinism of fused sums": (
        "kernels: {deterministic: true, tp_overlap: symmetric-memory}\n"
        "layout: {tp: 2}\ncluster: {device: cuda}",
        "kernels.deterministic",
        "saw true with kernels.tp_overlap=symmetric-memory, whose fused sums promise no order",
    ),
    "determinism of cuDNN's attention": (
        "kernels: {deterministic: true, attention: cudnn}\nprecision: bf16\ncluster: {device: cuda}",
        "kernels.attention",
        "saw cudnn, expected auto or one of flash, flash-attn, efficient, math on cuda with precision bf16"
        " and kernels.deterministic",
    ),
    "a loss without a model of one's own": (
        "model: {loss: 'my_package.loss:focal'}",
        "model.loss",
        "saw a value without model.builder; drop it",
    ),
    "a loss that is no import path": (
        "model: {builder: 'a.b:c', loss: focal}",
        "model.loss",
        "saw 'focal'",
    ),
    "a group of no parameter": (
        "optimizer: {groups: [{pattern: embedding.*, rate_factor: 0.5}]}",
        "optimizer.groups.0.pattern",
        "saw embedding.*, which matches no trained parameter; the nearest is embed.weight",
    ),
    "a group of what nothing trains": (
        "model: {moe: {experts: 4, balance: bias}}\n"
        "optimizer: {groups: [{pattern: '*.router.bias', rate_factor: 0.5}]}",
        "optimizer.groups.0.pattern",
        "saw *.router.bias, which matches no trained parameter; the nearest is layers.0.mlp.router.weight",
    ),
    "a group of what is frozen": (
        "model: {freeze: ['embed.*']}\noptimizer: {groups: [{pattern: 'embed.*', rate_factor: 0.5}]}",
        "optimizer.groups.0.pattern",
        "saw embed.*, which matches no trained parameter; the nearest is head.weight",
    ),
    "a group of weights beside adapters": (
        "model: {lora: {rank: 2}}\noptimizer: {groups: [{pattern: '*.wq.weight', rate_factor: 0.5}]}",
        "optimizer.groups.0.pattern",
        "saw *.wq.weight, which matches no trained parameter; the nearest is layers.0.attention.wq.lora_",
    ),
    "a group behind another that takes all of it": (
        "optimizer: {groups: [{pattern: 'layers.*', rate_factor: 2.0},"
        " {pattern: layers.0.*, weight_decay: 0.0}]}",
        "optimizer.groups.1.pattern",
        "saw layers.0.*, all of whose parameters go to layers.* before it (the first match counts)",
    ),
    "a group that changes nothing": (
        "optimizer: {groups: [{pattern: embed.*}]}",
        "optimizer.groups.0",
        "saw neither rate_factor nor weight_decay, a group that changes nothing; say one, or drop it",
    ),
    "a group that does not learn": (
        "optimizer: {groups: [{pattern: embed.*, rate_factor: 0}]}",
        "optimizer.groups.0.rate_factor",
        "saw 0, expected a number > 0",
    ),
    "an average that keeps all": ("optimizer: {ema_decay: 1.0}", "optimizer.ema_decay", "> 0 and < 1"),
    "evaluation of averages that nobody keeps": (
        "evaluate: {weights: ema}",
        "evaluate.weights",
        "saw ema with optimizer.ema_decay=null, which keeps none; say a decay (0.999), or use trained",
    ),
    "moments of plain sgd": (
        "optimizer: {name: sgd, beta2: 0.99}",
        "optimizer.beta2",
        "saw 0.99 with optimizer.name=sgd, which has none; drop it or use optimizer.name=adamw or muon",
    ),
    "momentum of one": ("optimizer: {name: muon, momentum: 1.0}", "optimizer.momentum", ">= 0 and < 1"),
    "offloaded moments on CPUs": (
        "optimizer: {offload: true}\ncluster: {device: cpu}",
        "optimizer.offload",
        "saw true, but workers run on CPUs, whose memory is the host's; drop it",
    ),
    "offloaded activations on CPUs": (
        "layout: {offload_activations: true}\ncluster: {device: cpu}",
        "layout.offload_activations",
        "saw true, but workers run on CPUs, whose memory is the host's; drop it",
    ),
    "offloaded activations and selective recomputation": (
        "layout: {offload_activations: true, recompute: selective}",
        "layout.offload_activations",
        "saw true with layout.recompute=selective, whose kept results stay on the device",
    ),
    "offloaded activations of compiled blocks": (
        "layout: {offload_activations: true}\nkernels: {compile: true}",
        "layout.offload_activations",
        "saw true with kernels.compile=true, which decides by itself",
    ),
    "offloaded moments of plain sgd": (
        "optimizer: {name: sgd, offload: true}",
        "optimizer.offload",
        "saw true with optimizer.name=sgd, which has no moments",
    ),
    "offloaded momentum of muon": (
        "optimizer: {name: muon, offload: true}",
        "optimizer.offload",
        "saw true with optimizer.name=muon, whose momentum the device orthogonalises",
    ),
    "selective recomputation around experts that are gathered": (
        "model: {moe: {experts: 4, intermediate_size: 32}}\ncluster: {max_workers: 4}\n"
        "layout: {dp: 4, tp: 1, pp: 1, ep: 2, zero: 3, recompute: selective}",
        "layout.recompute",
        "saw selective with zero=3 and ep=2 over 4 replicas, where a block gathers its experts within",
    ),
    "a mixture of recomputations around experts that are gathered": (
        "model: {moe: {experts: 4, intermediate_size: 32}}\ncluster: {max_workers: 4}\n"
        "layout: {dp: 4, tp: 1, pp: 1, ep: 2, zero: 3, recompute: blocks-1-2}",
        "layout.recompute",
        "saw blocks-1-2 with zero=3 and ep=2 over 4 replicas, where a block gathers its experts within",
    ),
    "recomputation of other stages than there are": (
        "layout: {pp: 2, recompute: 'none,full,blocks-1'}",
        "layout.recompute",
        "saw a list of 3, expected one word, or one for each of 2 stages",
    ),
    "compiled blocks in a mixture of recomputations": (
        "kernels: {compile: true}\nlayout: {pp: 2, recompute: 'full,blocks-0-1'}",
        "kernels.compile",
        "saw true with layout.recompute=full,blocks-0-1, which does not see into compiled blocks; use full",
    ),
    "offloaded activations in a mixture of recomputations": (
        "layout: {offload_activations: true, recompute: blocks-1-1}",
        "layout.offload_activations",
        "saw true with layout.recompute=blocks-1-1, whose kept results stay on the device",
    ),
    "exact arithmetic on activations in 8 bits": (
        "layout: {recompute: int8}\nprecision: fp64",
        "layout.recompute",
        "saw int8 with precision=fp64, which is for exact gradients; use full or fp32",
    ),
    "activations in 8 bits of compiled blocks": (
        "layout: {recompute: blocks-1-0-1}\nkernels: {compile: true}",
        "layout.recompute",
        "saw blocks-1-0-1 with kernels.compile=true, which decides by itself what a block keeps; drop one",
    ),
    "activations in 8 bits that move": (
        "layout: {recompute: int8, offload_activations: true}",
        "layout.recompute",
        "saw int8 with layout.offload_activations=true, which moves them; drop one",
    ),
    "activations in 8 bits under a split backward pass": (
        "layout: {pp: 2, schedule: zbv, recompute: int8}",
        "layout.recompute",
        "saw int8 with schedule zbv, which splits the backward pass",
    ),
    "an allocator that nobody has": (
        "memory: {allocator: first-fit}",
        "memory.allocator",
        "saw first-fit, which torch's allocators do not have: they take the smallest free block that is",
    ),
    "an allocator's strategy on CPUs": (
        "memory: {allocator: adaptive}\ncluster: {device: cpu}",
        "memory.allocator",
        "saw adaptive, but workers run on CPUs, where the C library allocates by its own strategy; use auto",
    ),
    "memory pools on CPUs": (
        "memory: {preallocate: true}\ncluster: {device: cpu}",
        "memory.preallocate",
        "saw true, but workers run on CPUs, which have no memory pools; drop it",
    ),
    "memory pools of segments that grow": (
        "memory: {preallocate: true, allocator: adaptive}",
        "memory.preallocate",
        "saw true with memory.allocator=adaptive, whose segments grow by themselves; drop one",
    ),
    "memory pools of a graph": (
        "memory: {preallocate: true}\nkernels: {cuda_graphs: true}",
        "memory.preallocate",
        "saw true with kernels.cuda_graphs=true, whose graph has a pool of its own; drop one",
    ),
    "memory pools of moments that are elsewhere": (
        "memory: {preallocate: true}\noptimizer: {offload: true}",
        "memory.preallocate",
        "saw true with optimizer.offload=true, whose state lies in host memory; drop one",
    ),
    "offloaded moments and foreach": (
        "optimizer: {offload: true}\nkernels: {optimizer: foreach}",
        "kernels.optimizer",
        "saw foreach with optimizer.offload=true",
    ),
    "CUDA graphs on CPUs": (
        "kernels: {cuda_graphs: true}\ncluster: {device: cpu}",
        "kernels.cuda_graphs",
        "saw true, but workers run on CPUs, which have no CUDA graphs; drop it",
    ),
    "CUDA graphs of experts": (
        "kernels: {cuda_graphs: true}\nmodel: {moe: {experts: 4, intermediate_size: 32}}",
        "kernels.cuda_graphs",
        "saw true with model.moe.experts=4, which get other numbers of rows each time; use false",
    ),
    "CUDA graphs of offloaded activations": (
        "kernels: {cuda_graphs: true}\nlayout: {offload_activations: true}",
        "kernels.cuda_graphs",
        "saw true with layout.offload_activations=true, which waits for copies",
    ),
    "CUDA graphs of document masks": (
        "kernels: {cuda_graphs: true}\ndata: {document_masks: true}",
        "kernels.cuda_graphs",
        "saw true with data.document_masks=true, whose masks are other ones in every row",
    ),
    "CUDA graphs and fp8": (
        "kernels: {cuda_graphs: true}\nprecision: fp8\ndata: {sequence_length: 128}",
        "kernels.cuda_graphs",
        "saw true with precision=fp8, which was not tried together",
    ),
    "CUDA graphs of cut weights": (
        "kernels: {cuda_graphs: true}\ncluster: {max_workers: 4}\nlayout: {dp: 2, tp: 2, pp: 1, zero: 1}",
        "kernels.cuda_graphs",
        "saw true with layout.tp=2, layout.zero=1, which communicates within the passes; use dp alone",
    ),
    "moments in 8 bits of plain sgd": (
        "optimizer: {name: sgd, moments: 8bit}",
        "optimizer.moments",
        "saw 8bit with optimizer.name=sgd, which has no moments; drop it or use adamw",
    ),
    "offloaded moments in 8 bits": (
        "optimizer: {offload: true, moments: 8bit}",
        "optimizer.moments",
        "saw 8bit with optimizer.offload=true, whose moments take nothing of the device",
    ),
    "moments in 8 bits of fp64": (
        "precision: fp64\noptimizer: {moments: 8bit}",
        "optimizer.moments",
        "saw 8bit with precision=fp64, which is for exact moments; use full or fp32",
    ),
    "moments in 4 bits": ("optimizer: {moments: 4bit}", "optimizer.moments", "one of full, 8bit"),
    "a compiled gate of a fused product that left the device": (
        "layout: {offload_activations: true}\nkernels: {projections: fused, activation: compiled}",
        "kernels.activation",
        "saw compiled with kernels.projections=fused and layout.offload_activations=true: gate and up",
    ),
    "fp8 and fused projections": (
        "precision: fp8\nkernels: {projections: fused}\ndata: {sequence_length: 128}",
        "kernels.projections",
        "saw fused with precision=fp8, which has a scale per projection",
    ),
    "no such optimizer": ("optimizer: {name: lion}", "optimizer.name", "one of adamw, sgd, muon"),
    "two slots": ("snapshot: {slots: 2}", "snapshot.slots", "expected an integer >= 3"),
    "snapshot interval": (
        "snapshot: {interval_steps: 0}",
        "snapshot.interval_steps",
        "expected auto or at least 1",
    ),
    "relative slot folder": ("snapshot: {folder: shm}", "snapshot.folder", "an absolute path"),
    "commits never kept": (
        "checkpoint: {interval_steps: 20, keep_every_steps: 30}",
        "checkpoint.keep_every_steps",
        "a multiple of checkpoint.interval_steps=20",
    ),
    "resume beyond the end": (
        "steps: 10\ncheckpoint: {resume_step: 11}",
        "checkpoint.resume_step",
        "at most steps=10",
    ),
    # init_from
    "a step of no run": ("init_from: {step: 3}", "init_from.step", "without init_from.run"),
    "itself": ("name: a\ninit_from: {run: a}", "init_from.run", "which is this run itself"),
    "a run that is a path": ("init_from: {run: ../a}", "init_from.run", "a string that matches"),
    "foreign origin": (
        "init_from: {run: a, url: 'gs://bucket/x'}",
        "init_from.url",
        "a local folder or s3://bucket/prefix",
    ),
    # storage
    "foreign storage": (
        "storage: {url: 'gs://bucket/x'}",
        "storage.url",
        "a local folder or s3://bucket/prefix",
    ),
    "half an S3 address": ("storage: {url: 's3:/bucket'}", "storage.url", "s3://bucket/prefix"),
    "no bucket": ("storage: {url: 's3:///x'}", "storage.url", "saw bucket ''"),
    "bucket in capitals": ("storage: {url: 's3://Bucket/x'}", "storage.url", "lower-case"),
    "a call shorter than its retries": (
        "storage: {retry_deadline_s: 30, call_timeout_s: 20}",
        "storage.call_timeout_s",
        "more than storage.retry_deadline_s=30",
    ),
    "no storage": ("storage: {url: ''}", "storage.url", "a local folder or s3://bucket/prefix"),
    "credentials in the URL": ("storage: {url: 's3://key:hunter2@bucket/x'}", "storage.url", "environment"),
    "credentials in the endpoint": (
        "storage: {url: 's3://bucket', endpoint_url: 'http://key:hunter2@host:9000'}",
        "storage.endpoint_url",
        "environment",
    ),
    "endpoint without a scheme": (
        "storage: {url: 's3://bucket', endpoint_url: 'host:9000'}",
        "storage.endpoint_url",
        "expected http://host:port",
    ),
    "unreadable endpoint": (
        "storage: {url: 's3://bucket', endpoint_url: 'http://[::1'}",
        "storage.endpoint_url",
        "expected http://host:port",
    ),
    "region of a folder": ("storage: {region: eu-west-1}", "storage.region", "only s3:// storage uses it"),
    # scripted faults
    "unknown fault": (
        'chaos: [{fault: kil, target: "worker:0", step: 1}]',
        "chaos.0.fault",
        "did you mean kill?",
    ),
    "fault without a step": ('chaos: [{fault: kill, target: "worker:0"}]', "chaos.0.step", "saw nothing"),
    "fault at nobody": ("chaos: [{fault: kill, target: rank2, step: 1}]", "chaos.0.target", "saw 'rank2'"),
    "unknown phase": (
        'chaos: [{fault: kill, target: "worker:0", step: 1, phase: fwd}]',
        "chaos.0.phase",
        "saw 'fwd', expected one of idle, rendezvous",
    ),
    "worker in the commit": (
        'chaos: [{fault: kill, target: "worker:0", step: 1, phase: commit}]',
        "chaos.0.phase",
        "only the coordinator commits",
    ),
    "rank beyond the world": (
        'chaos: [{fault: kill, target: "worker:4", step: 1}]',
        "chaos.0.target",
        "a rank below cluster.max_workers=4",
    ),
    "fault after the end": (
        'steps: 5\nchaos: [{fault: kill, target: "worker:0", step: 6}]',
        "chaos.0.step",
        "at most steps=5",
    ),
    "removing a worker": (
        'chaos: [{fault: remove-node, target: "worker:0", step: 1}]',
        "chaos.0.target",
        "expected node:<index> for fault remove-node",
    ),
    "slow by nothing": (
        'chaos: [{fault: slow, target: "worker:0", step: 1}]',
        "chaos.0.row_s",
        "expected the seconds that slow sleeps per row",
    ),
    "sleep of a kill": (
        'chaos: [{fault: kill, target: "worker:0", step: 1, row_s: 0.1}]',
        "chaos.0.row_s",
        "saw 0.1 with fault kill",
    ),
    "slow graphs": (
        "kernels: {cuda_graphs: true}\ncluster: {device: cuda}\nlayout: {tp: 1, pp: 1, zero: 0}\n"
        'chaos: [{fault: slow, target: "worker:0", step: 1, row_s: 0.1}]',
        "chaos.0.fault",
        "whose replays know of no sleep",
    ),
    "killing a node": (
        'chaos: [{fault: kill, target: "node:0", step: 1}]',
        "chaos.0.target",
        "expected worker:<rank> or coordinator",
    ),
    # the file itself
    "not YAML": ("steps: [1", "", "fix the YAML"),
    "not a mapping": ("- steps", "", "saw a list, expected a mapping of config keys"),
    "nothing at all": ("", "", "saw nothing"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config_is_one_clear_line(name: str, tmp_path: Path) -> None:
    text, key, words = BAD[name]
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(str(path))
    assert caught.value.exit_code == 2
    (line,) = caught.value.problems
    assert "\n" not in line
    assert "hunter2" not in line
    assert line.startswith(f"{key}: " if key else f"{path}"), line
    assert words in line, line


LAUNCH_ALL = """
import contextlib, io, json, sys
from picotron_ray.launch import main

seen = []
for path in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = ["launch", path]
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code
    seen.append([code, out.getvalue(), err.getvalue()])
with open("/proc/thread-self/children") as children:
    started = children.read().split()
print(json.dumps({"seen": seen, "started": started, "heavy": sorted({"torch", "ray"} & set(sys.modules))}))
"""


def test_launch_refuses_each_with_exit_2_and_starts_nothing(tmp_path: Path) -> None:
    """All of them through launch's own entry point, in one fresh process."""
    paths = [tmp_path / f"{number}.yaml" for number in range(len(BAD))]
    for path, (text, _, _) in zip(paths, BAD.values(), strict=True):
        path.write_text(text)
    command = [sys.executable, "-c", LAUNCH_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (told["started"], told["heavy"]) == ([], [])
    for (code, out, err), (_, key, words) in zip(told["seen"], BAD.values(), strict=True):
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {key}")
        assert err.count("\n") == 1
        assert words in err
        assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_there_are_enough() -> None:
    assert len(BAD) >= 40
