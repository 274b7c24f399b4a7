"""Hardware that a plan is made for: a name of `DATA_SHEETS` or a probe's file, as nodes of devices."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from picotron_ray.errors import ConfigError
from picotron_ray.planner.datasheet import DATA_SHEETS, REACHED, RESERVED, DataSheet, device_profile
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.hardware_profile import HardwareProfile, load_profile
from picotron_ray.planner.routes import Link
from picotron_ray.planner.software_profile import OURS
from picotron_ray.planner.words import counted

NAMES = ("a100-40g", "a100-80g", "h100-80g", "h200-141g", "b200-180g")
"""Names that a user may give; other data sheets belong to published runs."""
NODE = 8


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices to plan for.

    Fields:
        name: of the data sheet, or of the file that a probe wrote.
        profile: one device, with this engine's habits.
        peak_flops: dense bf16 operations per second by the data sheet, to which MFU relates.
        device_bytes: memory of one device, all of it.
        node_size: devices per node.
        origin: where the figures are from.
        device: ``"cuda"`` or ``"cpu"``.
        cores: of a node whose workers are CPU cores; 0: devices are their own.
        nodes: whose cores there are; workers are spread evenly over them.
        reached: least and most of the rates that clusters were seen to reach; ones where they were measured.
        link: what joins the devices of a node.
    """

    name: str
    profile: DeviceProfile
    peak_flops: float
    device_bytes: float
    node_size: int
    origin: str
    device: str = "cuda"
    cores: int = 0
    nodes: int = 1
    reached: tuple[float, float] = (1.0, 1.0)
    link: Link = "nvlink"

    def said(self, count: int) -> str:
        """So many of these devices in words.

        >>> hardware("h100-80g").said(16)
        '16 h100-80g'
        """
        return said_devices(count, self.name, "GPU" if self.device == "cuda" else "CPU worker")

    def of_devices(self, devices: int) -> Hardware:
        """The hardware where so many workers run: on CPUs they share the machines' cores and memory.

        A worker more than there are cores slows all of them down; rates were measured with as many workers as
        a node had.
        """
        if not self.cores:
            return self
        here = -(-devices // self.nodes)
        share = max(1.0, self.node_size / self.cores) * min(1.0, self.cores / here)
        held = self.node_size / here
        profile = replace(
            self.profile,
            flops=self.profile.flops * share,
            attention_flops=self.profile.attention_flops * share,
            attention_backward_flops=self.profile.attention_backward_flops * share,
            memory_bytes_s=self.profile.memory_bytes_s * min(1.0, held),
            kernel_s=self.profile.kernel_s / share,
            latency_s=self.profile.latency_s / share,
            crowd=max(1.0, here / self.cores),
            link_bytes_s=self.profile.link_bytes_s * min(1.0, held),
            memory_bytes=self.profile.memory_bytes * held,
        )
        return replace(
            self, profile=profile, node_size=here, device_bytes=self.device_bytes * held, cores=self.cores
        )

    def node_sizes(self, devices: int) -> tuple[int, ...]:
        """Devices on each node where there are so many in all.

        >>> hardware("h100-80g").node_sizes(20)
        (8, 8, 4)
        """
        whole, rest = divmod(devices, self.node_size)
        return (self.node_size,) * whole + ((rest,) if rest else ())


def said_devices(count: int, name: str, kind: str = "device") -> str:
    """So many devices of a data sheet or of a probe's file, in words.

    >>> said_devices(2, "here.json", "CPU worker")
    '2 CPU workers as in here.json'
    """
    return f"{counted(count, kind)} as in {name}" if name.endswith(".json") else f"{count} {name}"


def hardware(name: str, precision: str = "bf16") -> Hardware:
    """The hardware of a name, or of a probe's file.

    Args:
        precision: of the job, by whose products the rates of a probe are taken; ``auto``: bf16 on GPUs, fp32
            on CPUs.

    Raises ConfigError for a name that is not known, in a line with those that are, and for a broken file.
    """
    if name.endswith(".json"):
        return of_profile(name, load_profile(Path(name)), precision)
    if name not in NAMES:
        close = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"--hardware: saw {name}, expected one of {', '.join(NAMES)}, or a probe's .json{hint}"
        )
    return of_sheet(name, DATA_SHEETS[name])


def in_precision(found: Hardware, precision: str) -> Hardware:
    """The hardware with the rates of another precision, where a probe measured it so.

    Raises ConfigError for one that it did not measure.
    """
    if not found.name.endswith(".json"):
        return found
    rates = hardware(found.name, precision).profile
    profile = replace(
        found.profile,
        flops=rates.flops,
        matmul_half=rates.matmul_half,
        attention_flops=rates.attention_flops,
        attention_backward_flops=rates.attention_backward_flops,
    )
    return replace(found, profile=profile)


def of_profile(name: str, found: HardwareProfile, precision: str) -> Hardware:
    """Hardware as a probe measured it."""
    automatic = "bf16" if found.device == "cuda" else "fp32"
    dtype = {"auto": automatic, "tf32": "fp32", "fp8": "bf16"}.get(precision, precision)
    profile = found.device_profile(dtype)
    node = max(found.nodes, key=lambda one: one.workers)
    cpu = found.device == "cpu"
    room = found.memory_bytes if cpu else (1 - RESERVED) * found.memory_bytes
    return Hardware(
        name=name,
        profile=replace(profile, memory_bytes=room),
        peak_flops=found.peak_flops or profile.flops,
        device_bytes=found.memory_bytes,
        node_size=node.workers,
        origin=f"measured on {found.device_name}, {counted(len(found.nodes), 'node')}",
        device=found.device,
        cores=node.cores if cpu else 0,
        nodes=len(found.nodes) if cpu else 1,
        link=found.inside_link(),
    )


def of_sheet(name: str, sheet: DataSheet, node_size: int = NODE) -> Hardware:
    """Hardware by its data sheet, with the rates that large runs reach on it."""
    profile = device_profile(sheet, software=OURS)
    room = (1 - RESERVED) * sheet.memory_bytes
    origin = "data sheet, and shares of it that published runs reach"
    return Hardware(
        name,
        replace(profile, memory_bytes=room),
        sheet.flops,
        sheet.memory_bytes,
        node_size,
        origin,
        reached=REACHED,
    )
