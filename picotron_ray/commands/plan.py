"""``picotron-ray plan``: the layout for a model on so many devices, before any of them is rented."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from picotron_ray.errors import ConfigError
from picotron_ray.launch import Overrides, reported
from picotron_ray.runtime.driver.asked_files import write_asked

SomeConfig = Annotated[
    str | None, typer.Argument(help="a YAML file, or the name of a packaged recipe; left out with --validate")
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="also write the result to FILE, as JSON; - is stdout, alone"),
]
HARDWARE, GPUS, GOAL = "h100-80g", 8, "throughput"
ROW_TOKENS = 4096
"""Tokens of a row where a folder's model can have as many or more."""
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", help="devices; default: the workers that the config names, else 8"),
]
HardwareName = Annotated[
    str,
    typer.Option("--hardware", help="a100-40g, a100-80g, h100-80g, h200-141g, b200-180g, or a probe's .json"),
]
Validate = Annotated[
    bool, typer.Option("--validate", help="hold the cost model against published runs, row by row")
]
GoalWord = Annotated[
    str, typer.Option("--goal", help="throughput, memory, fewest, cheapest, robust or balanced")
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="NUMBER", help="of the whole run, such as 2e12")
]
Deadline = Annotated[str | None, typer.Option("--deadline", help="time that the run may take: 36h, 90m, 3d")]
Price = Annotated[
    str | None,
    typer.Option("--price", help="gpu-hour=2.5; spot: gpu-hour=1.1,interruptions=0.01 (per GPU and hour)"),
]
Losing = Annotated[
    int | None, typer.Option("--losing", min=1, help="nodes that a robust layout is judged without")
]
Purpose = Annotated[
    str, typer.Option("--for", help="run: the layout; cluster: machines, memory and storage for it too")
]
SizeFile = Annotated[
    Path | None,
    typer.Option("--write-size", help="with --for cluster: write a size.yaml of the GPU overlay here"),
]


Search = Annotated[
    str | None,
    typer.Option(
        "--search",
        help="further keys to search: offload, precision, communication, or some",
        metavar="GROUPS",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="also step the layout's engine with fake tensors: peaks and bytes sent, proven"
    ),
]
Recipes = Annotated[
    bool, typer.Option("--recipes", help="every packaged recipe, on each of --cards, in place of a config")
]
CardWords = Annotated[
    str | None,
    typer.Option(
        "--cards",
        metavar="NUMBERxGB,...",
        help="a row for each, such as 8x80,64x141 or 8xa100-80g, in place of --gpus and --hardware",
    ),
]
CalibrationWord = Annotated[
    str,
    typer.Option(
        "--calibration", help="auto: by runs that were measured on such hardware here; none; or a file"
    ),
]


_Ways = tuple[dict[str, Any], list[str], list[str]]
"""Of further keys what is written, and the lines before and after those of the plan."""


def plan(
    config: SomeConfig = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    hardware: HardwareName = HARDWARE,
    validate: Validate = False,
    goal: GoalWord = GOAL,
    tokens: Tokens = None,
    deadline: Deadline = None,
    price: Price = None,
    losing: Losing = None,
    what_for: Purpose = "run",
    write_size: SizeFile = None,
    calibration: CalibrationWord = "auto",
    search: Search = None,
    dry_run: DryRun = False,
    recipes: Recipes = False,
    cards: CardWords = None,
    json_file: JsonFile = None,
) -> None:
    """Find the layout for a model on so many devices, and say where its seconds and bytes go.

    Nothing is started and neither data nor storage is looked at; every degree that the config leaves to
    ``auto`` is searched.

    Example: picotron-ray plan llama-3-8b --gpus 64 --hardware h100-80g
    """
    given = locals()
    with reported(json_file == "-"), by_gpus(gpus):
        if _of_many(given):
            return
        from picotron_ray.planner import goals
        from picotron_ray.planner.hardware import hardware as named
        from picotron_ray.planner.plan_text import plan_lines, run_lines
        from picotron_ray.runtime.calibrated_hardware import calibrated_hardware, correction_lines

        if config is None:
            raise ConfigError("plan: saw no config, expected a YAML file or a recipe, or --validate")
        _check_purpose(gpus, what_for, write_size)
        gpus = gpus or workers_named(config, overrides or [])
        job = shape_of(config, overrides or [], gpus, named(hardware, "auto").device)
        asked = goals.goal_of(goal, goals.tokens_of(tokens), deadline, price, losing)
        devices, fixed, path = calibrated_hardware(named(hardware, job.precision), job, gpus, calibration)
        if search is None:
            found = goals.plan_for(job, gpus, devices, asked, time.perf_counter)
            ways: _Ways = {}, [], []
        else:
            found, ways = _search_ways(job, gpus, devices, goal, search)
        run = goals.run_estimate(found, asked)
        value = {**found.to_dict(), "goal": goal, **ways[0]}
        lines = [*ways[1], *plan_lines(found), *run_lines(run), *ways[2]]
        value["calibration"] = {**asdict(fixed.factors), "why": fixed.why, "file": path and str(path)}
        lines += correction_lines(fixed, path)
        if run is not None:
            value |= {"run_hours": run.hours, "run_price": run.price}
        if what_for == "cluster":
            lines += _size_cluster(found, value, write_size)
        if dry_run:
            lines += _prove(found, value)
        _show(lines, value, json_file)


