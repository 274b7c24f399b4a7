"""What ``bench mfu`` compares and how it counts, without running it."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray import cli
from picotron_ray.bench.mfu import report
from picotron_ray.bench.mfu.figures import (
    Timed,
    breakdown,
    formula,
    measured,
    mfu,
    speed_up,
    timed,
)
from picotron_ray.bench.mfu.peers import chosen_peers, peer
from picotron_ray.bench.mfu.result import peak_of, refusals, result, runs_of
from picotron_ray.bench.mfu.run import MfuOptions, _device, _settled, _tell, bench, segments
from picotron_ray.bench.mfu.settings import (
    EXCHANGE,
    NEVER,
    SNAPSHOTS,
    SWITCHES,
    Refusal,
    Setting,
    base_setting,
    by_the_loop,
    changed,
    switched,
)
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.custom_model import BuiltModel
from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.planner.peaks import known_peak, mfu_ratio, peak_of_worker, rated_precision

SMOLLM = (  # SmolLM-1.7B
    "model.vocab_size=49152",
    "model.hidden_size=2048",
    "model.intermediate_size=8192",
    "model.layers=24",
    "model.heads=32",
    "model.kv_heads=32",
    "model.tie_embeddings=true",
    "data.sequence_length=2048",
)


def test_formula_is_picotrons_and_its_words_are_its_numbers() -> None:
    found = formula(load_job("quickstart", SMOLLM))
    assert found.parameters == 1_711_376_384
    assert found.flops_per_token == 6 * 1_711_376_384 + 12 * 24 * 2048 * 2048
    words = str(found).replace(",", "")
    for name in ("parameters", "layers", "wide", "tokens"):
        words = words.replace(f" {name}", "")
    assert eval(words.replace("x", "*")) == found.flops_per_token
    assert mfu(4 * 47_400, found.flops_per_token, 4, 989e12) == pytest.approx(0.55, rel=1e-3)


def test_of_a_mixture_only_the_chosen_experts_count() -> None:
    sparse = formula(load_job("tiny", ["model.moe.experts=8", "model.moe.top_k=2"]))
    dense = formula(load_job("tiny", ["model.moe.experts=2", "model.moe.top_k=2"]))
    assert sparse.parameters - dense.parameters == 2 * 6 * 32  # two routers know six experts more


def test_only_a_whole_name_and_bf16_have_a_data_sheet() -> None:
    assert known_peak("NVIDIA H200", "bf16") == known_peak("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert known_peak("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "cpu"):
        assert known_peak(name, "bf16") is None
    assert known_peak("NVIDIA H200", "fp32") is None


def test_a_runs_mfu_relates_to_a_peak_that_is_named_or_there_is_none() -> None:
    job = load_job("quickstart", ["precision=bf16"])
    published = peak_of_worker(job, {"NVIDIA H200"})
    assert published == (989e12, "NVIDIA H200, dense bf16 by its data sheet")
    assert peak_of_worker(job, set()) is None, "CPUs"
    assert peak_of_worker(job, {"NVIDIA H200", "NVIDIA B200"}) is None
    given = load_job("quickstart", ["telemetry.peak_tflops=0.05"])
    peak = peak_of_worker(given, set())
    assert peak == (5e10, "telemetry.peak_tflops")
    flops = formula(given).flops_per_token
    assert mfu_ratio(given, 1000.0, 4, peak) == pytest.approx(mfu(1000.0, flops, 4, 5e10))


def test_rates_are_of_whole_segments_and_ratios_of_rounds() -> None:
    slow = [{"steps_s": [1.0, 3.0], "peak_bytes": 5}, {"steps_s": [4.0, 4.0], "peak_bytes": 7}]
    fast = [{"steps_s": [1.0, 1.0], "peak_bytes": 5}, {"steps_s": [1.0, 1.0], "peak_bytes": 5}]
    found = measured(slow, 100)
    assert found["tokens_per_s"] == {"median": 37.5, "low": 31.25, "high": 43.75}
    assert found["step_s"]["median"] == 3.5
    assert (found["steps"], found["peak_bytes"]) == (4, 7)
    assert speed_up(fast, slow) == {"median": 3.0, "low": 2.5, "high": 3.5}


def test_breakdown_is_that_of_the_rank_that_computes_most() -> None:
    waits = {"data": 0.1, "forward": 1.0, "backward": 2.0, "reduce": 0.9}
    works = {"forward": 1.5, "backward": 2.0, "bubble": 0.25, "reduce": 0.25}
    found = breakdown([waits, works])
    assert (found["rank"], found["step_s"]) == (1, 4.0)
    assert list(found["phases"]) == ["forward", "backward", "bubble", "reduce"]
    assert found["phases"]["bubble"] == {"s": 0.25, "share": 0.0625}


def test_peak_is_given_else_of_the_data_sheet_else_the_fastest_product() -> None:
    place = {"what": "place", "rank": 0, "device": "cpu", "data_sheet": None}
    products = [
        {"what": "product", "rank": rank, "size": 64, "flops_per_s": flops}
        for rank, flops in ((0, 1.0), (0, 3.0), (1, 5.0), (1, 2.0))
    ]
    assert peak_of([place, *products], None, "fp32")["flops_per_s"] == 4.0
    assert "64 x 64 fp32 matrix product" in peak_of([place, *products], None, "fp32")["source"]
    assert peak_of([{**place, "data_sheet": 7.0}], None, "bf16")["flops_per_s"] == 7.0
    assert peak_of([{**place, "data_sheet": 7.0}], 2.0, "bf16")["flops_per_s"] == 2e12


def differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, value in one.items():
        if isinstance(value, dict):
            found |= differing(value, other[key], f"{prefix}{key}.")
        elif value != other[key]:
            found.add(f"{prefix}{key}")
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_switch_changes_what_it_names_and_nothing_else(workers: int) -> None:
    base = base_setting("tiny", [], workers, "cpu")
    assert base.layout.world_size == workers
    settings = [item for item in switched(base) if isinstance(item, Setting)]
    for setting in settings:
        named = {override.partition("=")[0] for override in setting.name.split()}
        assert differing(setting.job.model_dump(), base.job.model_dump()) == named
        moved = differing(asdict(setting.layout), asdict(base.layout))
        assert {f"layout.{key}" for key in moved} <= named
        assert setting.layout.world_size == workers
    names = {setting.name for setting in settings}
    assert {"precision=bf16", "kernels.attention=math", "layout.recompute=full"} < names
    assert {"kernels.projections=fused", "kernels.loss=linear", "kernels.optimizer=foreach"} < names
    assert {"kernels.norm=eager", "kernels.norm=compiled", "kernels.activation=compiled"} < names
    assert ("layout.tp=2 layout.dp=auto" in names) == (workers == 2)
    assert ("layout.tp=2 layout.dp=auto kernels.tp_overlap=ring" in names) == (workers == 2)
    two = [] if workers == 1 else switched(base_setting("tiny", ["layout.tp=2"], workers, "cpu"))
    assert ("kernels.tp_overlap=ring" in [x.name for x in two if isinstance(x, Setting)]) == (workers == 2)
    assert "kernels.norm=closed-form" not in names  # what auto comes to
    assert not names & {"precision=fp32", "kernels.attention=flash", "layout.recompute=none"}  # the base


def test_refused_switches_keep_their_reason() -> None:
    base = base_setting("tiny", ["precision=fp32"], 1, "cuda")
    refused = {item.name: item.reason for item in switched(base) if isinstance(item, Refusal)}
    assert refused["kernels.attention=flash"].startswith("kernels.attention: saw flash, expected")
    assert refused["layout.zero=3"] == "layout.zero: saw 3, but one replica has nobody to shard with"
    assert "layout.tp: saw dp=1 x tp=2" in refused["layout.tp=2 layout.dp=auto"]
    assert set(refused) < set(SWITCHES)


def test_a_layout_that_leaves_workers_idle_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--workers: saw 2, but dp1.* uses 1 of them"):
        base_setting("tiny", ["layout.dp=1", "layout.tp=1", "layout.pp=1"], 2, "cpu")


def test_peers_train_what_we_train_or_say_why_not(tmp_path: Path) -> None:
    base = base_setting("tiny", [], 2, "cpu")
    assert peer(base, "plain") == Setting("plain", "plain", base.job, base.layout)
    assert isinstance(peer(base, "picotron"), Setting)
    cut = replace(base, layout=replace(base.layout, dp=1, tp=2))
    assert "data-parallel over equal shares" in str(peer(cut, "plain"))
    for override in (
        "optimizer.name=sgd", "model.moe.experts=2", "data.document_masks=true", "precision=fp16",
    ):  # fmt: skip
        assert isinstance(peer(base_setting("tiny", [override], 2, "cpu"), "plain"), Refusal)
    half = base_setting("tiny", ["precision=bf16"], 1, "cpu")
    assert "it trains in fp32 on cpu, saw precision=bf16" in str(peer(half, "picotron"))
    odd = base_setting("tiny", ["model.vocab_size=265", "layout.tp=2", "layout.dp=1"], 2, "cpu")
    assert "cuts a vocabulary into equal parts, saw model.vocab_size=265" in str(peer(odd, "picotron"))
    assert chosen_peers("none", {}) == []
    with pytest.raises(ConfigError, match=r"--torchtitan: saw .*without torchtitan/trainer.py"):
        chosen_peers("plain,torchtitan", {"torchtitan": tmp_path})
    with pytest.raises(ConfigError, match=r"--picotron: saw .*without picotron/model.py"):
        chosen_peers("plain,picotron", {"picotron": tmp_path})


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["precision=fp64"], "it trains in fp32 or bf16, saw precision=fp64"),
        (["model.qkv_bias=true"], "its Llama 3 has no such heads, biases, norms or window"),
        (["model.sliding_window=8"], "its Llama 3 has no such heads"),
        (["model.head_dim=4"], "its Llama 3 has no such heads"),
        (
            ["layout.recompute=selective"],
            "it recomputes as ours does by none or full, saw layout.recompute=sel",
        ),
        (["layout.pp=2", "layout.micro_batch=4"], "compared under dp and tp with equal micro-batches, saw"),
        (
            ["data.global_batch=6", "layout.micro_batch=2", "layout.dp=2"],
            "compared under dp and tp with equal micro-batches",
        ),
        (
            ["data.sequence_length=9", "layout.micro_batch=2", "kernels.loss=linear"],
            "it computes the loss of 8 equal parts, saw 18 tokens in a micro-batch",
        ),
        (["data.document_masks=true"], "its attention sees whole rows"),
        (["optimizer.name=muon"], "written for AdamW, saw optimizer.name=muon"),
    ],
)
def test_torchtitan_says_what_it_cannot_be_compared_in(overrides: list[str], reason: str) -> None:
    found = peer(base_setting("tiny", overrides, 2, "cpu"), "torchtitan")
    assert isinstance(found, Refusal)
    assert found.reason.startswith(reason)


def test_torchtitan_trains_more_of_our_models_than_picotron() -> None:
    for override in ("model.tie_embeddings=true", "model.rope_scaling.factor=4", "precision=bf16"):
        base = base_setting("tiny", [override], 2, "cpu")
        assert isinstance(peer(base, "torchtitan"), Setting)
        assert isinstance(peer(base, "picotron"), Refusal)
    on_cuda = base_setting("tiny", ["precision=bf16"], 1, "cuda")
    assert isinstance(peer(on_cuda, "torchtitan"), Setting)
    for override in ("kernels.cuda_graphs=true", "layout.offload_activations=true", "optimizer.offload=true"):
        found = peer(base_setting("tiny", ["precision=bf16", override], 1, "cuda"), "torchtitan")
        assert "compared with" in str(found), override
    narrow = peer(base_setting("tiny", ["precision=bf16", "model.heads=4"], 1, "cuda"), "torchtitan")
    assert "takes heads of 16 and more on CUDA, saw 8" in str(narrow)


def test_rounds_go_there_and_back_and_end_with_the_phases() -> None:
    order = segments(3, 2)
    assert [segment["index"] for segment in order] == [0, 1, 2, 2, 1, 0, 0]
    assert [segment["phases"] for segment in order] == [False] * 6 + [True]


def noted(settings: list[Setting], **refused: str) -> list[dict[str, Any]]:
    """Two ranks' notes of one round; setting i takes i + 1 seconds a step."""
    events: list[dict[str, Any]] = []
    for rank in range(2):
        own = {"rank": rank}
        events.append({"what": "place", "device": "NVIDIA H200", "data_sheet": 989e12, **own})
        for number, segment in enumerate(segments(len(settings), 1)):
            index = segment["index"]
            took: dict[str, Any] = {"steps_s": [index + 1.0] * 2, "peak_bytes": 2**30 * (1 + rank)}
            if settings[index].kind == "engine":
                took["sent_bytes"] = 1_000_000 * (2 + rank - index)
                took["loss_sum"] = 128.0 * (2 + 0.02 * index)  # of 256 tokens on both ranks
            if settings[index].kind == "loop":
                costs = {"wait_s": 0.25 * rank, "snapshot_s": 2.0, "skipped": 0, "copies": []}
                took["loop"] = {"snapshots": int(index == 2 and not rank), **costs}
            if settings[index].kind in refused:
                took = {"refused": refused[settings[index].kind], "by_peer": rank == 1}
            elif segment["phases"]:
                took = {"phases_s": {"forward": 0.3, "backward": 0.6, "reduce": 0.1}, "applied": ["math"]}
            events.append({"what": "segment", "number": number, **segment, **took, **own})
    return events


