"""Hardware that a plan is made for: a name of `DATA_SHEETS`, as nodes of so many devices."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from picotron_ray.errors import ConfigError
from picotron_ray.planner.datasheet import DATA_SHEETS, RESERVED, DataSheet, device_profile
from picotron_ray.planner.device_profile import DeviceProfile
from picotron_ray.planner.software_profile import OURS

NAMES = ("a100-80g", "h100-80g", "h200-141g", "b200-180g")
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
    """

    name: str
    profile: DeviceProfile
    peak_flops: float
    device_bytes: float
    node_size: int
    origin: str

    def node_sizes(self, devices: int) -> tuple[int, ...]:
        """Devices on each node where there are so many in all.

        >>> hardware("h100-80g").node_sizes(20)
        (8, 8, 4)
        """
        whole, rest = divmod(devices, self.node_size)
        return (self.node_size,) * whole + ((rest,) if rest else ())


def hardware(name: str) -> Hardware:
    """The hardware of a name.

    Raises ConfigError for a name that is not known, in a line with those that are.
    """
    if name not in NAMES:
        close = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError(f"--hardware: saw {name}, expected one of {', '.join(NAMES)}{hint}")
    return of_sheet(name, DATA_SHEETS[name])


def of_sheet(name: str, sheet: DataSheet, node_size: int = NODE) -> Hardware:
    """Hardware by its data sheet, with the rates that large runs reach on it."""
    profile = device_profile(sheet, software=OURS)
    room = (1 - RESERVED) * sheet.memory_bytes
    origin = "data sheet, and shares of it that published runs reach"
    return Hardware(
        name, replace(profile, memory_bytes=room), sheet.flops, sheet.memory_bytes, node_size, origin
    )
