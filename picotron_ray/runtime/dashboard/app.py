"""Web server of the page: its files, the pushed sections, questions for rows and lines, and the buttons.

Starlette, not FastAPI: nothing of what comes in needs a model, and it is two small packages on the event loop
that uvicorn runs. Sections are pushed as server-sent events over one response, which the page reads by
``fetch`` so that the token goes in a header.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from picotron_ray.errors import ConfigError, PicotronError
from picotron_ray.runtime.dashboard import log_tail
from picotron_ray.runtime.dashboard.access import BODY_BYTES, HEADERS, Access
from picotron_ray.runtime.dashboard.sections import rank_rows
from picotron_ray.runtime.dashboard.watch import Watch

POLL_S = 0.25
ALIVE_S = 15.0
"""A silent stream says each so often that it is there."""
MOST_STREAMS = 16
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
Message = MutableMapping[str, Any]


def read_static() -> dict[str, tuple[bytes, str]]:
    """Bytes and type of the page's files, by name; nothing but what the package has is ever served."""
    folder = files("picotron_ray.runtime.dashboard") / "static"
    found = {}
    for path in folder.iterdir():
        suffix = "." + path.name.rpartition(".")[2]
        if suffix in TYPES:
            found[path.name] = path.read_bytes(), TYPES[suffix]
    return found


class Guard:
    """ASGI layer that refuses what `Access` does, and gives every answer its headers."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(
        self, scope: Message, receive: Callable[..., Awaitable[Any]], send: Callable[..., Awaitable[None]]
    ) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        refused = self._access.refusal(scope["method"], scope["path"], headers)
        if refused is not None:
            status, why = refused
            await JSONResponse({"error": why}, status)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class PageServer:
    """Routes of one run's page."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._static = read_static()
        self._streams = 0
        self.closing = False

    def app(self, access: Access) -> Guard:
        """The application, guarded."""
        routes = [
            Route("/", self._file, methods=["GET"]),
            Route("/static/{name}", self._file, methods=["GET"]),
            Route("/favicon.ico", self._file, methods=["GET"]),
            Route("/api/run", self._run, methods=["GET"]),
            Route("/api/stream", self._stream, methods=["GET"]),
            Route("/api/ranks", self._ranks, methods=["GET"]),
            Route("/api/logs", self._logs, methods=["GET"]),
            Route("/api/press", self._press, methods=["POST"]),
        ]
        errors = {PicotronError: _refused}
        return Guard(Starlette(routes=routes, exception_handlers=errors), access)

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name") or ("index.html" if request.url.path == "/" else "favicon.svg")
        found = self._static.get(name)
        if found is None:
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response(found[0], media_type=found[1])

    async def _run(self, request: Request) -> Response:
        found = {name: json.loads(data) for _, name, data in self._watch.board.since(0)}
        return JSONResponse(found)

    async def _stream(self, request: Request) -> Response:
        if self._streams >= MOST_STREAMS:
            return JSONResponse({"error": f"{MOST_STREAMS} pages look at this run already"}, 503)
        return StreamingResponse(self._events(request), media_type="text/event-stream")

    async def _events(self, request: Request) -> AsyncIterator[bytes]:
        """Each section as it changes; the first ones at once."""
        self._streams += 1
        try:
            version, silent_s = 0, 0.0
            while not self.closing and not await request.is_disconnected():
                news = self._watch.board.since(version)
                for at, name, data in news:
                    version = max(version, at)
                    yield b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
                silent_s = 0.0 if news else silent_s + POLL_S
                if silent_s >= ALIVE_S:
                    silent_s = 0.0
                    yield b": here\n\n"
                await asyncio.sleep(POLL_S)
        finally:
            self._streams -= 1

    async def _ranks(self, request: Request) -> Response:
        words = request.query_params
        first, count = (
            _number(words.get(name, ""), default) for name, default in (("from", 0), ("count", 64))
        )
        if self._watch.facts is None:
            return JSONResponse({"rows": [], "ranks": 0})
        return JSONResponse(rank_rows(self._watch.facts, first, count, words.get("node", "")[:64]))

    async def _logs(self, request: Request) -> Response:
        words = {name: value[:200] for name, value in request.query_params.items()}
        return JSONResponse(await run_in_threadpool(log_tail.asked, self._watch.word, words))

    async def _press(self, request: Request) -> Response:
        words = await _body(request)
        name = words.pop("button", "")
        said = await run_in_threadpool(self._watch.press, name, words)
        return JSONResponse({"said": said})


async def _body(request: Request) -> dict[str, str]:
    """The request's words; ConfigError where they are none."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            raise ConfigError(f"body: expected at most {BODY_BYTES} bytes")
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError("body: expected a JSON object of words")
    return found


def _number(word: str, default: int) -> int:
    return int(word) if word.isdecimal() and len(word) < 10 else default


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error).splitlines()[0]}, 400)
