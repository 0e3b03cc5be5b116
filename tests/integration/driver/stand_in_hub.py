"""A hub on localhost that speaks as much of Hugging Face's and ModelScope's protocol as a download needs."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """`files`: contents by name. `cut_after`: bytes of `cut_file` after which its first download breaks."""

    daemon_threads = True

    def __init__(self, name: str, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.files = name, files
        self.cut_file, self.cut_after = "", 0
        self.requests: list[str] = []
        self.ranges: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        hub, url = self.server, urlparse(self.path)
        hub.requests.append(f"{self.command} {self.path}")
        path, query = unquote(url.path), parse_qs(url.query)
        if f"/{hub.name}" not in path:
            return self.error_404()
        if path.startswith("/api/v1/"):
            return self.modelscope(path, query)
        if path.startswith("/api/"):
            return self.huggingface(path)
        file = path.split("/resolve/", 1)[-1].split("/", 1)[-1]
        return self.send_file(file, with_body=with_body)

    def huggingface(self, path: str) -> None:
        files = [{"rfilename": n, "size": len(c), "blobId": git_hash(c)} for n, c in self.server.files.items()]
        if "/tree/" in path:
            tree = [{"type": "file", "path": f["rfilename"], "size": f["size"], "oid": f["blobId"]} for f in files]
            return self.send_json(tree)
        return self.send_json({"id": self.server.name, "sha": COMMIT, "siblings": files, "private": False})

    def modelscope(self, path: str, query: dict[str, list[str]]) -> None:
        if path.endswith("/revisions"):
            revision = {"Revision": "master", "CreatedAt": 1}
            return self.send_json(ok({"RevisionMap": {"Branches": [revision], "Tags": []}}))
        if path.endswith(("/repo/files", "/repo/tree")):
            files = [
                {"Name": n, "Path": n, "Size": len(c), "Type": "blob", "Revision": COMMIT, "IsLFS": False,
                 "Sha256": hashlib.sha256(c).hexdigest()}
                for n, c in self.server.files.items()
            ]  # fmt: skip
            return self.send_json(ok({"Files": files, "LatestCommitter": {"Id": COMMIT}}))
        if path.endswith("/repo"):
            return self.send_file(query["FilePath"][0], with_body=True)
        return self.send_json(ok({"Type": 1, "Id": 7, "Name": self.server.name}))

    def send_file(self, name: str, *, with_body: bool) -> None:
        hub = self.server
        if name not in hub.files:
            return self.error_404()
        content, start = hub.files[name], 0
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            hub.ranges.append(f"{name} {wanted}")
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{git_hash(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if not with_body:
            return None
        if name == hub.cut_file:
            hub.cut_file = ""
            self.wfile.write(content[start : hub.cut_after])
            self.wfile.flush()
            self.close_connection = True
            return self.connection.shutdown(2)
        self.wfile.write(content[start:])
        return None

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error_404(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def ok(data: object) -> dict[str, object]:
    return {"Code": 200, "Success": True, "Data": data, "Message": "success", "RequestId": "1"}


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
