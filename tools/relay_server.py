"""Let anyone answer in place of a model: an OpenAI-compatible server that asks through files.

    python tools/relay_server.py FOLDER --port 8123
    OPENAI_BASE_URL=http://127.0.0.1:8123/v1 codetta author TASK --model NAME

Each request becomes FOLDER/NNN.prompt.md; whoever writes FOLDER/NNN.answer.md (a person, or an
assistant without an endpoint) has answered it, and the rounds are recorded as those of any model.
An answer counts once the file has not changed for a second. If the client hangs up, its question
waits: the same question asked again gets the same number, and the answer if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_POLL_S = 0.25


class Desk:
    """The questions of a folder."""

    def __init__(self, folder: Path, settle_s: float = 1.0) -> None:
        self.folder, self.settle_s = folder, settle_s
        self.lock = threading.Lock()
        self.unanswered: dict[str, list[int]] = {}  # hash of a question whose client hung up
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [p.name.partition(".")[0] for p in folder.glob("*.prompt.md")]
        self.last = max((int(n) for n in numbers if n.isdecimal()), default=0)

    def ask(self, model: str, messages: list[dict[str, Any]]) -> int:
        """Write a question down; its number."""
        text = page(model, messages)
        key = hashlib.sha256(text.encode()).hexdigest()
        with self.lock:
            if waiting := self.unanswered.get(key):
                return waiting.pop()
            self.last += 1
            number = self.last
            draft = self.folder / f".{number:03}.prompt.new"
            draft.write_text(text, encoding="utf-8")
            draft.rename(self.folder / f"{number:03}.prompt.md")
        return number

    def give_up(self, number: int, model: str, messages: list[dict[str, Any]]) -> None:
        key = hashlib.sha256(page(model, messages).encode()).hexdigest()
        with self.lock:
            self.unanswered.setdefault(key, []).append(number)

    def answer(self, number: int) -> str | None:
        """What was written, once nobody writes any more."""
        file = self.folder / f"{number:03}.answer.md"
        try:
            quiet = time.time() - file.stat().st_mtime >= self.settle_s
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        return text if quiet and text.strip() else None


def page(model: str, messages: list[dict[str, Any]]) -> str:
    """A conversation as Markdown."""
    parts = [f"<!-- for {model} -->"]
    parts += [f"<!-- {m.get('role', '')} -->\n\n{_content(m)}" for m in messages]
    return "\n\n".join(parts) + "\n"


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(p.get("text", "")) for p in content if isinstance(p, dict))


class Handler(BaseHTTPRequestHandler):
    server: Relay
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            self.reply(200, {"object": "list", "data": []})
        else:
            self.reply(404, {"error": {"message": f"there is no {self.path}"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path.rstrip("/") != "/v1/chat/completions":
            self.reply(404, {"error": {"message": f"there is no {self.path}"}})
            return
        try:
            request = json.loads(body)
            model, messages = str(request["model"]), list(request["messages"])
            number = self.server.desk.ask(model, messages)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.reply(400, {"error": {"message": f"not a chat request: {error!r}"}})
            return
        print(f"{number:03} asked", flush=True)
        text = self.wait(number)
        if text is None or not self.reply(200, _completion(number, model, text)):
            self.server.desk.give_up(number, model, messages)
            print(f"{number:03} nobody waits for it any more", flush=True)
            return
        print(f"{number:03} answered", flush=True)

    def wait(self, number: int) -> str | None:
        """The answer, or None if the client hung up."""
        while (text := self.server.desk.answer(number)) is None:
            if self.server.closing or self.hung_up():
                self.close_connection = True
                return None
            time.sleep(_POLL_S)
        return text

    def hung_up(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def reply(self, status: int, data: dict[str, Any]) -> bool:
        body = json.dumps(data).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """One line a question is enough."""


class Relay(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, desk: Desk, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.desk, self.closing = desk, False

    def stop(self) -> None:
        self.closing = True
        self.shutdown()
        self.server_close()


def _completion(number: int, model: str, text: str) -> dict[str, Any]:
    return {
        "id": f"relay-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where questions and answers lie")
    parser.add_argument("--port", type=int, default=8123)
    given = parser.parse_args()
    relay = Relay(Desk(given.folder), given.port)
    print(f"OPENAI_BASE_URL=http://127.0.0.1:{relay.server_port}/v1  {given.folder}", flush=True)
    try:
        relay.serve_forever()
    except KeyboardInterrupt:
        relay.closing = True


if __name__ == "__main__":
    main()