def _of_many(given: dict[str, Any]) -> bool:
    """Answer for published runs, or for several cards and recipes; False: one plan is asked for."""
    if given["validate"]:
        _check_alone(given)
        _validate(given["json_file"])
        return True
    if not given["recipes"] and given["cards"] is None:
        return False
    from picotron_ray.commands.plan_cards import plan_cards

    of_many = ("config", "overrides", "cards", "recipes", "dry_run", "json_file")
    _refuse_others(given, "plan --cards", "--dry-run and --json", of_many)
    _show(*plan_cards(given, shape_of, proof_of), given["json_file"])
    return True


def _size_cluster(found: Any, value: dict[str, Any], write_size: Path | None) -> list[str]:
    """Add the cluster of a plan to what is written; returns its lines."""
    from picotron_ray.planner.cluster_size import cluster_size, size_patches
    from picotron_ray.planner.plan_text import cluster_lines

    if write_size is not None and found.hardware.device != "cuda":
        raise ConfigError(
            f"--write-size: saw {found.hardware.name}, whose workers are CPUs, expected GPUs: it is a size of"
            " the GPU overlay; leave it out"
        )
    size = cluster_size(found)
    value["cluster"] = size.to_dict()
    if write_size is not None:
        write_asked("--write-size", write_size, size_patches(size))
    return list(cluster_lines(size, found.hardware.device))


def _search_ways(job: Any, gpus: int, devices: Any, goal: str, search: str) -> tuple[Any, _Ways]:
    """The best plan of further keys."""
    from picotron_ray.planner.hardware import in_precision
    from picotron_ray.planner.ways import groups_of, plan_of_ways

    if goal != "throughput":
        raise ConfigError(
            f"--search: saw it with --goal {goal}, expected --goal throughput; drop one of them"
        )
    found = plan_of_ways(
        job, gpus, lambda precision: in_precision(devices, precision), groups_of(search), time.perf_counter
    )
    return found.best, (found.to_dict(), found.headline(), found.lines())


def _prove(found: Any, value: dict[str, Any]) -> list[str]:
    """Add the dry run of a plan to what is written; returns its lines. Imports torch."""
    proof = proof_of(found)
    value["dry_run"] = proof.to_dict()
    return proof.lines()


def proof_of(found: Any) -> Any:
    """Step a plan's layout with fake tensors. Imports torch. Raises ConfigError for what needs a GPU."""
    if found.job.precision == "fp8" and found.job.fp8.scaling == "mxfp8":
        raise ConfigError(
            "--dry-run: saw fp8.scaling=mxfp8, whose kernels need a GPU; say rowwise, which sends as much"
        )
    from picotron_ray.train.dry_run.proof import prove

    return prove(found.job, found.best.layout)


def _check_alone(given: dict[str, Any]) -> None:
    """Refuse what stands beside --validate; an option that has its default is not told from none."""
    if given["config"] is not None:
        raise ConfigError(
            f"plan --validate: saw {given['config']}, expected no config: it predicts published runs"
        )
    _refuse_others(given, "plan --validate", "--json", ("validate", "json_file"))


def _refuse_others(given: dict[str, Any], door: str, expected: str, allowed: tuple[str, ...]) -> None:
    """Refuse options of one plan beside those that are allowed, where they have not their defaults."""
    defaults = {**dict.fromkeys(given), "hardware": HARDWARE, "goal": GOAL, "what_for": "run"}
    defaults |= {"calibration": "auto", "dry_run": False, "recipes": False, "validate": False}
    found = (name for name, value in given.items() if name not in allowed and value != defaults[name])
    if other := next(found, None):
        option = {"what_for": "for"}.get(other, other).replace("_", "-")
        raise ConfigError(
            f"{door}: saw --{option}, which is of one plan, expected {expected} alone; drop one of them"
        )


def _check_purpose(gpus: int | None, what_for: str, write_size: Path | None) -> None:
    if gpus is not None and gpus < 1:
        raise ConfigError(f"--gpus: saw {gpus}, expected at least 1, such as --gpus 8")
    if what_for not in ("run", "cluster"):
        raise ConfigError(f"--for: saw {what_for}, expected run or cluster")
    if write_size is not None and what_for != "cluster":
        raise ConfigError(f"--write-size: saw {write_size} without --for cluster; add that, or drop it")


