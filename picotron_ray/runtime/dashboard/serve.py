"""Start of the page's server: its socket, its token, its address, its end."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from picotron_ray.errors import ConfigError, install_extra
from picotron_ray.runtime.dashboard.access import Access, hostname, is_loopback, new_token

NEEDED = ("starlette", "uvicorn")


def refuse_missing_extra() -> None:
    """Raise ConfigError where the packages of the extra are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"dashboard: needs {' and '.join(missing)}, which are not installed; {install_extra('dashboard')}"
        )


def bind(host: str, port: int) -> socket.socket:
    """Listen; ConfigError where the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(64)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"dashboard: cannot listen on {host}:{port}: {error.strerror}; name a free port with"
            " --port (0: any) or another --host"
        ) from None
    return found


@dataclass(slots=True)
class ServedPage:
    """A page's server that listens.

    Fields:
        token: which the page's address carries in its fragment.
    """

    host: str
    listener: socket.socket
    hosts: Sequence[str] = ()
    token: str = field(default_factory=new_token, repr=False)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """Address with the token in its fragment, which browsers send to nobody."""
        shown = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        shown = f"[{shown}]" if ":" in shown else shown
        return f"http://{shown}:{self.port}/#token={self.token}"

    def access(self) -> Access:
        """Its rules."""
        own = [] if is_loopback(self.host) else [self.host]
        return Access(self.token, frozenset(hostname(name) for name in [*own, *self.hosts]))


def warnings(host: str) -> list[str]:
    """Warn of an address that others reach."""
    if is_loopback(host):
        return []
    return [
        f"--host {host}: the page is served without TLS beyond this machine; whoever reads the traffic reads"
        " the token. Prefer the default and `ssh -L`"
    ]


def serve(word: str, page: ServedPage, ready: Callable[[], None]) -> None:
    """Serve a run's page until a signal ends it.

    Raises:
        ConfigError: there is no such run.
    """
    import uvicorn

    from picotron_ray.runtime.dashboard.app import PageServer
    from picotron_ray.runtime.dashboard.watch import Watch

    with contextlib.ExitStack() as undo:
        undo.callback(page.listener.close)
        watch = Watch(word)
        undo.pop_all()
    routes = PageServer(watch)
    config = uvicorn.Config(
        routes.app(page.access()),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        limit_concurrency=128,
        h11_max_incomplete_event_size=16 << 10,
    )
    server = uvicorn.Server(config)
    watch.start()
    ready()
    closer = threading.Thread(target=_tell_end, args=(server, routes), daemon=True)
    closer.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the server has ended by then
            server.run(sockets=[page.listener])
    finally:
        routes.closing = True
        watch.close()


def _tell_end(server: object, routes: object) -> None:
    """Let streams end once a signal came: the server waits for them."""
    import time

    while not getattr(server, "should_exit", True):
        time.sleep(0.2)
    routes.closing = True  # type: ignore[attr-defined]