def test_some_switches_alone() -> None:
    options = MfuOptions(2, 2, 0, 1, True, "none", None, None, None, "comm.gradients=int8")
    assert options.switches == ["comm.gradients=int8", "comm.gradients=int8 comm.bits=4"]
    several = replace(options, only="layout.micro_batch=8, comm.gradients=bf16")
    assert several.switches == ["layout.micro_batch=8", "comm.gradients=bf16"]
    assert replace(options, only="").switches == list(SWITCHES)
    assert replace(options, only="", ablate=False).switches == []
    for bad in (
        replace(options, ablate=False),
        replace(options, only="comm.,"),
        replace(options, only="com."),
    ):
        with pytest.raises(ConfigError, match=r"--only: saw '.*', expected with --ablate the beginning"):
            assert not bad.switches


def test_every_switch_has_room_beside_its_figures() -> None:
    assert max(map(len, SWITCHES)) < report.NAME


def test_result_and_report() -> None:
    base = base_setting("tiny", ["precision=bf16"], 2, "cpu")
    switch = switched(base, ["precision=fp32", "layout.tp=2 layout.dp=auto"])
    settings = [base, *(item for item in switch if isinstance(item, Setting)), peer(base, "plain")]
    assert [setting.name for setting in settings] == ["base", "precision=fp32", SWITCHES[-1], "plain"]
    events = noted(settings)  # type: ignore[arg-type]
    found = result(settings, {"layout.zero=9": "no"}, events, None)  # type: ignore[arg-type]
    assert found["ablation"]["precision=fp32"]["ratio"]["median"] == 0.5
    assert found["peers"]["plain"]["ratio"]["median"] == 4.0
    assert found["peak_bytes"] == 2 * 2**30
    assert found["job"]["precision"] == "bf16"
    assert (found["job"]["workers"], found["job"]["device"]) == (2, "NVIDIA H200")
    assert found["rounds"]["base"] == [
        {"steps_s": [1.0, 1.0], "peak_bytes": 2 * 2**30, "sent_bytes": 3_000_000, "loss_sum": 512.0}
    ]
    assert found["sent_bytes"] == 3_000_000
    assert found["ablation"]["precision=fp32"]["sent_bytes"] == 2_000_000
    assert found["peers"]["plain"]["sent_bytes"] is None
    assert found["loss"] == 2.0
    over = found["ablation"]["precision=fp32"]["over_base"]
    assert over == pytest.approx({"loss": 1.01, "sent_bytes": 2 / 3, "peak_bytes": 1.0})
    assert found["peers"]["plain"]["over_base"] == {}
    tokens_per_s = 8 * 32 / 1.0
    assert found["mfu"] == tokens_per_s * found["formula"]["flops_per_token"] / (2 * 989e12)
    options = asdict(MfuOptions(2, 2, 0, 1, True, "plain", None, None, None))
    machine = {"cores": 2, "processor": "Z80", "memory_gib": 1.0}
    text = "\n".join(report.lines({**found, "options": options, "machine": machine}))
    assert "computes with math\n" in text
    for part in (
        "2 workers of NVIDIA H200 on 2 cores of Z80",
        "tokens/s      256  (256 to 256 over 1 round)",
        "peak memory   2.000 GiB, CUDA memory allocated",
        "6 x 37,536 parameters + 12 x 2 layers x 32 wide x 32 tokens",
        "attention counted in full, not halved for the causal mask",
        "2.00 MB  loss +1.0 %, bytes -33.3 %, memory +0.0 %",
        "989 TFLOP/s per worker, dense bf16 by its data sheet",
        f"{'layout.zero=9':{report.NAME}}refused: no",
    ):
        assert part in text
    failing = result(settings, {}, noted(settings, plain="out of memory"), None)  # type: ignore[arg-type]
    assert failing["refused"] == {"plain": "out of memory"}
    assert failing["peers"] == {}
    with pytest.raises(PicotronError, match="bench mfu: out of memory"):
        result(settings, {}, noted(settings, engine="out of memory"), None)  # type: ignore[arg-type]


