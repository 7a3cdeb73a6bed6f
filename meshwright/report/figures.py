"""Writes every chart of a page as PNG and SVG, for papers. A Chrome or Chromium that is installed draws them: it opens
the page from a server on the loopback interface, and its script sends each picture back."""

import base64
import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote

from meshwright.errors import InputError, MeshwrightError
from meshwright.files.storage import write_atomically
from meshwright.report.own_user_server import OwnUserServer
from meshwright.report.page import Page, render_with_script

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "microsoft-edge")
_LONGEST_WAIT_S = 180.0
_LARGEST_PICTURE_BYTES = 64 * 2**20


def find_browser() -> str:
    """Returns the path of a Chrome or Chromium. Raises an `InputError` if there is none."""
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise InputError(
        "--figures needs Chrome or Chromium, which draws the charts, and none is installed here: install one (Debian:"
        " apt-get install chromium), or use the camera button of a chart in the page"
    )


def write_figures(page: Page, folder: Path) -> list[Path]:
    """Writes NAME.png and NAME.svg for every chart of the page into the folder, and returns their paths."""
    if not page.charts:
        raise InputError("--figures: this page has no charts")
    browser = find_browser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--figures {folder}: this folder cannot be made: {error.strerror}") from None
    with _PictureServer(render_with_script(page, "figures.js")) as server, tempfile.TemporaryDirectory() as profile:
        Thread(target=server.serve_forever, daemon=True).start()
        process = _start(browser, server.url, Path(profile))
        try:
            finished = server.finished.wait(_LONGEST_WAIT_S)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
            server.shutdown()
    if not finished:
        raise MeshwrightError(f"--figures: {browser} did not draw the charts within {_LONGEST_WAIT_S:.0f} s")
    files = []
    for name, _ in page.charts:
        for suffix in ("png", "svg"):
            if (content := server.pictures.get(f"{name}.{suffix}")) is None:
                raise MeshwrightError(f"--figures: {browser} could not draw the chart {name} as {suffix}")
            files.append(folder / f"{name}.{suffix}")
            write_atomically(files[-1], content)
    return files


def _start(browser: str, url: str, profile: Path) -> "subprocess.Popen[bytes]":
    command = [
        browser,
        "--headless=new",
        f"--user-data-dir={profile}",
        "--disable-gpu",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--no-proxy-server",
        "--window-size=1200,900",
    ]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # Chrome's sandbox does not work for root, as in most containers
    try:
        return subprocess.Popen(
            [*command, url], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError as error:
        raise MeshwrightError(f"--figures: {browser} cannot be started: {error.strerror}") from None


class _PictureServer(OwnUserServer):
    """Serves one page, and collects the pictures that its script sends, by file name."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(18)
        self.pictures: dict[str, bytes] = {}
        self.finished = Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: _PictureServer

    def do_GET(self) -> None:
        is_page = self.path == f"/{self.server.token}/"
        self._answer(200 if is_page else 404, self.server.page.encode() if is_page else b"")

    def do_POST(self) -> None:
        prefix, _, name = self.path.rpartition("/")
        size = int(self.headers.get("Content-Length", 0))
        if prefix != f"/{self.server.token}" or size > _LARGEST_PICTURE_BYTES:
            self._answer(404, b"")
            return
        text = self.rfile.read(size).decode()
        if name == "finished":
            self.server.finished.set()
        else:
            kind, _, data = text.partition(",")
            self.server.pictures[name] = base64.b64decode(data) if kind.endswith(";base64") else unquote(data).encode()
        self._answer(200, b"")

    def _answer(self, status: int, content: bytes) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""
