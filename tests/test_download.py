"""cached_fineweb.py against a hub on loopback, asked over HTTP by the real huggingface-hub."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import cached_fineweb

SCRIPT = Path(cached_fineweb.__file__)
REPOSITORY = "kjj0/fineweb10B-gpt2"
NAMES = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06}.bin" for i in range(1, 5))]
VAL, FIRST, SECOND = NAMES[:3]
PATIENCE = 120  # seconds, for what would never end otherwise
BLOCK = 32 * 1024  # instead of the script's 16 MiB, where a test needs many in a small shard

# What a test lets the script do before it begins.
SMALL_BLOCKS = f"cached_fineweb.BLOCK_BYTES = {BLOCK}; cached_fineweb.WORKERS = 2"
OFFLINE = "os.environ['HF_HUB_OFFLINE'] = '1'"
NO_LIBRARY = "sys.modules['huggingface_hub'] = None"
FULL_DISK = """import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"""


def make_shard(tokens: int, seed: int) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, tokens
    stream = np.random.default_rng(seed).integers(0, 50257, tokens, dtype="<u2")
    return header.tobytes() + stream.tobytes()


SHARDS = {name: make_shard(200_000 + 10_001 * i, i) for i, name in enumerate(NAMES)}
SUMS = {name: sha256(data).hexdigest() for name, data in SHARDS.items()}


class Hub(ThreadingHTTPServer):
    """One dataset repository, answered for as huggingface.co does, with a record of what was asked.
    `files` are the bytes it sends."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.files = dict(SHARDS)
        self.drops = False  # whether the next transfer breaks off
        self.stalls_at, self.closed = None, threading.Event()  # first byte of transfers that hang
        self.victim, self.kill_at = None, 0  # a process, and the value of `sent` that ends it
        self.transfers = []  # (file name, first byte)
        self.asked, self.sent, self.lock = 0, 0, threading.Lock()  # requests; bytes
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def describe(self, name: str) -> dict:
        lfs = {"oid": SUMS[name], "size": len(self.files[name]), "pointerSize": 134}
        return {"type": "file", "path": name, "oid": "1" * 40, "size": lfs["size"], "lfs": lfs}

    def handle_error(self, *of_a_client_that_was_killed):
        pass

    def close(self):
        self.closed.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it waits 40 ms between the headers and a body

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        name = path.split("/")[-1]
        api, files = (f"/{kind}datasets/{REPOSITORY}" for kind in ("api/", ""))
        hub.asked += 1
        if path in (api, f"{api}/revision/main"):
            self.reply(200, {"id": REPOSITORY, "sha": "0" * 40})
        elif path == f"{api}/tree/main":
            self.reply(200, [hub.describe(name) for name in hub.files])
        elif path == f"{files}/resolve/main/{name}":
            self.reply(302, {}, {"Location": f"/storage/{name}"})
        else:
            assert path == f"/storage/{name}"
            self.send(name)

    def reply(self, status: int, body, headers=(), after_piece=lambda size: None):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        for start in range(0, len(body), 4096):
            after_piece(self.wfile.write(body[start : start + 4096]))

    def send(self, name: str):
        hub, data = self.server, self.server.files[name]
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with hub.lock:
            hub.transfers.append((name, first))
            hub.drops, dropped = False, hub.drops
        if first == hub.stalls_at:
            hub.closed.wait()

        def after_piece(size: int) -> None:
            with hub.lock:
                hub.sent += size
                if hub.victim and hub.sent >= hub.kill_at:
                    hub.victim.kill()
                    hub.victim = None
            if dropped:
                raise ConnectionAbortedError

        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self.reply(206, data[first : last + 1], headers, after_piece)


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "shards"


