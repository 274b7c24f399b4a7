"""Only who has the token, by a name of the server's own, gets anything of a run."""

from __future__ import annotations

import pytest

from picotron_ray.runtime.dashboard import access
from picotron_ray.runtime.dashboard.access import Access, new_token

OWN = {"host": "127.0.0.1:8270", "authorization": "Bearer secret"}


def refusal(method: str = "GET", path: str = "/api/run", **headers: str) -> int | None:
    found = Access("secret").refusal(method, path, {**OWN, **headers})
    return None if found is None else found[0]


def test_the_token_opens_and_nothing_else_does() -> None:
    assert refusal() is None
    assert refusal(authorization="bearer secret") is None
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "Bearer secre",
        "Bearer secrets",
        "Basic secret",
        "secret",
        "Bearer sécret",
    ):
        assert refusal(authorization=wrong) == 401, wrong
    assert Access("secret").refusal("GET", "/api/run", {"host": "localhost"}) is not None


def test_the_page_itself_holds_nothing_and_is_given_to_anybody() -> None:
    assert refusal(path="/", authorization="") is None
    assert refusal(path="/static/main.js", authorization="") is None
    assert refusal("POST", "/", authorization="") == 405
    assert refusal("PUT") == 405


@pytest.mark.parametrize("path", ["/api/run", "/api/stream", "/api/ranks", "/api/logs", "/api/press"])
def test_every_question_wants_the_token(path: str) -> None:
    assert refusal(path=path, authorization="") == 401


def test_a_name_that_was_made_to_resolve_here_is_refused() -> None:
    for host in ("evil.example:8270", "", "127.0.0.1.evil.example", "[::2]:8270"):
        assert refusal(host=host) == 421, host
        assert refusal(path="/", host=host) == 421, host
    for host in ("localhost:9000", "LOCALHOST", "[::1]:8270", "127.0.0.1"):
        assert refusal(host=host) is None, host
    assert Access("secret", frozenset({"box"})).refusal("GET", "/api/run", {**OWN, "host": "box:1"}) is None


def test_another_origin_is_refused() -> None:
    assert refusal("POST", "/api/press", origin="http://127.0.0.1:8270") is None
    for origin in ("http://evil.example", "http://127.0.0.1:8271", "null"):
        assert refusal("POST", "/api/press", origin=origin) == 403, origin


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    def compared(one: bytes, two: bytes) -> bool:
        seen.append((one, two))
        return one == two

    monkeypatch.setattr(access.hmac, "compare_digest", compared)
    assert refusal(authorization="Bearer x") == 401
    assert seen == [(b"x", b"secret")]


def test_tokens_are_long_new_and_not_shown() -> None:
    one, two = new_token(), new_token()
    assert one != two
    assert len(one) >= 43
    assert one not in repr(Access(one))


def test_no_script_but_the_servers_own_may_run() -> None:
    policy = access.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