def test_timed_are_whole_intervals_between_snapshots() -> None:
    began = {step: float(step * step) for step in range(1, 12)}
    assert timed(began, [], 2, 3, snapshots=False) == Timed([7.0, 9.0, 11.0], 0)
    assert timed(dict.fromkeys(range(1, 6), 0.0), [], 2, 3, snapshots=False) is None, "one step too few"
    assert timed(began, [1, 5, 9], 2, 3, snapshots=True) == Timed([13.0, 15.0, 17.0, 19.0], 1)
    assert timed(began, [1, 4, 6, 8], 2, 3, snapshots=True) == Timed([11.0, 13.0, 15.0, 17.0], 2)
    for sealed in ([], [5], [1, 5], [5, 7]):
        assert timed(began, sealed, 2, 3, snapshots=True) is None
    assert timed(dict.fromkeys(range(1, 10), 0.0), [5, 9], 2, 3, snapshots=True) is None


def test_the_loop_of_workers_beside_the_base() -> None:
    base = base_setting("tiny", ["init_from.run=other"], 2, "cpu")
    loops = [item for item in by_the_loop(base) if isinstance(item, Setting)]
    assert [loop.name for loop in loops] == [EXCHANGE, SNAPSHOTS]
    assert [loop.job.snapshot.interval_steps for loop in loops] == [NEVER, "auto"]
    assert all(loop.job.init_from.run is None and loop.layout == base.layout for loop in loops)
    settings = [base, *loops]
    events = noted(settings)
    found = result(settings, {}, events, None)
    assert found["peers"] == found["ablation"] == {}
    alone, snapshots = found["loop"][EXCHANGE], found["loop"][SNAPSHOTS]
    assert (alone["over_base"]["median"], alone["snapshots"], alone["interval_steps"]) == (2.0, 0, None)
    assert (snapshots["over_base"]["median"], snapshots["over_exchange"]["median"]) == (3.0, 1.5)
    assert (snapshots["snapshots"], snapshots["interval_steps"], snapshots["wait_s"]) == (1, 2.0, 0.25)
    options = asdict(MfuOptions(2, 2, 0, 1, False, "none", None, None, None))
    machine = {"cores": 2, "processor": "Z80", "memory_gib": 1.0}
    text = "\n".join(report.lines({**found, "options": options, "machine": machine}))
    assert f"  {'bare':{report.LOOP}}      1000 ms\n" in text
    assert f"  {EXCHANGE:{report.LOOP}}      2000 ms  x 2.000  (2.000 to 2.000)\n" in text
    assert "3000 ms  x 3.000  (3.000 to 3.000)  one each 2 steps, 2 s beside them; x 1.500 of those" in text