def analyse(
    config: Annotated[
        str, typer.Argument(help="a YAML file, a packaged recipe, or a folder of Hugging Face (config.json)")
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="replicas that share the state; default: as for plan")
    ] = None,
    hardware: HardwareName = HARDWARE,
    json_file: JsonFile = None,
) -> None:
    """Count a model: parameters, bytes, FLOPs, memory by ZeRO stage, the largest micro-batch that fits.

    Nothing is built and nothing is started.

    Example: picotron-ray analyse llama-3-8b --gpus 64
    """
    with reported(json_file == "-"), by_gpus(gpus):
        from picotron_ray.planner.analysis import analyse as analysed
        from picotron_ray.planner.hardware import hardware as named
        from picotron_ray.planner.plan_text import analysis_lines
        from picotron_ray.runtime.run_storage.hf_files import bytes_by_dtype

        gpus = gpus or workers_named(config, overrides or [])
        job = shape_of(config, overrides or [], gpus)
        held = bytes_by_dtype(Path(config)) if Path(config).is_dir() else None
        found = analysed(job, gpus, named(hardware, job.precision), held)
        _show(analysis_lines(found), found.to_dict(), json_file)


def _validate(json_file: str | None) -> None:
    from picotron_ray.planner.plan_text import memory_validation_lines, validation_lines
    from picotron_ray.planner.published.memory import memory_dict, stage_memories
    from picotron_ray.planner.published.validate import validate

    found, memory = validate(), stage_memories()
    lines = [*validation_lines(found), *memory_validation_lines(memory)]
    _show(lines, {**found.to_dict(), **memory_dict(memory)}, json_file)


@contextmanager
def by_gpus(gpus: int | None) -> Iterator[None]:
    """Name ``--gpus`` in refusals, where they name the worker count that `shape_of` sets by it.

    A count that the config says keeps its own name.
    """
    try:
        yield
    except ConfigError as error:
        asked = re.compile(rf"(?<=raise )cluster\.max_workers\b|cluster\.max_workers={gpus or GPUS}\b")
        lines = [
            asked.sub(lambda found: found[0].replace("cluster.max_workers", "--gpus").replace("=", " "), line)
            for line in error.problems
        ]
        raise type(error)(*lines) from None


def workers_named(config: str, overrides: list[str]) -> int:
    """``cluster.max_workers`` where the config or an override says it; else `GPUS`."""
    from picotron_ray.config.load import read_source

    cluster = {} if Path(config).is_dir() else read_source(config).get("cluster")
    named = [cluster.get("max_workers")] if isinstance(cluster, dict) else []
    named += [word.partition("=")[2] for word in overrides if word.startswith("cluster.max_workers=")]
    digits = str(named[-1]) if named else ""
    return int(digits) if digits.isdecimal() and int(digits) else GPUS


def shape_of(config: str, overrides: list[str], gpus: int, device: str | None = None) -> Any:
    """The job of a config, or of a Hugging Face folder, on so many devices; of it only the shape matters.

    A data path that it leaves open is not missed, and its own worker counts and faults do not count.
    """
    from picotron_ray.config.load import load_job, parse_job

    alone = ["chaos=[]", f"cluster.max_workers={gpus}", "cluster.min_workers=1"]
    alone += [f"cluster.device={device}"] if device else []
    if Path(config).is_dir():
        return parse_job(_of_folder(Path(config)), [*overrides, *alone])
    return load_job(config, [*overrides, *_unread(config, overrides), *alone])


def _unread(config: str, overrides: list[str]) -> list[str]:
    """An override for the data path where the config leaves it open."""
    from picotron_ray.config.load import read_source

    data = read_source(config).get("data")
    given = isinstance(data, dict) and data.get("path")
    named = any(word.partition("=")[0] in ("data.path", "data") for word in overrides)
    memmap = isinstance(data, dict) and data.get("source", "stdlib") != "stdlib"
    return ["data.path=unread"] if memmap and not given and not named else []


def _of_folder(folder: Path) -> dict[str, Any]:
    """A config for the model of a Hugging Face folder, in its precision and with rows of a common length."""
    from picotron_ray.runtime.run_storage import hf_files, hf_import

    keys = hf_files.read_config(folder)
    longest = keys.get("max_position_embeddings") or keys.get("n_positions")
    length = min(ROW_TOKENS, longest) if isinstance(longest, int) else ROW_TOKENS
    dtype = keys.get("dtype") or keys.get("torch_dtype")
    data = {"source": "memmap", "path": "unread", "sequence_length": length}
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(str(dtype), "fp32")
    return {"model": hf_import.model_section(folder), "precision": precision, "data": data}


def _show(lines: Iterable[str], value: dict[str, Any], json_file: str | None) -> None:
    if json_file == "-":
        print(json.dumps(value), flush=True)
        return
    if json_file is not None:
        write_asked("--json", Path(json_file), json.dumps(value, indent=1) + "\n")
    for line in lines:
        print(line)
