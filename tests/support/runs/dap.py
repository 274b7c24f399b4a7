"""An IDE, as far as tests need one: a client of the debug adapter protocol."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections import defaultdict
from contextlib import suppress
from typing import Any

ANSWER_S = 60.0


class Ide:
    """An IDE that is connected to an adapter's port."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._sent = 0
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = defaultdict(queue.Queue)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._socket, self._socket.makefile("rb") as file:
            self._take(file)
        self._events.put({"event": "closed"})

    def _take(self, file: Any) -> None:
        while line := file.readline():
            size = int(line.split(b":")[1])
            file.readline()
            message = json.loads(file.read(size))
            if message["type"] == "response":
                self._answers[message["request_seq"]].put(message)
            elif message["type"] == "event":
                self._events.put(message)

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; returns its number."""
        self._sent += 1
        body = json.dumps({"seq": self._sent, "type": "request", "command": command, "arguments": arguments})
        self._socket.sendall(f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return self._sent

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request; fails where it is a refusal."""
        found = self._answers[number].get(timeout=ANSWER_S)
        assert found["success"], found
        return found.get("body", {})

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; returns its answer."""
        return self.answer(self.send(command, **arguments))

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event."""
        while True:
            found = self._events.get(timeout=ANSWER_S)
            if found["event"] == name:
                return found

    def attach(self) -> None:
        """Attach to what is debugged."""
        self.ask("initialize", clientID="test", adapterID="debugpy", pathFormat="path")
        # What "connect" says is for the IDE itself, which is connected by then.
        number = self.send("attach", connect={"host": "127.0.0.1", "port": 1}, justMyCode=False)
        self.event("initialized")
        self.ask("configurationDone")
        self.answer(number)

    def stop_at(self, file: str, line: int) -> tuple[int, int]:
        """Stop at a line; returns thread and frame."""
        self.ask("setBreakpoints", source={"path": file}, breakpoints=[{"line": line}])
        thread = self.event("stopped")["body"]["threadId"]
        return thread, self.ask("stackTrace", threadId=thread)["stackFrames"][0]["id"]

    def value(self, text: str, frame: int) -> str:
        """Value of an expression in a frame."""
        return str(self.ask("evaluate", expression=text, frameId=frame)["result"])

    def leave(self) -> None:
        """Detach, and close."""
        self.ask("disconnect", terminateDebuggee=False)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(ANSWER_S)

    def go_on(self, file: str, thread: int) -> None:
        """Take the breakpoints of a file away, and go on."""
        self.ask("setBreakpoints", source={"path": file}, breakpoints=[])
        self.ask("continue", threadId=thread)
