"""A cache of Hugging Face's Hub as `huggingface_hub` lays it out, and a server that answers as the Hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""A config.json of a model that no catalogue has."""


def cache_model(hub: Path, repo: str, files: Mapping[str, str], revision: str = "main") -> Path:
    """Lay files of a model into a cache; returns the folder of its snapshot."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(COMMIT)
    for name, text in files.items():
        blob = folder / "blobs" / hashlib.sha1(text.encode()).hexdigest()
        blob.write_text(text)
        (snapshot / name).symlink_to(Path("../../blobs", blob.name))
    return snapshot


Reply = tuple[int, dict[str, str], bytes]
"""Status, headers and body of an answer."""


class HubServer:
    """A Hub on this machine, and what it was asked."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: list[tuple[str, str]] = []
        """The method and path of each request."""
        self.silent = threading.Event()
        """Set when requests that are not answered may end."""

    def reply(self, method: str, path: str) -> Reply | None:
        """The answer to a request, None for one that gets none."""
        if not path.startswith("/org/"):
            return 404, {}, b""
        _, owner, name, resolve, revision, file = path.split("/", 5)
        assert (owner, resolve) == ("org", "resolve")
        body = json.dumps(CONFIG).encode()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        errors = {
            "gated": (403, "GatedRepo"),
            "unknown": (404, "RepoNotFound"),
            "nothing-there": (404, "EntryNotFound"),
            "forbidden": (403, ""),
            "broken": (500, ""),
        }
        if name in errors:
            status, code = errors[name]
            return status, {"X-Error-Code": code} if code else {}, b""
        if name == "private":  # The Hub's answer on all that a stranger may not see.
            return 401, {"X-Error-Message": "Invalid username or password."}, b""
        if revision not in ("main", "v2", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if name == "mute" or (name == "stuck" and method == "GET"):
            return None
        if name == "huge":
            return 200, headers | {"Content-Length": str(10**9)}, b""
        if name == "text":
            body = b"no JSON"
        return 200, headers | {"Content-Length": str(len(body))}, body if file == "config.json" else b""


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server that answers while the block lasts."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            hub.asked.append((self.command, self.path))
            found = hub.reply(self.command, self.path)
            if found is None:
                hub.silent.wait()
                self.close_connection = True
                return
            status, headers, body = found
            self.send_response(status)
            for name, value in ({"Content-Length": "0"} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.silent.set()
        server.shutdown()
        server.server_close()
