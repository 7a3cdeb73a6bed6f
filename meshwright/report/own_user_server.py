"""A server of pages on the loopback address, for browsers of this user only."""

from http.server import ThreadingHTTPServer
from typing import Any

from meshwright.processes.network.own_user import OtherEnd, find_other_end


class OwnUserServer(ThreadingHTTPServer):
    daemon_threads = True

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return find_other_end(request) is not OtherEnd.ANOTHER_USER
