"""``picotron-ray bench``: measurements on this machine. Heavy imports happen inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from picotron_ray.commands.bench_data import bench_curriculum, bench_packing
from picotron_ray.commands.bench_output import JsonFile, result, say, writing
from picotron_ray.errors import PicotronError
from picotron_ray.launch import Config, Overrides

benchmarks = typer.Typer(no_args_is_help=True, help="Measurements on this machine.")
benchmarks.command("packing")(bench_packing)
benchmarks.command("curriculum")(bench_curriculum)


@benchmarks.command("recovery")
def bench_recovery(
    runs: Annotated[int, typer.Option(min=1, help="kills per framework, one after the other")] = 10,
    seed: Annotated[int, typer.Option(help="draws the victims and the moments")] = 0,
    peers: Annotated[
        str, typer.Option(help="what to compare with: ray_train, torchft, with a comma between, or none")
    ] = "ray_train,torchft",
    json_file: JsonFile = None,
) -> None:
    """SIGKILL workers of a small job, ours and others'; seconds from each kill to the next new step.

    Example: picotron-ray bench recovery --runs 3 --peers none
    """
    with writing(json_file):
        from picotron_ray.bench.common.report import recovery_lines
        from picotron_ray.bench.recovery import bench
        from picotron_ray.runtime.driver.follow_run import without_rays_messages

        chosen = bench.chosen_peers(peers)
        with without_rays_messages():
            found = bench.bench(runs, seed, chosen, say)
        result(found, recovery_lines(found), json_file)


@benchmarks.command("throughput")
def bench_throughput(
    pairs: Annotated[int, typer.Option(min=1, help="rounds, each with every side once")] = 20,
    workers: Annotated[int | None, typer.Option(min=1, help="default: one less than there are cores")] = None,
    sides: Annotated[
        str, typer.Option(help="of a round")
    ] = "every_step,service,torchrun,plain,snapshots_off",
    json_file: JsonFile = None,
) -> None:
    """Steps per second of the service, the same loop under torchrun, and plain PyTorch, in turns.

    Example: picotron-ray bench throughput --pairs 4 --json -
    """
    with writing(json_file):
        from picotron_ray.bench.common.report import throughput_lines
        from picotron_ray.bench.throughput import bench

        chosen = bench.chosen_sides(sides)
        found = bench.bench(pairs, workers or bench.default_workers(), chosen, say)
        result(found, throughput_lines(found), json_file)


@benchmarks.command("telemetry")
def bench_telemetry(
    steps: Annotated[int, typer.Option(min=10, help="timed, ten times")] = 1000,
    micro_batches: Annotated[int, typer.Option(min=1, help="of each step")] = 4,
    ranks: Annotated[int, typer.Option(min=1, help="whose figures the coordinator adds up")] = 8000,
    json_file: JsonFile = None,
) -> None:
    """Cost of timing steps: for a worker, its node's agent and the coordinator.

    Example: picotron-ray bench telemetry --steps 500
    """
    with writing(json_file):
        from picotron_ray.bench.telemetry import bench

        found = bench.bench(steps, micro_batches, ranks, say)
        result(found, bench.lines(found), json_file)


@benchmarks.command("coordinator")
def bench_coordinator(
    nodes: Annotated[int, typer.Option(min=2, help="of the fake cluster")] = 2048,
    workers: Annotated[int, typer.Option(min=1, help="on each node")] = 8,
    seconds: Annotated[float, typer.Option(min=1, help="measured after the first step")] = 600,
    calls: Annotated[bool, typer.Option(help="measure the cost of real calls of Ray too")] = True,
    json_file: JsonFile = None,
) -> None:
    """Share of a core, memory and answers to losses of one coordinator before a fake cluster of a size.

    Example: picotron-ray bench coordinator --nodes 64 --seconds 20 --no-calls
    """
    with writing(json_file):
        from picotron_ray.bench.coordinator import bench, report

        found = bench.bench(nodes, workers, seconds, say, with_calls=calls)
        result(found, report.lines(found), json_file)


@benchmarks.command("host")
def bench_host(
    ranks: Annotated[str, typer.Option(help="sizes, with commas between; all ranks but one are fake")] = (
        "64,1024,16384"
    ),
    zero: Annotated[int, typer.Option(min=0, max=3, help="what replicas share out")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Seconds that one rank's host spends on a step and on a generation's groups, at any number of ranks.

    Example: picotron-ray bench host --ranks 64,1024
    """
    with writing(json_file):
        from picotron_ray.bench import host_cost

        found = host_cost.bench(host_cost.sizes_of(ranks), zero, say)
        result(found, list(host_cost.lines(found)), json_file)


