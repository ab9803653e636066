"""A collector's answer: bounded in bytes, as they come, and in seconds; redirects are not followed."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

requests = pytest.importorskip("requests")

from loraplex.server.telemetry import collector as collector_module  # noqa: E402
from loraplex.server.telemetry.collector import MAX_ANSWER_BYTES, CollectorSession  # noqa: E402


class Handler(BaseHTTPRequestHandler):
    """By path: `bomb`, `long`, `drip`, `elsewhere` or a short answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        what = self.path.strip("/")
        headers, body = {}, b"partial success"
        if what == "bomb":
            headers, body = {"content-encoding": "gzip"}, gzip.compress(bytes(100 << 20), 1)
        elif what == "long":
            body = b"x" * (50 * MAX_ANSWER_BYTES)
        elif what == "elsewhere":
            headers = {"location": "/long"}
        self.send_response(307 if what == "elsewhere" else 200)
        for name, value in {**headers, "content-length": str(len(body) + 100 * (what == "drip"))}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
            while what == "drip":
                self.wfile.write(b".")
                time.sleep(0.02)
        except OSError:
            return  # the client has gone

    def log_message(self, *arguments: object) -> None:
        """Not into the test's output."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("what", ["bomb", "long"])
def test_a_long_answer_is_cut_off_and_not_decompressed(url: str, what: str) -> None:
    with CollectorSession() as session:
        answer = session.post(f"{url}/{what}", data=b"spans", timeout=5)
    assert answer.status_code == 200
    assert len(answer.content) == MAX_ANSWER_BYTES


def test_a_short_answer_is_whole_and_the_session_goes_on(url: str) -> None:
    with CollectorSession() as session:
        answers = [session.post(f"{url}/short", data=b"spans", timeout=5) for _ in range(3)]
    assert {answer.text for answer in answers} == {"partial success"}


def test_an_answer_that_does_not_end_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "ANSWER_S", 0.2)
    with CollectorSession() as session, pytest.raises(requests.ConnectionError, match="did not end within"):
        session.post(f"{url}/drip", data=b"spans", timeout=5)


def test_redirects_are_not_followed(url: str) -> None:
    with CollectorSession() as session:
        assert session.post(f"{url}/elsewhere", data=b"spans", timeout=5).status_code == 307
