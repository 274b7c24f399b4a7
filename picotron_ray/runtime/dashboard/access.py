"""Who may ask the page's server: whoever has the token, through a name that is the server's own.

The page itself (its HTML, script and style) holds nothing of a run and is given to anybody. All else wants
``Authorization: Bearer TOKEN``. The page takes the token from the fragment of its address, which no browser
sends to a server, so that it is in no log, and keeps it for its tab. There is no cookie, so no other site can
make a browser use it. A Host that is not ours is refused too: a foreign name that resolves to this machine
(DNS rebinding) would make a foreign page one of the same origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

LOOPBACK = ("127.0.0.1", "localhost", "::1")
BODY_BYTES = 4096
"""Most bytes of a request's body."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""


def new_token() -> str:
    """Make a token of 256 bits."""
    return secrets.token_urlsafe(32)


def hostname(host: str) -> str:
    """Name or address of a Host header, without its port.

    >>> hostname("localhost:8270"), hostname("[::1]:8270"), hostname("::1")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower()


def is_loopback(host: str) -> bool:
    """Whether a name or address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Access:
    """Rules of one server.

    Fields:
        hosts: names by which it may be asked, beside those of loopback.
    """

    token: str = field(repr=False)
    hosts: frozenset[str] = frozenset()

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None: it is not.

        Args:
            headers: by name in lower case.
        """
        host = headers.get("host", "")
        if hostname(host) not in self.hosts and hostname(host) not in LOOPBACK:
            return 421, "this server is not asked by that name; see --allow-host"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return 403, "a page of another origin may not ask this server"
        if method not in ("GET", "HEAD", "POST"):
            return 405, "only GET and POST are served"
        if not path.startswith("/api/"):
            return None if method != "POST" else (405, "only /api/ takes POST")
        if not self.knows(headers.get("authorization", "")):
            return (
                401,
                "the token is missing or wrong; open the address that `picotron-ray dashboard` printed",
            )
        return None

    def knows(self, authorization: str) -> bool:
        """Whether an Authorization header carries the token; takes the same time whatever it has."""
        kind, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self.token.encode())
        return same and kind.lower() == "bearer"
