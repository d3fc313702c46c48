"""A Hub on this machine, for tests: as much of the Hub's HTTP as pushing, downloading and loading a model takes.

Repositories, branches, commits, large files (served from another address, as the Hub's are) and tokens, all in memory, and
downloads that break off or stop half-way; no Xet, pull requests or data sets.
Run the client with `HF_ENDPOINT=server.url` and `HF_HUB_DISABLE_XET=1`.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

LARGE = ("*.safetensors", "*.png")  # what the Hub's own .gitattributes keep as LFS


@dataclass
class Branch:
    commit: str
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Repo:
    private: bool
    branches: dict[str, Branch] = field(default_factory=lambda: {"main": Branch("0" * 40)})


class Refusal(Exception):
    """An answer that is no success: status, the Hub's error code, and its words."""

    def __init__(self, status: int, code: str, message: str, **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.more = status, code, message, more


class HubServer:
    """`tokens` maps a token to the names it may write under. Use as a context manager."""

    def __init__(self, tokens: dict[str, set[str]]) -> None:
        self.tokens = tokens
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.cut: set[str] = set()  # files whose next download breaks off half-way
        self.hold: set[str] = set()  # files whose next download stops half-way, until `release`
        self.held, self.release = threading.Event(), threading.Event()
        self.broken = False  # whether every answer is to be 500
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def put(self, name: str, folder: Path) -> None:
        """A repository with the files of `folder`, as after a push."""
        files = {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        commit = hashlib.sha1(repr(sorted(map(etag_of, files, files.values()))).encode()).hexdigest()
        self.repos[name] = Repo(False, {"main": Branch(commit, files)})

    def downloads(self) -> list[tuple[str, str]]:
        """(file name, Range) of each file that was sent, in order."""
        return [
            (path.rsplit("/", 1)[-1], r) for method, path, r in self.requests if method == "GET" and "/api/" not in path
        ]

    # -- what the routes do: (repository, more of the path, body, token) -> answer -------------------------------------

    def create(self, body: dict, token: str | None) -> dict:
        if token is None or token not in self.tokens:
            raise Refusal(401, "", "Invalid username or password.")
        name = f"{body['organization']}/{body['name']}"
        if body["organization"] not in self.tokens[token]:
            raise Refusal(403, "", f"You don't have the rights to create a model under the namespace {name}.")
        if name in self.repos:
            raise Refusal(409, "", "You already created this model repo", url=f"{self.url}/{name}")
        self.repos[name] = Repo(body.get("private", False) or body.get("visibility") == "private")
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def readable(self, name: str, token: str | None) -> Repo:
        repo = self.repos.get(name)
        owner = name.split("/")[0]
        if repo is None or (repo.private and owner not in self.tokens.get(token or "", ())):
            raise Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
        return repo

    def writable(self, name: str, token: str | None) -> Repo:
        repo = self.readable(name, token)
        if token not in self.tokens:
            raise Refusal(401, "", "Invalid username or password.")
        if name.split("/")[0] not in self.tokens[token]:
            raise Refusal(403, "", "Your token can read this repository only.")
        return repo

    @staticmethod
    def branch(repo: Repo, revision: str) -> Branch:
        for name, branch in repo.branches.items():
            if revision in (name, branch.commit):
                return branch
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def make_branch(self, name: str, revision: str, token: str | None) -> dict:
        repo = self.writable(name, token)
        if revision in repo.branches:
            raise Refusal(409, "", "Reference already exists")
        main = repo.branches["main"]
        repo.branches[revision] = Branch(main.commit, dict(main.files))
        return {}

    def preupload(self, name: str, revision: str, body: dict, token: str | None) -> dict:
        branch = self.branch(self.writable(name, token), revision)
        files = []
        for file in body["files"]:
            path = file["path"]
            there = branch.files.get(path)
            mode = "lfs" if is_large(path) else "regular"
            oid = None if there is None else etag_of(path, there)
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": files}

    def batch(self, name: str, body: dict, token: str | None) -> dict:
        self.writable(name, token)
        objects = []
        for entry in body["objects"]:
            answer = dict(entry)
            if entry["oid"] not in self.large:
                url = f"{self.url}/lfs/{entry['oid']}"
                answer["actions"] = {"upload": {"href": url}, "verify": {"href": f"{url}/verify"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def commit(self, name: str, revision: str, body: bytes, token: str | None) -> dict:
        branch = self.branch(self.writable(name, token), revision)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branch.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branch.files[value["path"]] = self.large[value["oid"]]
        branch.commit = hashlib.sha1(body + branch.commit.encode()).hexdigest()
        return {"commitUrl": f"{self.url}/{name}/commit/{branch.commit}", "commitOid": branch.commit}

    def info(self, name: str, revision: str, token: str | None) -> dict:
        repo = self.readable(name, token)
        branch = self.branch(repo, revision)
        files = [{"rfilename": path} for path in branch.files]
        return {
            "id": name,
            "modelId": name,
            "sha": branch.commit,
            "private": repo.private,
            "siblings": files,
            "tags": [],
        }

    def tree(self, name: str, revision: str, token: str | None) -> list:
        branch = self.branch(self.readable(name, token), revision)
        return [
            {"type": "file", "path": path, "size": len(data), "oid": etag_of(path, data)}
            for path, data in branch.files.items()
        ]

    def store(self, oid: str, data: bytes) -> dict:
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refusal(400, "", "Content does not match its oid")
        self.large[oid] = data
        return {}


def is_large(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in LARGE)


def etag_of(path: str, data: bytes) -> str:
    """The Hub's: SHA-256 of large files, git's blob hash of others."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_) -> None:
            pass

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            body = self.body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            try:
                if hub.broken:
                    raise Refusal(500, "", "Internal Server Error")
                if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                    self.resolve(*match.groups(), token)
                elif match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([^/]+)/(.+)", path):
                    self.send_file(hub.branch(hub.repos[match[1]], match[2]), match[3])
                else:
                    self.send(200, json.dumps(self.route(path, body, token)).encode())
            except Refusal as no:
                headers = {"X-Error-Code": no.code, "X-Error-Message": no.message}
                self.send(no.status, json.dumps({"error": no.message} | no.more).encode(), headers)

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def route(self, path: str, body: bytes, token: str | None):
            def json_body() -> dict:
                return json.loads(body)

            model = r"/api/models/([^/]+/[^/]+)"
            routes = (
                ("HEAD", r"/", lambda: {}),
                ("POST", r"/api/repos/create", lambda: hub.create(json_body(), token)),
                ("POST", r"/api/validate-yaml", lambda: validate(json_body()["content"])),
                ("POST", model + r"/branch/(.+)", lambda *a: hub.make_branch(*a, token)),
                ("POST", model + r"/preupload/(.+)", lambda *a: hub.preupload(*a, json_body(), token)),
                ("POST", model + r"/commit/(.+)", lambda *a: hub.commit(*a, body, token)),
                ("GET", model + r"/tree/([^/]+).*", lambda *a: hub.tree(*a, token)),
                ("GET", model + r"/revision/(.+)", lambda *a: hub.info(*a, token)),
                ("GET", model, lambda name: hub.info(name, "main", token)),
                ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", lambda n: hub.batch(n, json_body(), token)),
                ("PUT", r"/lfs/(\w+)", lambda oid: hub.store(oid, body)),
                ("POST", r"/lfs/(\w+)/verify", lambda oid: {}),
            )
            for method, pattern, run in routes:
                if method == self.command and (match := re.fullmatch(pattern, path)):
                    return run(*match.groups())
            raise Refusal(404, "", f"No route for {self.command} {path}")

        def resolve(self, name: str, revision: str, path: str, token: str | None) -> None:
            branch = hub.branch(hub.readable(name, token), revision)
            if path not in branch.files:
                raise Refusal(404, "EntryNotFound", "Entry not found")
            if not is_large(path):
                return self.send_file(branch, path)
            data = branch.files[path]
            headers = {
                "Location": f"{hub.url}/cdn/{name}/{branch.commit}/{path}",
                "X-Linked-ETag": f'"{etag_of(path, data)}"',
                "X-Linked-Size": str(len(data)),
                "X-Repo-Commit": branch.commit,
            }
            self.send(302, b"", headers)

        def send_file(self, branch: Branch, path: str) -> None:
            data = branch.files[path]
            headers = {"ETag": f'"{etag_of(path, data)}"', "X-Repo-Commit": branch.commit, "Accept-Ranges": "bytes"}
            status, start = 200, 0
            if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
                status, start = 206, int(match[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if self.command == "GET" and path in hub.cut:
                hub.cut.discard(path)
                self.send(status, data[start:], headers, sent=(len(data) - start) // 2)
                self.close_connection = True
                return
            if self.command == "GET" and path in hub.hold:
                hub.hold.discard(path)
                self.send(status, data[start:], headers, sent=(len(data) - start) // 2)
                self.wfile.flush()
                hub.held.set()
                hub.release.wait()
                self.close_connection = True
                return
            self.send(status, data[start:], headers)

        def send(self, status: int, data: bytes, headers: dict | None = None, sent: int | None = None) -> None:
            self.send_response(status)
            for key, value in ({"Content-Type": "application/json"} | (headers or {})).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # the client is gone
                    self.wfile.write(data[:sent])

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    return Handler


def validate(content: str) -> dict:
    """What the Hub says to a card's metadata: here only that it is YAML."""
    try:
        yaml.safe_load(content.split("---")[1])
    except (IndexError, yaml.YAMLError) as error:
        raise Refusal(400, "", f"Invalid YAML: {error}") from None
    return {"errors": [], "warnings": []}
