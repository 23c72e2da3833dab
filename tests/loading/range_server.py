"""A web server of files that answers ranges, and misbehaves when it is told to."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    """What is about to be sent; a fault changes it."""

    path: str
    start: int
    number: int
    """Of the request, from 0 on, over all files."""
    times: int
    """How often this range has been asked for, this time included."""
    status: int
    body: bytes
    headers: dict[str, str]
    cut: int | None = None
    """Bytes of the body after which the connection is closed."""
    pause_seconds: float = 0.0
    """Before every 1000 bytes of the body."""


@dataclass
class RangeServer:
    """Serves `files` (path → bytes). `fault` may change every answer; all requests stand in `requests` as (path, start, end)."""

    files: dict[str, bytes]
    fault: Callable[[Answer], None] = lambda answer: None
    requests: list[tuple[str, int, int | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    """Of all requests of files."""

    def __enter__(self) -> RangeServer:
        serving = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0].lstrip("/")
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                start, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, None)
                with lock:
                    number = len(serving.requests)
                    serving.requests.append((path, start, end))
                    if not path.startswith("api/"):  # the hub's client has questions of its own
                        serving.tokens.append(self.headers.get("Authorization"))
                    times = serving.requests.count((path, start, end))
                data = serving.files.get(path)
                if data is None:
                    answer = Answer(path, start, number, times, 404, b"", {})
                else:
                    part = data[start:end]
                    answer = Answer(
                        path, start, number, times, 206 if asked else 200, part, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
                    )
                    if asked:
                        answer.headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
                serving.fault(answer)
                body = answer.body
                self.send_response(answer.status)
                for key, value in ({"Content-Length": str(len(body))} | answer.headers).items():
                    if value:
                        self.send_header(key, value)
                self.end_headers()
                if answer.cut is not None:
                    body = body[: answer.cut]
                    self.close_connection = True
                try:
                    if answer.pause_seconds:
                        for position in range(0, len(body), 1000):
                            time.sleep(answer.pause_seconds)
                            self.wfile.write(body[position : position + 1000])
                    else:
                        self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients that went away
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
