"""Whole runs: kills, demos at their full size, what torchrun does with ranks and nodes, and runs of
forks/train_gpt_2026_08.py that go on where other numbers of ranks were."""

import functools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

import train_gpt
from frontier.small_runs import AUGUST, language
from ngram_table import find_pieces
from runs import (
    HANGS,
    RUNS,
    SCRIPT,
    Program,
    before_step,
    console_of,
    outcome,
    rows,
    run,
    val_losses,
)
from test_ranks import check_ranks
from test_ranks import flags as small_flags  # noqa: F401
from train_gpt import HERE
from train_gpt_2026_08 import GPT, Run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
FORK = str(HERE / "forks/train_gpt_2026.py")
# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def test_twenty_stops_of_each_kind_change_no_bit():
    """Kills and SIGTERMs, each with a resume."""
    command = [sys.executable, "-m", "pytest", "-q", f"{HERE}/tests/test_resume.py"]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("script", "last"), [(SCRIPT, 128), (FORK, 180)])
def test_the_demo_learns_from_10_83_to_below_4_3(script, last, tmp_path):
    """The head of train_gpt.py begins at zero, that of the fork does not."""
    flags = ["--record", "demo", "--device", "cpu"]
    done = run(flags, script=script, cwd=tmp_path, env=OWN, check=True, timeout=3600)
    losses = val_losses(done.stdout)
    assert losses[0] == pytest.approx(10.82584, abs=0 if script == SCRIPT else 0.01)
    assert losses[last] < 4.3


def test_a_run_that_is_started_again_goes_on(flags, tmp_path):
    """One of two ranks is killed; torchrun ends the other one and starts both anew."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--batch_seqs", "2"]
    flags += ["--save_every", "5", "--run_id", "it", "--resume", "on"]
    command = [*TORCHRUN, "--standalone", "--max_restarts=1", SCRIPT, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step:20/") and "restarted" not in lines:
            lines.append("restarted")
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True)
            os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    assert process.wait(HANGS) == 0
    resumed = [int(line.split()[-1]) for line in lines if line.startswith("resumed at step")]
    assert len(resumed) == 1 and resumed[0] in (15, 20, 25)
    assert [row["step"] for row in rows(tmp_path / "logs/it.jsonl")] == list(range(1, 201))


def test_two_nodes_of_two_ranks_equal_one(small_flags, tmp_path):  # noqa: F811
    """Each has its own torchrun; they meet on the loopback interface."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    console_of(small_flags, alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*TORCHRUN, "--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=x"]
    command += [f"--rdzv_endpoint=127.0.0.1:{port}", RUNS, "spy:main", *small_flags]
    nodes = [subprocess.Popen(command, cwd=together) for _ in range(2)]
    assert [node.wait(HANGS) for node in nodes] == [0, 0]
    check_ranks(small_flags, alone, together, 4)


def in_folder(folder: Path, words: list[str]) -> None:
    os.chdir(folder)
    train_gpt.main(words, Run)


# Record 92 at a small size. Its table learns at each second step, and from step 8 on at each
# fourth: checkpoints of steps 10, 14 and so on have gradients that wait.
LAST = 40
TABLE = f"{AUGUST} --num_iterations {LAST} --ngram_slow_from 8 --anvil_from 8 --keep 99 --resume on"


def run_killed(words: list[str], folder: Path, victim: int, step: int | None, delay: float) -> None:
    """Run main, in which one rank is killed `delay` seconds after a step begins, or without a step
    after it begins to save."""

    def kill() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def save(self, path, save_pieces=GPT.save_pieces) -> None:
        threading.Thread(target=kill).start()
        save_pieces(self, path)

    if int(os.environ["RANK"]) == victim:
        if step is None:
            GPT.save_pieces = save
        else:
            before_step(step, threading.Thread(target=kill).start)
    in_folder(folder, words)


def newest(folder: Path) -> int:
    """Return the step of a run's newest checkpoint, or 0."""
    return max((int(path.stem[-6:]) for path in folder.glob("logs/it/*.pt")), default=0)


def kill_at_random(words: list[str], folder: Path, ranks: int, rng: random.Random) -> None:
    """Start or resume a run on some ranks, and kill one of them, then all, at a random moment: half
    of them while it saves. Each checkpoint that is left has all pieces of its table."""
    begun = newest(folder)
    step = rng.choice([None, begun + rng.randrange(6)])
    delay = rng.random() * (0.06 if step is None else 0.15)
    victim = rng.randrange(ranks)
    work = functools.partial(run_killed, folder=folder, victim=victim, step=step, delay=delay)
    run = Program(words, ranks, work)
    while all(process.is_alive() for process in run.ranks):
        time.sleep(0.005)
    time.sleep(0.2 * rng.random())
    run.send(signal.SIGKILL)
    assert run.end()[victim] == -signal.SIGKILL, run.text("err", victim)
    assert (f"resumed at step {begun}\n" in run.text("out")) == (begun > 0)
    assert newest(folder) >= begun
    for path in folder.glob("logs/it/*.pt"):
        assert find_pieces(path)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what a run's checkpoints and pieces, which are zip files, have in them: all but the
    description of a checkpoint, which has the run's time."""
    found = {}
    for path in folder.glob("logs/it/*"):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if not name.endswith(("/data.pkl", "/serialization_id")):  # its hash
                    found[f"{path.name} {name}"] = archive.read(name)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ten_kills_change_no_bit_of_any_checkpoint_and_piece(ranks, tmp_path):
    """Of a run that goes on after each, compared with an undisturbed one."""
    words, rng = [*language(tmp_path), *TABLE.split()], random.Random(ranks)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    for _ in range(10):
        kill_at_random(words, killed, ranks, rng)
    assert newest(killed) < LAST
    for folder in (whole, killed):
        ended = Program(words, ranks, functools.partial(in_folder, folder))
        assert ended.end() == [0] * ranks, ended.text("err")
    expected, found = contents(whole), contents(killed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert sum(name.endswith(" waiting") for name in expected) == ranks * LAST / 2
    assert outcome(killed, LAST, Run).rows == outcome(whole, LAST, Run).rows