def test_without_room_for_slots_the_loop_is_refused_and_the_base_is_not(tmp_path: Path) -> None:
    words = [f"snapshot.folder={tmp_path / 'none'}"]
    refused = by_the_loop(base_setting("tiny", words, 1, "cpu"))
    assert [item.name for item in refused] == [EXCHANGE, SNAPSHOTS]
    for item in refused:
        assert isinstance(item, Refusal)
        assert item.reason.startswith("snapshot.folder: ")


def test_a_rank_that_has_only_lost_a_peer_does_not_say_why() -> None:
    base = base_setting("tiny", [], 2, "cpu")
    settings = [base, *(item for item in by_the_loop(base) if isinstance(item, Setting))]
    told = [("no room", False), ("lost rank 0", True)]
    for order in (told, told[::-1]):
        events = [{"index": 1, "refused": why, "by_peer": by_peer} for why, by_peer in order]
        assert refusals(settings, events) == {EXCHANGE: "no room"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--peers", "horovod"],
            "--peers: saw 'horovod', expected some of plain, picotron, torchtitan, or none",
        ),
        (["--peers", "picotron"], "--picotron: saw none, expected a checkout"),
        (["--peak-tflops", "0"], "--peak-tflops: saw 0, expected a number above 0"),
        (["layout.dp=3"], "layout.dp: saw dp=3"),
        (["modle.layers=3"], "modle: saw an unknown key"),
        (["data.source=text", "data.path=/nothing"], "data.path: "),
    ],
)
def test_bad_requests_end_with_one_line_before_anything_starts(
    arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picotron_ray.bench.mfu.run.measure", lambda *_: pytest.fail("started"))
    result = CliRunner().invoke(cli.app, ["bench", "mfu", "tiny", "cluster.device=cpu", *arguments])
    assert result.exit_code == 2
    assert line in result.stderr


def test_auto_precision_is_settled_before_anything_is_measured() -> None:
    assert _settled(load_job("tiny", ["precision=auto"]), "cpu").precision == "fp32"
    assert _settled(load_job("tiny", ["precision=bf16"]), "cpu").precision == "bf16"


def test_what_needs_a_gpu_is_named_among_the_refused_on_cpus() -> None:
    base = base_setting("tiny", [], 1, "cpu")
    refused = {item.name: item.reason for item in switched(base) if isinstance(item, Refusal)}
    offloads = {name for name in refused if "offload" in name}
    assert len(offloads) == 3
    assert all("workers run on CPUs" in refused[name] for name in offloads)
    assert "saw fp8, which CPUs do not have" in refused["precision=fp8"]


def test_moments_in_8_bits_are_a_switch_and_no_peer_has_them() -> None:
    base = base_setting("tiny", [], 1, "cpu")
    assert "optimizer.moments=8bit" in [item.name for item in switched(base) if isinstance(item, Setting)]
    refused = peer(base_setting("tiny", ["optimizer.moments=8bit"], 1, "cpu"), "plain")
    assert isinstance(refused, Refusal)
    assert refused.reason == "its moments are full, saw optimizer.moments=8bit"


def test_the_peak_is_that_of_a_jobs_precision_and_of_fp8_that_of_bf16() -> None:
    jobs = {name: load_job("tiny", [f"precision={name}"]) for name in ("fp32", "bf16", "fp8", "tf32")}
    assert {name: rated_precision(job) for name, job in jobs.items()} == {
        "fp32": "fp32",
        "bf16": "bf16",
        "fp8": "bf16",
        "tf32": "tf32",
    }


def test_the_busiest_rank_is_so_by_both_passes() -> None:
    """The first has more of the forward pass, the second more of both together."""
    found = breakdown([{"forward": 2.0, "backward": 1.0}, {"forward": 1.0, "backward": 3.0}, {"data": 9.0}])
    assert (found["rank"], found["step_s"]) == (1, 4.0)
    with pytest.raises(ValueError, match="shorter"):
        speed_up([{"steps_s": [1.0]}] * 2, [{"steps_s": [1.0]}])


def test_equal_parts_matter_to_a_linear_loss_alone() -> None:
    """9 tokens in a row make 18 in a micro-batch, 8 make 16."""
    for overrides in (["data.sequence_length=9"], ["data.sequence_length=8", "kernels.loss=linear"]):
        base = base_setting("tiny", [*overrides, "layout.micro_batch=2"], 1, "cpu")
        assert isinstance(peer(base, "torchtitan"), Setting)


def test_refusals_are_collected_by_name() -> None:
    base = base_setting("tiny", [], 1, "cpu")
    settings = [base, replace(base, name="b"), replace(base, name="c")]
    events = [{"index": 1, "refused": "no room", "by_peer": False}, {"index": 0, "steps_s": [1.0]}]
    assert refusals(settings, events) == {"b": "no room"}
    assert refusals(settings, events[1:]) == {}
    with pytest.raises(PicotronError, match=r"^bench mfu: nothing goes$"):
        refusals(settings, [*events, {"index": 0, "refused": "nothing goes", "by_peer": False}])


def test_a_round_is_as_rank_0_timed_it_and_as_full_as_the_fullest() -> None:
    events = [
        {"index": index, "number": number, "rank": rank, "steps_s": [number + rank / 2], "peak_bytes": peak}
        for rank, peak in ((1, 9), (0, 5))
        for number, index in ((2, 0), (0, 0), (1, 1))
    ]
    assert runs_of([*events, {"what": "place"}]) == {
        0: [
            {"steps_s": [0.0], "peak_bytes": 9, "sent_bytes": None, "loss_sum": None},
            {"steps_s": [2.0], "peak_bytes": 9, "sent_bytes": None, "loss_sum": None},
        ],
        1: [{"steps_s": [1.0], "peak_bytes": 9, "sent_bytes": None, "loss_sum": None}],
    }


def test_every_second_round_is_in_reverse() -> None:
    assert [segment["index"] for segment in segments(2, 5)] == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0]


