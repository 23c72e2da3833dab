"""A small server that speaks as much of the hub's API as fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name: file → contents. What was fetched stands in `fetched`."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    fetched: list[str] = field(default_factory=list)
    fetched_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that were asked for by range, by file."""
    tokens: list[str | None] = field(default_factory=list)
    busy: int = 0
    """How many requests are answered by 503 from now on."""
    before_body: Callable[[str], None] | None = None
    """Called with the name of a file before its contents are sent."""

    def refusal(self, name: str, revision: str) -> tuple[int, bytes, dict[str, str]] | None:
        """What the hub answers about a repository or revision that it does not have, or does not give."""
        if name not in self.repositories:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if name in self.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        if revision not in ("main", COMMIT):
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        return None

    def __enter__(self) -> Hub:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer(with_body=False)

            def do_GET(self) -> None:
                self.answer(with_body=True)

            def answer(self, *, with_body: bool) -> None:
                path = self.path.partition("?")[0]
                if hub.busy > 0:
                    hub.busy -= 1
                    return self.send(503, b"", {}, with_body)
                if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                    if (refusal := hub.refusal(found[1], found[3])) is not None:
                        return self.send(*refusal, with_body)
                    files = hub.repositories[found[1]]
                    listing = [{"type": "file", "path": name, "size": len(data), "oid": _hash(data)} for name, data in files.items()]
                    siblings = [
                        {"rfilename": name, "size": len(data), "blobId": _hash(data)} | _lfs(name, data) for name, data in files.items()
                    ]
                    body = listing if found[2] == "tree" else {"id": found[1], "sha": COMMIT, "siblings": siblings}
                    return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)
                found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                name, revision, file = found.groups() if found is not None else ("", "", "")
                if (refusal := hub.refusal(name, revision)) is not None:
                    return self.send(*refusal, with_body)
                data = hub.repositories[name].get(file)
                if data is None:
                    return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, with_body)
                if with_body:
                    if hub.before_body is not None:
                        hub.before_body(file)
                    hub.fetched.append(file)
                    hub.tokens.append(self.headers.get("Authorization"))
                facts = {"ETag": f'"{_etag(file, data)}"', "X-Repo-Commit": COMMIT}
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if asked is None:
                    return self.send(200, data, facts, with_body)
                part = data[int(asked[1]) : int(asked[2]) + 1]
                hub.fetched_bytes[file] = hub.fetched_bytes.get(file, 0) + len(part)
                facts["Content-Range"] = f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}"
                return self.send(206, part, facts, with_body)

            def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
                self.send_response(status)
                for key, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", ".distcp"))


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if _is_large(name) else _hash(data)


def _lfs(name: str, data: bytes) -> dict[str, object]:
    """What the hub tells of files that it keeps apart, as large ones."""
    return {"lfs": {"sha256": _etag(name, data), "size": len(data), "pointerSize": 134}} if _is_large(name) else {}
