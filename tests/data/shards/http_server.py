"""A real HTTP server that misbehaves when told to."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

SIZE = 40_000


def content(name: str) -> bytes:
    """What the server has under a name."""
    return np.random.default_rng(list(name.encode())).bytes(SIZE)


class Server(ThreadingHTTPServer):
    """``faults`` are what happens to the next requests, one each; requests are counted by name.

    What there is lies in ``root``, or is made up.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.root: Path | None = None
        self.requests: Counter[str] = Counter()
        self.wake = threading.Event()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        path = (self.server.root or Path()) / self.path.strip("/")
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
        self.end_headers()

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.server.requests[name] += 1
        if self.server.root is not None and not (self.server.root / name).is_file():
            self.send_error(404)
            return
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault.isdigit():
            self.send_error(int(fault))
            return
        if fault.startswith("redirect "):
            self.send_response(302)
            self.send_header("Location", fault.partition(" ")[2])
            self.end_headers()
            return
        if fault.startswith("raw "):
            self.wfile.write(fault[4:].encode("latin1"))
            self.close_connection = True
            return
        if "endless" in fault or "trickle" in fault:
            self._go_on(fault)
            return
        body = content(name) if self.server.root is None else (self.server.root / name).read_bytes()
        self.send_response(200)
        if fault == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body) // 2 if fault == "short" else len(body)))
        self.end_headers()
        if fault == "other":
            body = body[::-1]
        if fault in ("cut", "stall", "short"):
            self.wfile.write(body[: len(body) // 2])
            if fault == "stall":
                self.server.wake.wait(30)
            self.close_connection = True
            return
        self.wfile.write(body)

    def _go_on(self, fault: str) -> None:
        """Send headers or content until the client leaves."""
        self.close_connection = True
        self.wfile.write(b"HTTP/1.0 200 OK\r\n" if "headers" in fault else b"HTTP/1.0 200 OK\r\n\r\n")
        piece = b"X: y\r\n" if "headers" in fault else b" "
        try:
            while not self.server.wake.wait(0.1 if "trickle" in fault else 0):
                self.wfile.write(piece if "trickle" in fault else piece * 10_000)
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""