@benchmarks.command("mfu")
def bench_mfu(
    config: Config,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, help="processes, one GPU or CPU core each")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="timed in each segment")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="steps before them")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="each with every setting once")] = 5,
    ablate: Annotated[bool, typer.Option("--ablate", help="switch each optimisation in turn")] = False,
    only: Annotated[
        str, typer.Option(help="with --ablate: switches that begin with this, as comm. or comm.,layout.zero")
    ] = "",
    peers: Annotated[
        str, typer.Option(help="some of plain, picotron, torchtitan, with commas between, or none")
    ] = "plain",
    picotron: Annotated[Path | None, typer.Option(help="a checkout of huggingface/picotron")] = None,
    torchtitan: Annotated[Path | None, typer.Option(help="a checkout of pytorch/torchtitan")] = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="of one worker; default: its data sheet's, else measured")
    ] = None,
    memory_timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a step's memory by class as HTML")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second, MFU, a step's phases and peak memory of a config's engine, without Ray.

    Example: picotron-ray bench mfu quickstart --peers none --rounds 2
    """
    with writing(json_file):
        from picotron_ray.bench.mfu import report, run

        options = run.MfuOptions(
            workers,
            steps,
            warmup,
            rounds,
            ablate,
            peers,
            picotron,
            torchtitan,
            peak_tflops,
            only,
            memory_timeline,
        )
        found = run.bench(config, overrides or [], options, say)
        result(found, report.lines(found), json_file)


@benchmarks.command("gpu")
def bench_gpu(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="where the JSON named by the device goes")],
    cpu: Annotated[bool, typer.Option("--cpu", help="rehearse every part over gloo")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds, switches and kills: minutes")] = False,
    parts: Annotated[
        str, typer.Option(help="all, or some of tests, mfu, snapshots, kill, service, with commas between")
    ] = "all",
    workers: Annotated[int | None, typer.Option(min=1, help="default: all GPUs; 2 in a rehearsal")] = None,
    picotron: Annotated[Path | None, typer.Option(help="a checkout of huggingface/picotron")] = None,
    torchtitan: Annotated[Path | None, typer.Option(help="a checkout of pytorch/torchtitan")] = None,
) -> None:
    """All that a machine with GPUs can show: tests, MFU, snapshots, a killed rank. Needs no network.

    Exit code 5: there is no CUDA device. 3: a part failed; the JSON says which and why.

    Example: picotron-ray bench gpu --out docs/gpu
    """
    with writing(None):
        from picotron_ray.bench.gpu import bench, report

        found = bench.bench(bench.GpuOptions(out, cpu, quick, parts, workers, picotron, torchtitan), say)
        result(found, report.lines(found), None)
        if found["failed"]:
            raise PicotronError(f"bench gpu: failed: {', '.join(found['failed'])}")


@benchmarks.command("profile")
def bench_profile(
    run: Annotated[str, typer.Argument(metavar="RUN", help="name of a run that goes on")],
    pairs: Annotated[
        int, typer.Option(min=3, help="each a block of steps after a profile and one without")
    ] = 30,
    steps: Annotated[int, typer.Option(min=1, help="of a block")] = 25,
    seed: Annotated[int, typer.Option(help="of the order within each pair")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time steps of a run after a profile over those without one, in interleaved pairs; its 95 % interval.

    Example: picotron-ray bench profile quickstart --pairs 3
    """
    with writing(json_file):
        from picotron_ray.bench.profile import bench

        found = bench.bench(run, pairs, steps, seed, say)
        result(found, bench.lines(found), json_file)


