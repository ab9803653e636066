"""A hub on loopback: enough of the Hugging Face hub's HTTP protocol for the real `snapshot_download`.

GET  /api/models/{repo}/revision/{revision}     {"sha", "id", "siblings"}
GET  /api/models/{repo}/tree/{sha}[/{folder}]   [{"type": "file", "path", "size", "oid"}]
HEAD, GET /{repo}/resolve/{sha}/{file}          X-Repo-Commit, ETag, Content-Length, the bytes
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = Mapping[str, bytes]


class Hub:
    """`repos` maps "org/name" to {revision: files}; `delay_s` slows every answer; `status` is that of every answer;
    `sizes` are what it lists of files with these names."""

    def __init__(self, repos: Mapping[str, Mapping[str, Files]]) -> None:
        self.repos = repos
        self.delay_s = 0.0
        self.status: int | None = None
        self.error_code: str | None = None
        self.requests: list[str] = []
        self.sizes: dict[str, int] = {}
        self.etag: str | None = None
        """Of every file, in place of its own."""
        self.list_headers: dict[str, str] = {}
        self.list_body: bytes | None = None
        """Of every list of files, in place of it."""
        self.headers: dict[str, str] = {}
        """Of every answer with `status`."""
        self.list_delay_s = 0.0
        self.list_redirect = ""
        """Where every request for a list is sent."""
        self.file_status = 200
        self.file_body: bytes | None = None
        """What is sent of every file, in place of its own bytes, in chunks."""
        self.file_headers: dict[str, str] = {}
        self.tokens: list[str | None] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def sha_of(files: Files) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.tokens.append(self.headers.get("Authorization"))
        time.sleep(self.hub.delay_s)
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}", {"X-Error-Code": self.hub.error_code or "", **self.hub.headers})
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/").split("/"))
        else:
            self._file(path.strip("/").split("/"))

    def _api(self, parts: list[str]) -> None:
        repo, verb, revision = "/".join(parts[:2]), *(parts[2:4] or ["revision", "main"])
        files = self._files(repo, revision)
        if files is None:
            return
        if verb == "tree":
            time.sleep(self.hub.list_delay_s)
            folder = "".join(f"{each}/" for each in parts[4:])
            listed = [
                {"type": "file", "path": name, "size": self.hub.sizes.get(name, len(data)), "oid": sha_of({name: data})}
                for name, data in files.items()
                if name.startswith(folder) and "/" not in name.removeprefix(folder)
            ]
            if self.hub.list_redirect:
                return self._send(302, b"", {"Location": self.hub.list_redirect})
            if not listed:
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            body = json.dumps(listed).encode() if self.hub.list_body is None else self.hub.list_body
            self._send(200, body, self.hub.list_headers)
        else:
            info = {
                "id": repo,
                "modelId": repo,
                "sha": sha_of(files),
                "siblings": [{"rfilename": name} for name in files],
            }
            self._send(200, json.dumps({**info, "private": False, "tags": [], "downloads": 0, "likes": 0}).encode())

    def _file(self, parts: list[str]) -> None:
        repo, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        files = self._files(repo, revision)
        if files is None:
            return
        if name not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = self.hub.etag or f'"{sha_of({name: files[name]})}"'
        headers = {"X-Repo-Commit": sha_of(files), "ETag": etag, **self.hub.file_headers}
        if self.hub.file_body is None or self.command == "HEAD":
            return self._send(200, files[name], headers)
        self.send_response(self.hub.file_status)
        for each in headers.items():
            self.send_header(*each)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.hub.file_body), self.hub.file_body))

    def _files(self, repo: str, revision: str) -> Files | None:
        revisions = self.hub.repos.get(repo)
        if revisions is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        for name, files in revisions.items():
            if revision in (name, sha_of(files)):
                return files
        return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # a client that has had enough
                self.wfile.write(body)
