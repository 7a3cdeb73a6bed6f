"""Serves the page of a run while it goes on, on the loopback interface only. The server reads the run's folder, so it
costs the ranks nothing but the processor time that it takes from them, and it runs at the lowest priority.

    GET /TOKEN/         the page, whose script asks for the body every few seconds
    GET /TOKEN/body     the body of the page as it is now

Other users of this machine cannot connect, and other programs of this user cannot read the page without the token, a
random part of the address. A page of another site that a browser is tricked into sending here (DNS rebinding) has
another name in its Host header, and is refused.
"""

import secrets
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock

from meshwright.cluster.cores import usable_cores
from meshwright.errors import InputError, MeshwrightError
from meshwright.report.own_user_server import OwnUserServer
from meshwright.report.page import Page, render_body, render_with_script
from meshwright.report.run.page import run_page

LOOPBACK = "127.0.0.1"
_SHORTEST_AGE_S = 1.5  # a body younger than this is sent again
_BUSY_SHARE = 0.004  # of the time of all cores may be spent making bodies
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class RunServer(OwnUserServer):
    """An HTTP server for one run. `url` is the address to open."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(18)
        self._folder = folder
        self._lock = Lock()
        self._body = ""
        self._made_at = 0.0
        self._valid_s = 0.0
        run_page(folder, live=True)  # raises an error if it is no run folder
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise InputError(f"--port {port}: this port cannot be used: {error.strerror}") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    @property
    def host_names(self) -> tuple[str, str]:
        return f"{LOOPBACK}:{self.port}", f"localhost:{self.port}"

    def page(self) -> str:
        return render_with_script(self._page(), "live.js")

    def body(self) -> str:
        """Returns the body of the page, made now or a short time ago."""
        with self._lock:
            if not self._body or time.monotonic() - self._made_at > self._valid_s:
                began = time.thread_time()
                self._body = render_body(self._page())
                self._made_at = time.monotonic()
                self._valid_s = max(_SHORTEST_AGE_S, (time.thread_time() - began) / (_BUSY_SHARE * usable_cores()))
            return self._body

    def _page(self) -> Page:
        try:
            return run_page(self._folder, live=True)
        except MeshwrightError as error:  # the folder was deleted
            return Page(f"Run {self._folder.name}", str(error), [], "cannot be read")


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    server_version = "meshwright"
    sys_version = ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.host_names:
            self._answer(421, "This server answers only under its own address on this machine.")
            return
        path = self.path.partition("?")[0]
        if path == f"/{self.server.token}/":
            self._answer(200, self.server.page(), "text/html")
        elif path == f"/{self.server.token}/body":
            self._answer(200, self.server.body())
        else:
            self._answer(404, "There is nothing here: open the whole address that `meshwright watch` has printed.")

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: a line for each request would hide the address."""
