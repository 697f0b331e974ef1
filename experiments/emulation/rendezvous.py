"""Where Horovod's workers find each other, as Horovod's launcher offers it.

Runs in Horovod's environment until it is killed. Its input is a socket that listens already, so a
worker that is early waits for an answer. Arguments: the hosts' names; each has one worker.
"""

import socket
import sys

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer


class _Server(RendezvousHTTPServer):
    def server_bind(self) -> None:
        self.socket.close()
        self.socket = socket.socket(fileno=sys.stdin.fileno())

    def server_activate(self) -> None:
        """Does nothing: the socket listens."""


names = sys.argv[1:]
server = _Server(("", 0), RendezvousHandler, verbose=0)
server.init(get_host_assignments([HostInfo(name, 1) for name in names], len(names)))
server.serve_forever()