@pytest.fixture
def start(hub, folder, tmp_path):
    """start(n, before) starts the script, which sees the hub and nothing of the user's."""
    started = []
    own = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
    own |= {"HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(SCRIPT.parent)}

    def start(shards: int = 1, before: str = "") -> subprocess.Popen:
        code = f"import os, sys, cached_fineweb\n{before}\ncached_fineweb.main()"
        command = [sys.executable, "-c", code, str(shards), "--dir", folder]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=own, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """Its status, and what it printed."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def call_without_packages(*arguments, **options) -> tuple[int, str, str]:
    """With nothing but the standard library: -S hides all that is installed."""
    command = [sys.executable, "-S", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def put(folder: Path, *names: str, manifest=True) -> None:
    """The state of a folder in which these shards are complete."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(SHARDS[name])
    if manifest:
        (folder / "SHA256SUMS").write_text("".join(f"{SUMS[name]}  {name}\n" for name in names))


def assert_holds(folder: Path, *names: str, parts=()) -> None:
    """The folder holds these shards as the hub has them, their checksums, the beginnings of others
    (their names, how many bytes), and nothing else."""
    files = {name: SHARDS[name] for name in names}
    files |= {f"{name}.part": SHARDS[name][:size] for name, size in parts}
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    lines = found.pop("SHA256SUMS").decode().splitlines()
    assert found.keys() == files.keys() and all(found[name] == files[name] for name in files)
    assert sorted(lines) == sorted(f"{SUMS[name]}  {name}" for name in names)


def assert_one_line(done: tuple[int, str, str], status: int, words: str) -> None:
    """It ended with that status, and with one line on stderr, which has these words."""
    assert done[0] == status and re.fullmatch(r"cached_fineweb\.py: .+\n", done[2]), done
    assert words in done[2]


def test_a_download_is_what_the_hub_has_and_a_second_call_asks_nothing(hub, start, folder):
    assert finish(start(3))[0] == 0
    assert_holds(folder, *NAMES[:4])
    assert hub.sent == sum(len(SHARDS[name]) for name in NAMES[:4])
    asked = hub.asked
    for arguments, line in (
        (["3", "--dir", folder], f"{folder} is complete: 4 shards, checksums in SHA256SUMS\n"),
        (["--verify", f"{folder}/*.bin"], "4 shards are as SHA256SUMS has them\n"),
    ):
        assert call_without_packages(*arguments) == (0, line, "")
    assert hub.asked == asked


def test_each_dataset_has_its_own_folder(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cached_fineweb.py", "99", "--edu"])
    _, names, repository, folder = cached_fineweb.parse_arguments()
    assert repository == "kjj0/finewebedu10B-gpt2"
    assert folder == SCRIPT.parent / "data/finewebedu10B"
    assert names[0] == "finewebedu_val_000000.bin" and len(names) == 100
    assert names[99] == "finewebedu_train_000099.bin"


def test_kills_at_random_points_lose_no_more_than_the_blocks_under_way(hub, start, folder):
    total, kills, workers = sum(map(len, SHARDS.values())), 6, 2
    rng = random.Random(20240520)
    for run in range(kills + 1):
        process = start(4, SMALL_BLOCKS)
        if run < kills:
            hub.kill_at = hub.sent + rng.randint(total // (2 * kills), total // kills)
            hub.victim = process
        while process.poll() is None:  # meanwhile, what has its final name is whole
            for path in folder.glob("*.bin"):
                assert path.stat().st_size == len(SHARDS[path.name])
            time.sleep(0.002)
        assert process.returncode == (-signal.SIGKILL if run < kills else 0)
        assert all(path.read_bytes() == SHARDS[path.name] for path in folder.glob("*.bin"))
        listed = cached_fineweb.read_manifest(folder).items()
        assert listed <= {path.name: SUMS[path.name] for path in folder.glob("*.bin")}.items()
    assert_holds(folder, *NAMES)
    assert hub.sent <= total + kills * workers * BLOCK


def test_ctrl_c_is_one_line_at_once_and_two_calls_do_not_mix(hub, start, folder):
    """Two shards are under way, and the hub sends no more: their next blocks never come."""
    put(folder, VAL)
    hub.stalls_at = 2 * BLOCK
    process, deadline = start(2, SMALL_BLOCKS), time.monotonic() + PATIENCE
    while not {(FIRST, 2 * BLOCK), (SECOND, 2 * BLOCK)} <= {*hub.transfers}:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    other = finish(start(2))
    assert_one_line(other, 1, f"another call is downloading into {folder}: wait")
    process.send_signal(signal.SIGINT)
    assert_one_line(finish(process), 130, "interrupted")
    assert_holds(folder, VAL, parts=[(FIRST, 2 * BLOCK), (SECOND, 2 * BLOCK)])


def test_a_connection_that_breaks_is_taken_up_again(hub, start, folder):
    put(folder, VAL)
    hub.drops = True
    status, _, err = finish(start(1, SMALL_BLOCKS))
    assert (status, err) == (0, "")
    assert_holds(folder, VAL, FIRST)
    assert hub.transfers[:3] == [(FIRST, 0), (FIRST, 0), (FIRST, BLOCK)]


def test_shards_without_a_checksum_are_compared_and_broken_ones_fetched(hub, start, folder):
    put(folder, VAL, FIRST, manifest=False)
    status, out, err = finish(start(1, OFFLINE))
    assert (status, err) == (0, "") and "all 2 shards, but 2 without a checksum" in out

    os.truncate(folder / FIRST, 123_456)
    status, _, err = finish(start())
    assert (status, err, hub.transfers) == (0, "", [(FIRST, 0)])
    assert_holds(folder, VAL, FIRST)

    (folder / "SHA256SUMS").unlink()
    own = make_shard(1000, 9)
    (folder / VAL).write_bytes(own)
    assert_one_line(finish(start()), 1, f"{folder / VAL} is not what {REPOSITORY} has: move it")
    assert (folder / VAL).read_bytes() == own


def test_only_a_whole_shard_with_its_header_counts_as_one(write_shard):
    assert cached_fineweb.is_shard(write_shard("shard.bin", range(1000)))
    for fault in ({"magic": 20240521}, {"version": 2}, {"count": 1001}, {"cut": 1}, {"cut": 3020}):
        assert not cached_fineweb.is_shard(write_shard("shard.bin", range(1000), **fault))


def flip_a_byte(hub):
    hub.files[FIRST] = SHARDS[FIRST][:-1] + bytes([SHARDS[FIRST][-1] ^ 1])


def leave(hub):
    pass


ERRORS = {  # what is done to the hub and in the script, words of the line, parts left
    "flip": (flip_a_byte, "", f"{FIRST} from {REPOSITORY} has a wrong checksum: not kept", []),
    "refused": (Hub.close, "", f"cannot reach {REPOSITORY} on <hub>: ", []),
    "library": (leave, NO_LIBRARY, f"huggingface_hub is missing: {sys.executable} -m pip", []),
    "disk": (leave, FULL_DISK, "<folder>: File too large; what", [(FIRST, 300_000)]),
}


@pytest.mark.parametrize(("spoil", "before", "words", "parts"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line_and_leaves_what_is_right(
    hub, start, folder, spoil, before, words, parts
):
    put(folder, VAL)
    spoil(hub)
    words = words.replace("<hub>", hub.endpoint).replace("<folder>", str(folder))
    assert_one_line(finish(start(1, before)), 1, words)
    assert_holds(folder, VAL, parts=parts)


def test_a_wrong_call_is_one_line_whatever_is_installed(tmp_path):
    (tmp_path / "mine.bin").write_bytes(SHARDS[FIRST])
    done = call_without_packages("0", cwd=tmp_path)
    assert_one_line(done, 2, "error: 0 train shards: kjj0/fineweb10B-gpt2 has 1 to 103")
    done = call_without_packages("--verify", "mine.bin", cwd=tmp_path)
    assert_one_line(done, 1, "error: there is no checksum of mine.bin in SHA256SUMS")


def test_verify_names_each_changed_shard(write_shard, tmp_path):
    a, b = write_shard("a.bin", range(400)), write_shard("b.bin", range(400))
    sums = [f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (a, b)]
    (tmp_path / "SHA256SUMS").write_text("".join(sums))
    pattern, data = str(tmp_path / "*.bin"), bytearray(b.read_bytes())
    assert cached_fineweb.verify([pattern, str(b)]) == "2 shards are as SHA256SUMS has them"
    data[-1] ^= 1
    b.write_bytes(data)
    a.write_bytes(data[:-2])
    with pytest.raises(cached_fineweb.UserError, match=f"^{a}, {b}: not as SHA256SUMS has it"):
        cached_fineweb.verify([pattern])
