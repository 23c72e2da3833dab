"""A small server that speaks as much of the hub's API as fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories by name: file → contents. What was fetched stands in `fetched`."""

    repositories: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    fetched: list[str] = field(default_factory=list)

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
                if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
                    files = hub.repositories[found[1]]
                    listing = [{"type": "file", "path": name, "size": len(data), "oid": _hash(data)} for name, data in files.items()]
                    siblings = [{"rfilename": name} for name in files]
                    body = listing if found[2] == "tree" else {"id": found[1], "sha": COMMIT, "siblings": siblings}
                    return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, with_body)
                found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                if found is None or found[1] not in hub.repositories:
                    return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
                name, revision, file = found.groups()
                if name in hub.gated:
                    return self.send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
                if revision not in ("main", COMMIT):
                    return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, with_body)
                data = hub.repositories[name].get(file)
                if data is None:
                    return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, with_body)
                if with_body:
                    hub.fetched.append(file)
                return self.send(200, data, {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": COMMIT}, with_body)

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
