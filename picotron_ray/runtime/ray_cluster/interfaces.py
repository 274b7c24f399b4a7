"""Network interface that carries a run: what its services listen at, on every node.

Without ``cluster.interface`` that is the interface of the address that Ray uses for the node. Addresses come
from an ioctl (IPv4) and from ``/proc/net/if_inet6``, both Linux's own.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_GLOBAL = "00"  # scope in /proc/net/if_inet6


def addresses() -> dict[str, list[str]]:
    """Addresses of every interface of this node, IPv4 first; link-local ones are left out."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, own in found.items():
            request = struct.pack("256s", os.fsencode(name)[:15])
            try:
                own.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
            except OSError:  # it has none
                continue
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, _, name = line.split()
        if scope == _GLOBAL or name == "lo":
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def listen_address(job: JobConfig, node_host: str) -> str:
    """Address at which this node's services of the run listen, and by which others reach them.

    Args:
        node_host: address of this node in Ray.

    Raises:
        ConfigError: the node has no such interface, or it has no address.
    """
    wanted = job.cluster.interface
    if wanted is None:
        return node_host
    if why := interface_problem(wanted, node_host):
        raise ConfigError(why)
    return addresses()[wanted][0]


def interface_problem(wanted: str | None, node: str) -> str:
    """Explain why a run cannot listen at an interface of this node; empty where it can, or for None."""
    found = addresses()
    if wanted is None or found.get(wanted):
        return ""
    there = ", ".join(name for name, own in found.items() if own)
    return (
        f"cluster.interface: saw {wanted!r}, and node {node} has addresses at {there}; name an interface that"
        " every node has"
    )


def listen_address_or_problem(job: JobConfig, node_host: str) -> tuple[str, str]:
    """`listen_address` and "", or the loopback, where nobody else reaches it, and what is wrong."""
    try:
        return listen_address(job, node_host), ""
    except ConfigError as error:
        return "127.0.0.1", str(error)


def carry_collectives(job: JobConfig, node_host: str, environment: MutableMapping[str, str]) -> None:
    """Have gloo, and NCCL where an interface is named, listen at the run's interface alone.

    What the user's environment says holds where the config names none.
    """
    wanted = job.cluster.interface
    if wanted is not None:
        environment[GLOO] = environment[NCCL] = wanted
        return
    carrier = next((name for name, own in addresses().items() if node_host in own), None)
    if carrier is not None:
        environment.setdefault(GLOO, carrier)