def test_a_kernel_that_is_named_stays_and_auto_is_settled() -> None:
    assert base_setting("tiny", ["kernels.attention=math"], 1, "cpu").job.kernels.attention == "math"
    base = base_setting("tiny", [], 2, "cpu")
    assert base.job.kernels.attention != "auto"
    assert (base.job.cluster.min_workers, base.job.cluster.max_workers, base.job.chaos) == (2, 2, ())
    assert base.job.steps == 1_000_000
    assert base.job.layout.dp == base.layout.dp == 2


def test_a_switch_leaves_what_launch_found_in_a_model_of_your_own() -> None:
    built = BuiltModel(
        parameters=(), blocks=(), pipeline=(), tensor={}, cuts={}, tensor_degrees=(), hidden_size=8,
        activations=1,
    )  # fmt: skip
    own = load_job("tiny", ["model={vocab_size: 264, builder: 'mine:build'}"])
    job = own.model_copy(update={"model": own.model.model_copy(update={"built": built})})
    assert changed(job, ["steps=7"]) == job.model_copy(update={"steps": 7})


OPTIONS = MfuOptions(1, 2, 0, 1, False, "plain", None, None, None)


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[Setting]] = []
    kept: list[Path] = []

    def measure(
        settings: list[Setting],
        options: MfuOptions,
        folder: Path,
        say: Any,
        *,
        accounted: bool,
        slots: Path,
    ) -> list[dict[str, Any]]:
        assert folder.is_dir()
        assert slots.parent == Path("/dev/shm")
        assert slots.is_dir()
        kept.append(slots)
        assert accounted
        measured.append(settings)
        return noted(settings)

    monkeypatch.setattr("picotron_ray.bench.mfu.run.measure", measure)
    overrides = ["cluster.device=cpu", "precision=auto"]
    found = bench("tiny", overrides, OPTIONS, print)
    assert [setting.name for setting in measured[0]] == ["base", EXCHANGE, SNAPSHOTS, "plain"]
    assert not kept[0].exists()
    assert measured[0][0].job.precision == found["job"]["precision"] == "fp32"
    assert found["options"] == {**asdict(OPTIONS)}
    assert {"processor", "cores", "memory_gib", "torch"} <= found["machine"].keys()
    ablated = bench("tiny", overrides, replace(OPTIONS, ablate=True, peers="none", peak_tflops=0.5), print)
    assert "layout.recompute=full" in ablated["ablation"]
    assert ablated["peak"] == {"flops_per_s": 0.5e12, "source": "given by --peak-tflops"}
    assert "layout.zero=3" in ablated["refused"]
    assert measured[1][0].name == "base"


