"""Programs and clusters behind the published runs: what each source ran, beside what its rows say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from picotron_ray.planner.software_profile import OURS, SoftwareProfile

MEGATRON = SoftwareProfile(
    pointwise=3.8,
    compiled_pointwise=1.3,
    selective="attention",
    even_stages=True,
    accumulate_bytes=17.0,
    update_bytes=34.0,
    gradient_bytes=4,
    gathered_bytes=2,
    hop_exposed=0.24,
    fp8_speedup=1.7,
)
MEGATRON_2022 = replace(MEGATRON, attention="unfused", gradient_bytes=2)
FSDP = replace(OURS, sequence_parallel=False, gradient_bytes=4, gathered_bytes=2)
MEGATRON_KERNEL_S = 1.7e-3


@dataclass(frozen=True, slots=True)
class SourceNotes:
    """One source of published runs.

    Fields:
        software: the program.
        complete: whether its rows state whole layouts, so that a prediction can be judged.
        gpt: whether its models are GPT-2's kind (two products in the hidden layer), not Llama's.
        node_link_bytes_s: network card per device where it is not the data sheet's; 0: as there.
        kernel_s: launch seconds per block and micro-batch where they are the program's own; 0: as usual.
        counts: what it counts differently.
    """

    software: SoftwareProfile
    complete: bool
    gpt: bool = False
    node_link_bytes_s: float = 0.0
    kernel_s: float = 0.0
    counts: str = ""


SOURCES = {
    "Korthikanti et al. 2022": SourceNotes(
        MEGATRON_2022,
        True,
        True,
        kernel_s=MEGATRON_KERNEL_S,
        counts="seconds; full recomputation runs without sequence parallelism",
    ),
    "BLOOM / BigScience 2022": SourceNotes(
        # Jean Zay: four 100 Gb/s Omni-Path cards for a node's eight devices, without access to their
        # memory; the rate is fitted
        MEGATRON_2022,
        True,
        True,
        node_link_bytes_s=1.8e9,
        kernel_s=MEGATRON_KERNEL_S,
        counts="seconds; its TFLOP/s count recomputation (hardware FLOPs)",
    ),
    "MPT / llm-foundry 2023-24": SourceNotes(
        replace(FSDP, attention="flash-1"),
        True,
        True,
        counts="tokens/s; its MFU counts full attention, fp8 against 1,979 TFLOP/s",
    ),
    "torchtitan 2024-12": SourceNotes(
        replace(FSDP, selective="half-products"),
        True,
        counts="tokens/s per device of a 500 W H100 with HBM2e",
    ),
    "torchtitan/Trainy 2025-06": SourceNotes(
        replace(FSDP, selective="half-products"), True, counts="tokens/s; recomputation is not stated"
    ),
    "torchtitan 2024 (A100)": SourceNotes(
        replace(FSDP, selective="half-products"), True, counts="tokens/s per device (WPS); bf16 assumed"
    ),
    "nanotron v0.5 2025": SourceNotes(
        MEGATRON, True, counts="MFU with full attention and the head, no input embedding"
    ),
    "nanochat 2025": SourceNotes(FSDP, True, True, counts="MFU without the input embedding; Muon"),
    "NeMo AutoModel 2026 (H100)": SourceNotes(FSDP, True, counts="seconds; recomputation is not stated"),
    "fms-fsdp 2024": SourceNotes(FSDP, True, counts="tokens/s; the recomputed share is not stated"),
    "Llama 3 paper 2024": SourceNotes(MEGATRON, False, counts="TFLOP/s, MFU rounded"),
    "picotron 2025": SourceNotes(MEGATRON, False, counts="MFU in words; no layout at all"),
    "Megatron-Core 2024 (H100)": SourceNotes(
        MEGATRON, False, True, counts="model TFLOP/s, read from a picture"
    ),
    "NeMo 24.12 (H100)": SourceNotes(MEGATRON, False, counts="tokens/s; model FLOPs with full attention"),
    "Megatron-Bridge 2025-26 (H100)": SourceNotes(
        MEGATRON, False, counts="tokens/s; counts half the attention"
    ),
    "Megatron-LM examples 2025 (H100)": SourceNotes(
        MEGATRON, False, counts="tokens/s; counts full attention"
    ),
    "MegaScale paper 2024 (Megatron-LM baseline)": SourceNotes(
        MEGATRON, False, True, counts="seconds; the device is only called Ampere"
    ),
    "OLMo-core 2024-11": SourceNotes(FSDP, False, counts="tokens/s, rounded; no device count"),
}
