"""Check of the ports that a config names for metrics, before anything starts."""

from __future__ import annotations

import socket

from picotron_ray.config.schema.service import MetricsConfig
from picotron_ray.errors import ConfigError

LOOPBACK = "127.0.0.1"


def check_ports(metrics: MetricsConfig, local: bool) -> None:
    """Check that coordinator and agents will be able to listen, as far as this machine can tell.

    On a given cluster (not ``local``) only the coordinator will be on this machine. What an agent finds taken
    on another node becomes an event of the run.

    Raises:
        ConfigError: a port is taken, the host is not this machine's, or both ports are one on one machine.
    """
    if not metrics.enabled:
        return
    asked = {"coordinator_port": metrics.coordinator_port}
    if local:
        asked["port"] = metrics.port
        if metrics.port and metrics.port == metrics.coordinator_port:
            raise ConfigError(
                f"metrics.coordinator_port: saw {metrics.port}, which is metrics.port too, and here both are"
                " on one machine; choose another, or 0"
            )
    host = metrics.host or (LOOPBACK if local else "")
    if local and (why := port_taken(host, 0)):
        raise ConfigError(f"metrics.host: cannot listen at {host}: {why}; give an address of this machine")
    problems = [
        f"metrics.{key}: cannot listen at {host or 'any address'} port {port}: {why}; choose another, or 0"
        " for a free one"
        for key, port in asked.items()
        if port and (why := port_taken(host, port))
    ]
    if problems:
        raise ConfigError(*problems)


def port_taken(host: str, port: int) -> str:
    """Reason that nothing can listen there now; empty where something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # as the endpoint does
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