def test_options_name_the_checkouts_that_were_given(tmp_path: Path) -> None:
    assert OPTIONS.checkouts == {}
    assert replace(OPTIONS, torchtitan=tmp_path).checkouts == {"torchtitan": tmp_path}


@pytest.mark.parametrize(
    ("asked", "gpus", "workers", "device"),
    [("cpu", 8, 1, "cpu"), ("auto", 0, 4, "cpu"), ("auto", 2, 2, "cuda"), ("cuda", 2, 1, "cuda")],
)
def test_device(asked: str, gpus: int, workers: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    job = load_job("tiny", [f"cluster.device={asked}"])
    assert _device(job, workers) == device
    if device == "cuda":
        with pytest.raises(ConfigError, match=rf"^--workers: saw {gpus + 1}, but {gpus} GPUs; give fewer"):
            _device(job, gpus + 1)


def test_progress_is_told_once() -> None:
    base = base_setting("tiny", [], 1, "cpu")
    events = [
        {"what": "segment", "rank": rank, "index": 0, "number": number, **found}
        for number, found in enumerate(({"steps_s": [0.5, 1.0]}, {"phases_s": {}}, {"refused": "no room"}))
        for rank in (0, 1)
    ]
    said: list[str] = []
    assert _tell([events[1]], 0, [base], 3, said.append) == 0  # rank 0 is under way
    told = _tell([{"what": "place", "rank": 0}, *events[:2]], 0, [base], 3, said.append)
    assert (told, _tell(events, told, [base], 3, said.append)) == (1, 3)
    assert said == ["1 of 3: base: 0.75 s a step", "2 of 3: base: phase by phase", "3 of 3: base: no room"]
