"""As much of the hub as a reader of its files needs, on this machine."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

FINEWEB = "datasets/HuggingFaceFW/fineweb"


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, its tree, and ranges of its files."""

    files: ClassVar[dict[str, bytes]] = {}
    ranges: ClassVar[list[int]] = []
    """Bytes of each request for a part of a file."""

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        tree, file = f"/api/{FINEWEB}/tree/main", f"/{FINEWEB}/resolve/main/"
        if path in (f"/api/{FINEWEB}", f"/api/{FINEWEB}/revision/main"):
            self.answer(200, json.dumps({"id": FINEWEB.removeprefix("datasets/")}).encode())
        elif path.startswith(tree) and (entries := self.entries(path.removeprefix(tree).strip("/"))):
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith(file):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.ranges.append(last + 1 - first)
            self.answer(206, self.files[path.removeprefix(file)][first : last + 1])
        else:
            missing = "Entry" if path.startswith(tree) else "Revision" if path.startswith(f"/api/{FINEWEB}") else "Repo"
            self.answer(404, b"", ("X-Error-Code", f"{missing}NotFound"))

    def entries(self, directory: str) -> list[dict[str, Any]]:
        """Files and directories directly in one."""
        found = {}
        for path, content in self.files.items():
            below = path.removeprefix(f"{directory}/" if directory else "")
            if below != path or not directory:
                oid = hashlib.sha1(content).hexdigest()
                child = path[: len(path) - len(below)] + below.partition("/")[0]
                kind = {"type": "file", "size": len(content)} if child == path else {"type": "directory"}
                found[child] = {"path": child, "oid": oid, **kind}
        return list(found.values())

    def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for header in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server of `Hub`, for as long as this lasts."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
