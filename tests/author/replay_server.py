"""A local OpenAI-compatible endpoint that gives scripted answers, one a request.

with replay(Says("..."), Fails(500), Says("...")) as server:
    server.url, server.requests
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Says:
    """An answer. One that ``drips`` arrives byte by byte and never ends."""

    text: str | None
    finish: str = "stop"
    usage: bool = True
    drips: bool = False

    def send(self, handler: Handler) -> None:
        message = {"role": "assistant", "content": self.text}
        choice = {"index": 0, "finish_reason": self.finish, "message": message}
        data = {"id": "x", "object": "chat.completion", "created": 1, "model": "replayed"}
        data["choices"] = [choice]
        if self.usage:
            data["usage"] = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        if not self.drips:
            handler.reply(200, data)
            return
        handler.head(200, 10**6)
        while not handler.server.closing.wait(0.05):
            handler.wfile.write(b" ")
            handler.wfile.flush()


@dataclass(frozen=True)
class Fails:
    """An error of the endpoint."""

    status: int
    message: str = "scripted"
    retry_after: str = ""

    def send(self, handler: Handler) -> None:
        headers = {"retry-after": self.retry_after} if self.retry_after else {}
        handler.reply(self.status, {"error": {"message": self.message}}, headers)


@dataclass(frozen=True)
class Hangs:
    """No answer at all, until the server ends."""

    def send(self, handler: Handler) -> None:
        handler.server.closing.wait()
        handler.close_connection = True


@dataclass(frozen=True)
class Garbles:
    """Something that is no chat completion."""

    body: bytes = b'{"choices": []}'

    def send(self, handler: Handler) -> None:
        handler.head(200, len(self.body))
        handler.wfile.write(self.body)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        request = {"path": self.path, "key": self.headers["authorization"]}
        self.server.requests.append(request | json.loads(self.rfile.read(length)))
        with self.server.lock:
            step = self.server.script.pop(0) if self.server.script else Fails(400, "script is over")
        try:
            step.send(self)
        except OSError:  # the client hung up
            self.close_connection = True

    def head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, status: int, data: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(data).encode()
        self.head(status, len(body), headers)
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Tests say what is wrong."""


Step = Says | Fails | Hangs | Garbles


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, script: list[Step]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.lock, self.closing = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def replay(*script: Step) -> Iterator[Server]:
    server = Server(list(script))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
