"""A server on 127.0.0.1 that speaks what saving and loading need of the hub's API, to huggingface_hub's own client.

Repositories are kept in memory: each ref names a commit, each commit maps paths to contents, and a commit takes its
place whole or not at all. Weights go the way of large files: instructions, an upload, and a pointer in the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

TOKEN, USER = "hf_secret", "me"
Commit = dict[str, bytes]


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, files: Commit) -> str:
        oid = hashlib.sha1(repr((len(self.commits), ref)).encode()).hexdigest()
        self.commits[oid], self.refs[ref] = files, oid
        return oid

    def find(self, revision: str) -> str | None:
        oid = self.refs.get(revision, revision)
        return oid if oid in self.commits else None


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class Hub(ThreadingHTTPServer):
    """The server, and what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.elsewhere = f"http://localhost:{self.server_port}"  # large files come from another host
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cut: str | None = None  # requests whose line has this text lose their connection half-way

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""

    def read(self, repo: str, path: str, revision: str = "main") -> bytes:
        own = self.repos[repo]
        return own.commits[own.find(revision) or ""][path]

    def paths(self, repo: str, revision: str = "main") -> set[str]:
        own = self.repos[repo]
        return set(own.commits[own.find(revision) or ""])


@contextmanager
def hub(patch: pytest.MonkeyPatch, cache: Path, token: str | None = TOKEN) -> Iterator[Hub]:
    """Run one, and have huggingface_hub talk to it alone, with an empty cache and no waits."""
    server = Hub()
    constants: Any = huggingface_hub.constants
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "ENDPOINT", server.endpoint)
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, in Rust
    patch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
    patch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        patch.setenv("HF_TOKEN", token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the client's word that it has the headers: 40 ms each time
    ROUTES: ClassVar = [
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/(?:branch|tag)/(?P<revision>.+)", "name_revision"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/large/(?P<oid>\w+)", "put_large"),
        ("GET", r"/large/(?P<oid>\w+)", "get_large"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?", "info"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ]

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.line = f"{self.command} {path}"
        self.server.asked.append(self.line)
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for own, pattern, name in self.ROUTES[:8] + self.ROUTES[9:] + self.ROUTES[8:9]:  # the shortest last
                if own == method and (match := re.fullmatch(pattern, path)):
                    getattr(self, name)(**match.groupdict())
                    return
            raise RefusedError(404, "", f"no route {self.command} {path}")
        except RefusedError as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self.answer(b'{"error": ""}', refused.status, {key: value for key, value in headers.items() if value})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_GET()

    def answer(self, body: bytes | Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**(headers or {})}
        if status == 200 and (start := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))):
            status, size = 206, len(content)
            content = content[int(start[1]) :]
            headers["Content-Range"] = f"bytes {start[1]}-{size - 1}/{size}"
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        cut = self.server.cut is not None and self.server.cut in self.line and self.command != "HEAD"
        if self.command != "HEAD":
            half = 0 if status == 206 else len(content) // 2
            self.wfile.write(content[:half] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def find(self, repo: str, revision: str | None = None, *, write: bool = False) -> tuple[Repo, str]:
        """A repository that the caller may see, and a commit of it."""
        known, own = self.headers.get("Authorization") == f"Bearer {TOKEN}", self.server.repos.get(repo)
        if own is None or (own.private and not known):
            raise RefusedError(404 if known else 401, "RepoNotFound", "Repository not found")
        if write and not (known and repo.startswith(f"{USER}/")):
            raise RefusedError(403, "", "You don't have the rights to write here")
        oid = own.find(revision or "main")
        if oid is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return own, oid

    def create(self) -> None:
        asked = json.loads(self.body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "", "Invalid username or password.")
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if not name.startswith(f"{USER}/"):
            raise RefusedError(403, "", f"You don't have the rights to create a model under the namespace {name}")
        address = f"{self.server.endpoint}/{name}"
        if name in self.server.repos:
            self.answer({"error": "You already created this model repo", "url": address}, 409)
            return
        self.server.repos[name] = Repo(asked.get("private") is True or asked.get("visibility") == "private")
        self.server.repos[name].commit("main", {".gitattributes": b""})
        self.answer({"url": address, "name": name, "id": name})

    def validate(self) -> None:
        self.answer({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> None:
        self.find(repo, revision, write=True)
        files = json.loads(self.body)["files"]
        modes = [("lfs" if file["path"].endswith(".safetensors") else "regular", file["path"]) for file in files]
        self.answer({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for mode, path in modes]})

    def batch(self, repo: str) -> None:
        self.find(repo, write=True)
        objects = [
            {**asked, "actions": {"upload": {"href": f"{self.server.endpoint}/large/{asked['oid']}"}}}
            for asked in json.loads(self.body)["objects"]
        ]
        self.answer({"transfer": "basic", "objects": objects})

    def put_large(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise RefusedError(400, "", "not what was announced")
        self.server.large[oid] = self.body
        self.answer({})

    def get_large(self, oid: str) -> None:
        self.answer(self.server.large[oid])

    def commit(self, repo: str, revision: str) -> None:
        own, oid = self.find(repo, revision, write=True)
        if self.server.cut == "commit before":
            self.close_connection = True
            return
        files = dict(own.commits[oid])
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            elif key != "header":
                raise RefusedError(400, "", f"unknown operation {key}")
        pull = "create_pr=1" in self.path
        made = own.commit("refs/pr/1" if pull else revision, files)
        url = f"{self.server.endpoint}/{repo}"
        more = {"pullRequestUrl": f"{url}/discussions/1"} if pull else {}
        self.answer({"success": True, "commitOid": made, "commitUrl": f"{url}/commit/{made}", **more})

    def name_revision(self, repo: str, revision: str) -> None:
        own, oid = self.find(repo, write=True)
        if "/tag/" in self.path:
            oid, revision = own.find(revision) or oid, json.loads(self.body)["tag"]
        if revision in own.refs:
            raise RefusedError(409, "", "Reference already exists")
        own.refs[revision] = oid
        self.answer({})

    def info(self, repo: str, revision: str | None) -> None:
        own, oid = self.find(repo, revision)
        siblings = [{"rfilename": path} for path in own.commits[oid]]
        self.answer({"id": repo, "modelId": repo, "sha": oid, "private": own.private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        own, oid = self.find(repo, revision)
        self.answer([_entry(path, content) for path, content in own.commits[oid].items()])

    def resolve(self, repo: str, revision: str, path: str) -> None:
        own, oid = self.find(repo, revision)
        if path not in own.commits[oid]:
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        content, entry = own.commits[oid][path], _entry(path, own.commits[oid][path])
        headers = {"X-Repo-Commit": oid, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            self.answer(content, headers=headers)
            return
        sha = str(entry["lfs"]["oid"])
        linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
        self.answer(b"", 302, {**headers, **linked, "Location": f"{self.server.elsewhere}/large/{sha}"})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if path.endswith(".safetensors"):
        sha = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha, "sha256": sha, "size": len(content), "pointerSize": 130}
    return entry