@benchmarks.command("watching")
def bench_watching(
    run: Annotated[str, typer.Argument(metavar="RUN", help="name of a run that goes on")],
    pairs: Annotated[int, typer.Option(min=3, help="each a block of steps that is watched and one not")] = 30,
    steps: Annotated[int, typer.Option(min=1, help="of a block")] = 20,
    scrape_s: Annotated[float, typer.Option(min=0.1, help="seconds between scrapes of all metrics")] = 5.0,
    seed: Annotated[int, typer.Option(help="of the order within each pair")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Step times and CPU seconds of a run while its page is open and its metrics are scraped, over without.

    Example: picotron-ray bench watching quickstart --pairs 30
    """
    with writing(json_file):
        from picotron_ray.bench.watching import bench

        found = bench.bench(run, pairs, steps, scrape_s, seed, say)
        result(found, bench.lines(found), json_file)


@benchmarks.command("plan")
def bench_plan(
    config: Config,
    hardware: Annotated[str, typer.Option("--hardware", help="file of `picotron-ray probe` on this machine")],
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=2, help="processes, a CPU core each or a share of one")] = 2,
    layouts: Annotated[int, typer.Option(min=3, help="drawn, the planner's choice among them")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="each with every layout once")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="timed in each segment")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="steps before them")] = 1,
    seed: Annotated[int, typer.Option(help="of the draw")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Layouts drawn by seed, predicted and measured: whether the planner orders them as this machine does.

    Example: picotron-ray bench plan quickstart --hardware here.json --workers 2
    """
    with writing(json_file):
        from picotron_ray.bench.plan import bench, report

        options = bench.PlanOptions(hardware, workers, layouts, rounds, steps, warmup, seed)
        found = bench.bench(config, overrides or [], options, say)
        result(found, report.lines(found), json_file)


@benchmarks.command("comm")
def bench_comm(
    groups: Annotated[str, typer.Option(help="ranks, with commas between")] = "2,4,8",
    sizes: Annotated[
        str, typer.Option(help="of one rank's buffer; of all parts of a gather together")
    ] = "1KiB,1MiB,1GiB",
    collectives: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    strategies: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    budget_s: Annotated[
        float, typer.Option(help="seconds for all cells; those that do not fit are named")
    ] = 900,
    device: Annotated[str, typer.Option(help="auto: cuda where each rank has a GPU; cpu or cuda")] = "auto",
    json_file: JsonFile = None,
) -> None:
    """Seconds and bus bandwidth of every way of every collective, by size and group; the selector's choices.

    Example: picotron-ray bench comm --groups 2 --sizes 1KiB,1MiB --budget-s 60
    """
    with writing(json_file):
        from picotron_ray.bench.comm import bench, report

        found = bench.bench(bench.CommOptions(groups, sizes, collectives, strategies, budget_s, device), say)
        result(found, report.lines(found), json_file)


@benchmarks.command("alerts")
def bench_alerts(
    folder: Annotated[Path, typer.Argument(help="of the recordings")],
    record: Annotated[bool, typer.Option("--record", help="record clean runs there first")] = False,
    windows: Annotated[int, typer.Option(min=100, help="of each configuration that is recorded")] = 4000,
    seed: Annotated[int, typer.Option(help="of the recorded runs")] = 0,
    configs: Annotated[str, typer.Option(help="all, or names with commas between")] = "all",
    json_file: JsonFile = None,
) -> None:
    """False alarms of each detector on windows of clean runs; they are recorded by real runs of two workers.

    Example: picotron-ray bench alerts clean --record --windows 500
    """
    with writing(json_file):
        from picotron_ray.bench.alerts import recording
        from picotron_ray.bench.alerts.rates import lines, rates
        from picotron_ray.runtime.driver.follow_run import without_rays_messages

        if record:
            for name in recording.chosen(configs):
                with without_rays_messages():
                    recording.record(name, seed, windows, folder.absolute(), say)
        found = rates(recording.recorded(folder))
        result(found, list(lines(found)), json_file)


@benchmarks.command("experts")
def bench_experts(
    tokens: Annotated[int, typer.Option(help="of a micro-batch")] = 8192,
    experts: Annotated[int, typer.Option(help="of a mixture, a multiple of 4")] = 64,
    top_k: Annotated[int, typer.Option(help="experts of a token")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Milliseconds that the order of experts' rows takes, by counts on the host and on the device.

    Example: picotron-ray bench experts --tokens 16384 --experts 128 --top-k 8
    """
    with writing(json_file):
        from picotron_ray.bench import expert_order

        found = expert_order.bench(tokens, experts, top_k, device, say)
        result(found, expert_order.lines(found), json_file)


@benchmarks.command("initial-weights")
def bench_initial_weights(
    config: Config,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(help="whose part is drawn")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Seconds and memory that one rank's part of the initial weights takes, at any size, on one core.

    Example: picotron-ray bench initial-weights llama-3-70b layout.tp=8 layout.pp=8 data.path=CORPUS
    """
    with writing(json_file):
        from picotron_ray.bench import initial_weights

        found = initial_weights.bench(config, overrides or [], rank, say)
        result(found, initial_weights.lines(found), json_file)
