"""cached_fineweb.py against a hub on loopback, asked over HTTP by the real huggingface-hub."""

import hashlib
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from tqdm import tqdm

import cached_fineweb

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "kjj0/fineweb10B-gpt2"
VAL, FIRST, SECOND, THIRD, FOURTH = NAMES = [
    "fineweb_val_000000.bin",
    *(f"fineweb_train_{i:06}.bin" for i in range(1, 5)),
]
BLOCK = 64 * 1024  # instead of the script's 16 MiB, where a test needs many in a small shard


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_shard(tokens: int, seed: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens
    stream = np.random.default_rng(seed).integers(0, 50257, tokens, dtype="<u2")
    return header.tobytes() + stream.tobytes()


SHARDS = {name: make_shard(400_000 + 50_001 * i, i) for i, name in enumerate(NAMES)}


# ---- the hub


class Hub:
    """One dataset repository, answered for as huggingface.co does, with a record of what was asked.

    `files` are the bytes it sends and `sums` the checksums it claims for them. A file's address
    redirects to another one that knows ranges, as the hub's does to its storage.
    """

    def __init__(self):
        self.repository, self.files = REPOSITORY, dict(SHARDS)
        self.sums = {name: sha256(data) for name, data in SHARDS.items()}
        self.pause = 0.0  # seconds after each 16 KiB
        self.victim, self.kill_at = None, 0  # a process, and the value of `sent` that ends it
        self.knows_ranges, self.drops = True, 0  # transfers to break off in their middle
        self.requests = []  # (path, Authorization)
        self.transfers = []  # (file name, first byte)
        self.sent = self.sending = self.most_sending = 0  # bytes, transfers now, and at once
        self.lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        path = request.path.split("?")[0]
        token = request.headers.get("Authorization")
        if path.startswith(("/api/datasets/", "/datasets/", "/storage/")):
            self.requests.append((path, token))  # and not what the library asks on its own account
        api = f"/api/datasets/{self.repository}"
        if path in (api, f"{api}/revision/main"):
            self.reply(request, 200, {"id": self.repository, "sha": "0" * 40})
        elif path == f"{api}/tree/main":
            self.reply(request, 200, [self.describe(name) for name in self.files])
        elif path.startswith(f"/datasets/{self.repository}/resolve/main/"):
            name = path.rsplit("/")[-1]
            linked = {"X-Linked-Etag": f'"{self.sums[name]}"', "X-Repo-Commit": "0" * 40}
            linked |= {"X-Linked-Size": len(self.files[name]), "Location": f"/storage/{name}"}
            self.reply(request, 302, {}, linked)
        elif path.startswith("/storage/"):
            self.send(request, path.rsplit("/")[-1])
        elif token:
            self.reply(request, 404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        else:  # the hub does not tell strangers what is private and what is not there
            message = "Invalid username or password."
            self.reply(request, 401, {"error": message}, {"X-Error-Message": message})

    def describe(self, name: str) -> dict:
        size = len(self.files[name])
        lfs = {"oid": self.sums[name], "size": size, "pointerSize": 134}
        return {"type": "file", "path": name, "oid": "1" * 40, "size": size, "lfs": lfs}

    def reply(self, request, status: int, content, headers=()):
        body = json.dumps(content).encode()
        request.send_response(status)
        for key, value in {"Content-Length": len(body), **dict(headers)}.items():
            request.send_header(key, str(value))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def send(self, request, name: str):
        data = self.files[name]
        first, last = 0, len(data) - 1
        wanted = request.headers.get("Range", "") if self.knows_ranges else ""
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        request.send_response(206 if asked else 200)
        request.send_header("ETag", f'"{self.sums[name]}"')
        request.send_header("Content-Length", str(last + 1 - first))
        if asked:
            request.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        request.end_headers()
        with self.lock:
            self.transfers.append((name, first))
            self.sending += 1
            self.most_sending = max(self.most_sending, self.sending)
            self.drops, dropped = max(self.drops - 1, 0), self.drops > 0
        try:
            for start in range(first, last + 1, 16384):
                piece = data[start : min(start + 16384, last + 1)]
                request.wfile.write(piece)
                with self.lock:
                    self.sent += len(piece)
                    if self.victim and self.sent >= self.kill_at:
                        self.victim.kill()
                        self.victim = None
                time.sleep(self.pause)
                if dropped:
                    raise ConnectionAbortedError
        except OSError:  # the client was killed, or this transfer is to break off
            request.close_connection = True
        finally:
            with self.lock:
                self.sending -= 1


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


# ---- the script


@pytest.fixture
def start(hub, tmp_path):
    """start(*arguments, **options) starts the script, which sees the hub and nothing of the user's.

    `before` is code to run first, with the script imported as a module; `env` adds to its
    environment, and other options are Popen's.
    """
    started = []

    def start(*arguments, before="", script=ROOT / "cached_fineweb.py", env=(), **options):
        command = [sys.executable, str(script)]
        if before:
            module = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cached_fineweb"
            command = [sys.executable, "-c", f"{module}\n{before}\ncached_fineweb.main()"]
        own = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
        own |= {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        process = subprocess.Popen([*command, *arguments], env=own | dict(env), **options)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def fetch(start, folder):
    """fetch(*arguments, **options) runs the script to its end: (status, stdout, stderr)."""

    def fetch(*arguments, **options):
        process = start(*arguments, "--dir", str(folder), **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return fetch


SMALL_BLOCKS = f"cached_fineweb.BLOCK_BYTES = {BLOCK}"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "shards"


def put(folder: Path, *names: str, manifest=True) -> None:
    """The state of a folder in which these shards are complete."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(SHARDS[name])
    if manifest:
        lines = [f"{sha256(SHARDS[name])}  {name}\n" for name in names]
        (folder / "SHA256SUMS").write_text("".join(lines))


def assert_holds(folder: Path, names: list[str], parts=()) -> None:
    """The folder holds these shards as the hub has them, their checksums, and nothing else."""
    assert sorted(p.name for p in folder.iterdir()) == sorted([*names, "SHA256SUMS", *parts])
    for name in names:
        assert (folder / name).read_bytes() == SHARDS[name], name
    listed = dict(line.split("  ")[::-1] for line in read_lines(folder / "SHA256SUMS"))
    assert listed == {name: sha256(SHARDS[name]) for name in names}


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def assert_one_line(done, status: int, *parts: str) -> None:
    returncode, _, err = done
    assert returncode == status, err
    assert re.fullmatch(r"cached_fineweb\.py: .+\n", err), err
    for part in parts:
        assert part in err


def wait_until(condition, process) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


# ---- what is downloaded


def test_a_download_is_what_the_hub_has_and_a_second_call_asks_nothing(hub, start, folder):
    """Several at a time, under one bar, with the user's token; the manifest is sha256sum's."""
    hub.pause = 0.005
    names = NAMES[:4]
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    process = start("3", "--dir", str(folder), stderr=terminal, env={"HF_TOKEN": "hf_mine"})
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(screen, 65536):
            shown += chunk
    except OSError:  # Linux's way to say that the terminal was closed
        pass
    os.close(screen)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert_holds(folder, names)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, check=True)

    assert hub.most_sending > 1
    assert hub.sent == sum(len(SHARDS[name]) for name in names)
    assert {token for _, token in hub.requests} == {"Bearer hf_mine"}

    frames = [frame for frame in shown.decode().split("\r") if frame.strip()]
    total = tqdm.format_sizeof(hub.sent)
    assert len(frames) > 1 and "\n" not in shown.decode()
    assert all(frame.startswith("shards:") and f"/{total}" in frame for frame in frames)
    assert out.splitlines()[-1] == f"{folder} is now complete: 4 shards, checksums in SHA256SUMS"

    # -S hides all installed packages: nothing but the standard library is needed now
    asked = len(hub.requests)
    command = [sys.executable, "-S", ROOT / "cached_fineweb.py", "3", "--dir", folder]
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout == f"{folder} is complete: 4 shards, checksums in SHA256SUMS\n"
    assert again.stderr == "" and len(hub.requests) == asked


@pytest.mark.parametrize(
    ("flag", "dataset", "prefix"),
    [("--edu", "finewebedu10B", "finewebedu"), ("--100B", "fineweb100B", "fineweb")],
)
def test_other_datasets_go_to_their_own_folders(hub, start, tmp_path, flag, dataset, prefix):
    hub.repository = f"kjj0/{dataset}-gpt2"
    contents = {f"{prefix}_val_000000.bin": VAL, f"{prefix}_train_000001.bin": FIRST}
    hub.files = {name: SHARDS[other] for name, other in contents.items()}
    hub.sums = {name: sha256(data) for name, data in hub.files.items()}
    script = shutil.copy(ROOT / "cached_fineweb.py", tmp_path)
    process = start("1", flag, script=script)
    assert process.wait(60) == 0, process.stderr.read()
    found = (tmp_path / "data" / dataset).glob("*.bin")
    assert {path.name: path.read_bytes() for path in found} == hub.files


# ---- interruptions


def test_kills_at_random_points_lose_no_more_than_the_blocks_under_way(hub, start, folder):
    hub.pause = 0.001
    total = sum(len(data) for data in SHARDS.values())
    rng = random.Random(20240520)
    kills, workers, resumed, complete, parts = 10, 2, 0, set(), {}
    settings = f"{SMALL_BLOCKS}; cached_fineweb.WORKERS = {workers}"

    for run in range(kills + 1):
        spared, earlier = complete, len(hub.transfers)
        process = start("4", "--dir", str(folder), before=settings)
        if run < kills:
            hub.kill_at = hub.sent + rng.randint(1, total // kills)
            hub.victim = process
        while process.poll() is None:  # meanwhile, what has its final name is whole
            for path in folder.glob("*.bin"):
                assert path.stat().st_size == len(SHARDS[path.name])
            time.sleep(0.002)
        _, err = process.communicate()
        assert process.returncode == (-signal.SIGKILL if run < kills else 0), err
        while hub.sending:  # to a client that is no more
            time.sleep(0.001)

        asked = hub.transfers[earlier:]
        assert asked and not spared & {name for name, _ in asked}
        for name, size in parts.items():
            first = [start for other, start in asked if other == name][:1]
            assert first in ([size], [])  # goes on behind the part, if it came to that
            resumed += first == [size] != [0]
        complete = {path.name for path in folder.glob("*.bin")}
        for name in complete:
            assert (folder / name).read_bytes() == SHARDS[name]
        parts = {path.stem: path.stat().st_size for path in folder.glob("*.bin.part")}
        for line in read_lines(folder / "SHA256SUMS"):
            sha, name = line.split("  ")
            assert sha == sha256(SHARDS[name]) and name in complete

    assert_holds(folder, NAMES)
    assert spared and resumed  # by the last run, some were complete, and some had been cut
    assert hub.sent <= total + kills * workers * BLOCK


def test_ctrl_c_is_one_line_and_two_calls_do_not_mix(hub, start, fetch, folder):
    put(folder, VAL)
    hub.pause = 0.05
    process = start("2", "--dir", str(folder), before=SMALL_BLOCKS)
    wait_until(lambda: hub.sent > 4 * BLOCK, process)
    assert_one_line(fetch("2"), 1, f"another call is downloading into {folder}")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=5)
    assert_one_line((process.returncode, out, err), 130, "interrupted")
    assert_holds(folder, [VAL], parts=[f"{FIRST}.part", f"{SECOND}.part"])
    for name in (FIRST, SECOND):
        part = (folder / f"{name}.part").read_bytes()
        assert SHARDS[name].startswith(part) and len(part) >= BLOCK


# ---- what is wrong with the data


def test_a_flipped_byte_is_one_line_and_can_be_mended(hub, fetch, folder):
    put(folder, VAL, FIRST)
    broken = bytearray(SHARDS[SECOND])
    broken[500_000] ^= 1
    hub.files[SECOND] = bytes(broken)
    assert_one_line(fetch("2"), 1, SECOND, REPOSITORY, "wrong checksum", "start again")
    assert hub.sent == len(broken)
    assert_holds(folder, [VAL, FIRST])

    hub.files[SECOND] = SHARDS[SECOND]
    status, _, err = fetch("2")
    assert (status, err) == (0, "")
    assert_holds(folder, [VAL, FIRST, SECOND])
    assert {name for name, _ in hub.transfers} == {SECOND}


@pytest.mark.parametrize(
    "fault", [{"magic": 20240521}, {"version": 2}, {"count": 1001}, {"cut": 1}, {"cut": 3020}]
)
def test_only_a_whole_shard_with_its_header_counts_as_one(write_shard, fault):
    assert cached_fineweb.is_shard(write_shard("shard.bin", range(1000)))
    assert not cached_fineweb.is_shard(write_shard("shard.bin", range(1000), **fault))


def test_a_wrong_header_under_a_right_checksum_is_one_line(hub, fetch, folder):
    put(folder, VAL)
    hub.files[FIRST] = SHARDS[FIRST][:-2]
    hub.sums[FIRST] = sha256(hub.files[FIRST])
    assert_one_line(fetch("1"), 1, FIRST, "does not match its header")
    assert_holds(folder, [VAL])


def test_shards_without_a_checksum_are_compared_and_broken_ones_fetched(hub, fetch, folder):
    """As an earlier version or another tool leaves them: whole, and cut short."""
    put(folder, VAL, FIRST, manifest=False)
    os.truncate(folder / FIRST, 123_456)
    status, _, err = fetch("1")
    assert (status, err) == (0, "")
    assert_holds(folder, [VAL, FIRST])
    assert hub.transfers == [(FIRST, 0)]

    (folder / "SHA256SUMS").unlink()
    own = make_shard(1000, 9)
    (folder / VAL).write_bytes(own)
    assert_one_line(fetch("1"), 1, str(folder / VAL), f"is not what {REPOSITORY} has", "move it")
    assert (folder / VAL).read_bytes() == own


# ---- what is wrong around it


def test_an_unknown_repository_is_one_line(hub, fetch, folder):
    hub.repository = "somebody/else"
    assert_one_line(fetch("1"), 1, f"there is no {REPOSITORY} on {hub.endpoint}", "HF_TOKEN")
    known = fetch("1", env={"HF_TOKEN": "hf_mine"})  # then the hub answers 404 instead of 401
    assert_one_line(known, 1, f"there is no {REPOSITORY} on {hub.endpoint}", "HF_ENDPOINT")
    assert hub.requests[0][1] is None and hub.requests[-1][1] == "Bearer hf_mine"


def test_a_shard_that_the_repository_lacks_is_one_line(hub, fetch):
    assert_one_line(fetch("5"), 1, "fineweb_train_000005.bin", REPOSITORY)
    assert hub.transfers == []


def test_no_hub_is_one_line_at_once(hub, fetch, folder):
    hub.close()
    put(folder, VAL)
    began = time.monotonic()
    assert_one_line(fetch("1"), 1, REPOSITORY, hub.endpoint, "refused", "check the network")
    assert time.monotonic() - began < 15
    assert_holds(folder, [VAL])


def test_a_connection_that_breaks_is_taken_up_again(hub, fetch, folder):
    put(folder, VAL)
    hub.drops = 1
    status, _, err = fetch("1", before=SMALL_BLOCKS)
    assert (status, err) == (0, "")
    assert_holds(folder, [VAL, FIRST])
    assert hub.transfers[:3] == [(FIRST, 0), (FIRST, 0), (FIRST, BLOCK)]


def test_a_proxy_that_ignores_ranges_is_one_line(hub, fetch, folder):
    put(folder, VAL)
    hub.knows_ranges = False
    assert_one_line(fetch("1", before=SMALL_BLOCKS), 1, FIRST, f"instead of {BLOCK}")
    assert_holds(folder, [VAL], parts=[f"{FIRST}.part"])
    assert (folder / f"{FIRST}.part").read_bytes() == b""


def test_a_missing_library_is_one_line(fetch):
    hidden = "sys.modules['huggingface_hub'] = None"
    assert_one_line(fetch("1", before=hidden), 1, "huggingface_hub is missing", "pip install")


def test_offline_is_one_line_unless_all_is_there(hub, fetch, folder):
    put(folder, VAL, FIRST, manifest=False)
    offline = {"HF_HUB_OFFLINE": "1"}
    assert_one_line(fetch("2", env=offline), 1, "HF_HUB_OFFLINE is set")
    status, out, err = fetch("1", env=offline)
    assert (status, err) == (0, "")
    assert "all 2 shards, but 2 without a checksum" in out and len(out.splitlines()) == 1
    assert hub.requests == [] and not (folder / "SHA256SUMS").exists()


def test_no_space_is_one_line_before_and_during_the_transfer(hub, fetch, folder):
    put(folder, VAL)
    little = "cached_fineweb.shutil.disk_usage = lambda path: type('', (), {'free': 1000})"
    assert_one_line(fetch("1", before=little), 1, f"no space in {folder}", "--dir")
    assert hub.sent == 0

    def limit():  # a file may not grow beyond this: the system's other way to say that it is full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    assert_one_line(fetch("1", preexec_fn=limit), 1, str(folder), "File too large", "--dir")
    assert_holds(folder, [VAL], parts=[f"{FIRST}.part"])
    assert (folder / f"{FIRST}.part").read_bytes() == SHARDS[FIRST][:300_000]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["0"], "0 train shards: kjj0/fineweb10B-gpt2 has 1 to 103"),
        (["104"], "104 train shards: kjj0/fineweb10B-gpt2 has 1 to 103"),
        (["100", "--edu"], "100 train shards: kjj0/finewebedu10B-gpt2 has 1 to 99"),
        (["1031", "--100B"], "1031 train shards: kjj0/fineweb100B-gpt2 has 1 to 1030"),
        (["ten"], "invalid int value: 'ten'"),
        (["--edu", "--100B"], "not allowed with"),
    ],
)
def test_a_wrong_argument_is_one_line(hub, fetch, folder, arguments, complaint):
    assert_one_line(fetch(*arguments), 2, complaint)
    assert hub.requests == [] and not folder.exists()
