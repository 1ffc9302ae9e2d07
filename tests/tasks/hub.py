"""A stand-in for the Hugging Face hub, one of its datasets with a program beside it, and a process that asks it.

`python -m tests.tasks.hub HOME [--offline]` prints what each name gives, as JSON. `datasets` reads its environment at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def rows(count: int) -> bytes:
    lines = (json.dumps({"question": f"{i} + 1 =", "answer": f"We add.\n#### {i + 1}"}) for i in range(count))
    return "".join(f"{line}\n" for line in lines).encode()


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
FILES = {"train.jsonl": rows(50), "test.jsonl": rows(20), "README.md": CARD.encode()}
REPOSITORIES = {"me/units": FILES, "me/coded": {**FILES, "coded.py": b"raise SystemExit(3)"}}


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        repository = next((name for name in REPOSITORIES if f"/datasets/{name}" in path), "nobody/nothing")
        held = REPOSITORIES.get(repository, {})
        api, data = f"/api/datasets/{repository}", f"/datasets/{repository}/resolve/"
        digests = {name: hashlib.sha1(content).hexdigest() for name, content in held.items()}
        if not held:
            self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        elif path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            about = {"id": repository, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
            names = [{"rfilename": name} for name in held]
            self.answer(json.dumps({**about, "downloads": 0, "likes": 0, "siblings": names}).encode())
        elif path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": digests[n]} for n, c in held.items()]
            self.answer(json.dumps(tree).encode())
        elif path.startswith(data) and (name := path.split("/", 6)[6]) in held:
            self.answer(held[name], ETag=f'"{digests[name]}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(b"", 404, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET  # noqa: N815


ASKED: dict[str, dict[str, str]] = {
    "main": {"hub": "me/units", "subset": "main", "split": "test"},
    "revision": {"hub": "me/units", "split": "train", "revision": COMMIT},
    "no split": {"hub": "me/units"},
    "subset": {"hub": "me/units", "subset": "other", "split": "test"},
    "coded": {"hub": "me/coded", "split": "test"},
    "nobody": {"hub": "me/none", "split": "test"},
}


def main(home: Path, *, offline: bool) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": str(int(offline)),
    }  # fmt: skip

    from slime_tandem.config import TaskSpec
    from slime_tandem.errors import DataError
    from slime_tandem.tasks.families import TaskSet

    found: dict[str, Any] = {}
    for name, task in ASKED.items():
        try:
            tasks = TaskSet([TaskSpec(family="jsonl", **task)], 0)  # type: ignore[arg-type]
            found[name] = {"labels": [p.label for p in tasks.listed_prompts], "note": tasks.notes[0]}
        except DataError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), offline="--offline" in sys.argv)
