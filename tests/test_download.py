"""cached_fineweb.py against a server on loopback, asked by the real huggingface-hub."""

import os
import re
import resource
import subprocess
import sys
import threading
import time
from hashlib import sha256
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from pytest_httpserver import HTTPServer
from werkzeug import Response

import cached_fineweb
from train_gpt import as_program

NAMES = ["fineweb_val_000000.bin", "fineweb_train_000001.bin", "fineweb_train_000002.bin"]
FAULTS = {404: "404", "wrong": "checksum", "cut": "closed"}


@pytest.fixture
def hub(write_shard, monkeypatch, tmp_path):
    """Serve `files` for a download into `folder`. `sent` lists whose bytes were asked for."""
    with HTTPServer(threaded=True) as hub:
        hub.files = {n: write_shard(n, range(i, 50_000)).read_bytes() for i, n in enumerate(NAMES)}
        hub.sent, hub.fault, hub.ended = [], None, threading.Event()
        rows = [{"type": "file", "path": n, "oid": "", "size": len(hub.files[n])} for n in NAMES]
        for row in rows:
            checksum = sha256(hub.files[row["path"]]).hexdigest()
            row["lfs"] = {"oid": checksum, "size": row["size"], "pointerSize": 134}
        api = "/api/datasets/kjj0/fineweb10B-gpt2/tree/main"
        hub.expect_request(api).respond_with_json(rows)

        def send(asked) -> Response:
            name = asked.path.split("/")[-1]
            data, fault = hub.files[name], hub.fault if name == NAMES[-1] else None
            headers = {"X-Repo-Commit": "0" * 40, "ETag": name, "Content-Length": len(data)}
            if asked.method == "GET":
                hub.sent.append(name)
                if fault == "stall":
                    hub.ended.wait()
            if fault == "wrong":
                data = data[:-1] + b"?"
            elif fault == "cut":
                data = b"" if "Range" in asked.headers else data[:2000]
            return Response([data], fault if isinstance(fault, int) else 200, headers)

        hub.expect_request(re.compile("/datasets/.*")).respond_with_handler(send)
        hub.folder, hub.url = tmp_path / "shards", hub.url_for("").rstrip("/")
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # of the library, between attempts
        monkeypatch.setattr(sys, "argv", ["cached_fineweb.py", "2", "--dir", str(hub.folder)])
        yield hub
        hub.ended.set()


def call(tool) -> tuple[int, str]:
    """Call the program. Return its status and what it printed: an error is its last line."""
    status, out, err = tool(lambda _: as_program("cached_fineweb.py", cached_fineweb.main), [])
    errors = [line for line in err.splitlines() if line.startswith("cached_fineweb.py: error: ")]
    assert len(errors) == status and err.endswith("".join(f"{line}\n" for line in errors))
    return status, out + err


def assert_the_next_call_completes(hub, tool) -> None:
    hub.fault = None
    assert call(tool)[0] == 0
    assert {path.name: path.read_bytes() for path in hub.folder.iterdir()} == hub.files


@pytest.mark.parametrize("fault", [*FAULTS, "disk"])
def test_an_error_is_one_line_and_leaves_right_shards_only(fault, hub, tool, caplog):
    hub.fault, limits = fault, resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, limits[1]))
    status, text = call(tool)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and FAULTS.get(fault, "File too large") in text
    assert not [r for r in caplog.records if "hugging" in r.name]  # it warns at each attempt
    kept = set() if fault == "disk" else set(NAMES[:2])
    assert set(os.listdir(hub.folder)) == kept
    assert_the_next_call_completes(hub, tool)


SHARD = {"type": "file", "path": NAMES[0], "oid": "", "size": None}
LFS = {"oid": "0" * 64, "size": 7, "pointerSize": 134}


@pytest.mark.parametrize("listing", [7, [{}], [SHARD | {"lfs": LFS}]], ids=str)
def test_a_list_of_another_form_is_an_error_of_one_line(listing, hub, tool, monkeypatch):
    hub.clear()
    hub.expect_request(re.compile(".*")).respond_with_json(listing)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--edu", "--100B"])
    status, text = call(tool)
    assert status == 1 and f"{hub.url} lists kjj0/finewebedu100B-gpt2 in another form" in text


def test_a_kill_costs_the_shard_under_way(hub, tool):
    hub.fault, command = "stall", [sys.executable, cached_fineweb.__file__, *sys.argv[1:]]
    process = subprocess.Popen(command, env=os.environ | {"HF_ENDPOINT": hub.url})
    while NAMES[-1] not in hub.sent and process.poll() is None:
        hub.ended.wait(0.01)
    process.kill()
    assert process.wait() < 0
    assert_the_next_call_completes(hub, tool)
    assert hub.sent == [*NAMES, NAMES[-1]]


def test_verify_names_a_broken_shard_and_the_next_call_replaces_it(hub, tool, monkeypatch):
    assert_the_next_call_completes(hub, tool)
    """What is not there is not verified. What it fetches just fits the disk."""
    (hub.folder / NAMES[1]).write_bytes(hub.files[NAMES[2]][:-2])
    (hub.folder / NAMES[0]).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [*sys.argv, "--verify"])
        status, text = call(tool)
        assert status == 1 and NAMES[1] in text and NAMES[2] not in text
        patch.setattr(sys, "argv", [sys.argv[0], "3", *sys.argv[2:-1]])
        assert "has no fineweb_train_000003.bin: ask for fewer shards" in call(tool)[1]
    size = sum(len(hub.files[name]) for name in NAMES[:2])
    room = SimpleNamespace(free=size - 1)
    monkeypatch.setattr(cached_fineweb.shutil, "disk_usage", lambda folder: room)
    assert "make room or choose another folder" in call(tool)[1]
    room.free = size
    assert_the_next_call_completes(hub, tool)
    assert hub.sent == [*NAMES, *NAMES[:2]]
