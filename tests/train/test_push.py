"""`push` uploads what `export` wrote: against a small hub of this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_jax.train.__main__ import main
from tests import tiny


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks for: to make a repository, how to upload files, and a commit."""

    def do_POST(self):  # the name that the library calls
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        place = f"http://127.0.0.1:{self.server.server_port}/somebody/drafter"
        answer = {"url": place}
        if self.server.status != 200:
            answer = {"error": "no"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {
                "files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": f"{place}/commit/0"}
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.files, server.status = [], {}, 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_drafter_is_uploaded(hub, tmp_path, capsys):
    tiny.write_drafter(tmp_path, tiny.drafter_config())
    (tmp_path / "README.md").write_text("# A drafter\n")
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["push", "--drafter", str(tmp_path), "--repo", "somebody/drafter"]) == 0
    assert f":{hub.server_port}/somebody/drafter/commit/0" in capsys.readouterr().out
    assert {name: (tmp_path / name).read_bytes() for name in hub.files} == hub.files
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.seen[0][0] == "/api/repos/create"
    assert {token for _, token in hub.seen} == {"Bearer hf_secret"}


def test_what_cannot_be_uploaded_is_said(hub, tmp_path, capsys):
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    push = lambda directory, repo="a/b": main(["push", "--drafter", str(directory), "--repo", repo])
    for given, said in [
        ((tmp_path / "gone",), "must be a directory that export has written"),
        ((tmp_path,), "config.json"),
        ((tmp_path / "drafter", "name"), "must be OWNER/NAME"),
    ]:
        assert push(*given) == 2
        assert said in capsys.readouterr().err
    hub.status = 403
    assert push(tmp_path / "drafter") == 2
    assert "a/b could not be uploaded: " in (said := capsys.readouterr().err)
    assert "hf auth login" in said
