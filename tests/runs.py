"""Whole runs of the command line, and the community's lines that they print."""

import contextlib
import importlib
import io
import json
import multiprocessing.forkserver
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402
from train_gpt import HERE  # noqa: E402

SCRIPT, RUNS = str(HERE / "train_gpt.py"), __file__
STEP = re.compile(r"step:(\d+)/(\d+) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
VAL = re.compile(
    r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)
HANGS = 300  # seconds; busy machines are slow

# Importing torch takes seconds of a core: programs are forks of a process that has done it.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "train_gpt"])


def run(arguments: list, ranks: int = 0, script: str = SCRIPT, **options):
    """The finished process of the command line, under torchrun if there are ranks.

    This file is a script, too: its first argument names other work, as MODULE:FUNCTION.
    """
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, script, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": HANGS} | options
    return subprocess.run(command, **options)


def console_of(arguments: list, folder: Path) -> str:
    """What main prints in a folder, in this process; without pytest's fixtures, to be shared."""
    console = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(console):
        train_gpt.main([str(a) for a in arguments])
    return console.getvalue()


def error_of(arguments: list, capsys, main=train_gpt.main) -> tuple[int, str]:
    """Exit status and standard error of main in this process, which must be one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return stop.value.code, err


def begin(work, arguments: tuple, environment: dict[str, str], output: Path) -> None:
    """What a forked process does: work, as a program in this environment."""
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    work(*arguments)


class Program:
    """train_gpt.py's main, or other work, in a process for each rank, here and now.

    Ranks meet as under torchrun, in a store that none of them keeps; but nobody stops the others if
    one ends. `work` is a function of a module.
    """

    def __init__(self, arguments: list, ranks: int = 0, work=train_gpt.main, more=(), nodes=1):
        self.outputs, self.store, self.ranks = tempfile.TemporaryDirectory(), None, []
        environment = {}
        if ranks:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(ranks)}
            environment["LOCAL_WORLD_SIZE"] = str(ranks // nodes)
        with contextlib.chdir(HERE):  # there the server finds train_gpt.py, when it begins
            multiprocessing.forkserver.ensure_running()
        for rank in range(max(ranks, 1)):
            if ranks:
                local_rank = rank % (ranks // nodes)
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            words = [str(a) for a in arguments], *more
            output = Path(self.outputs.name, str(rank))
            process = FORKS.Process(target=begin, args=(work, words, environment, output))
            process.daemon = True  # ends with the tests
            process.start()
            self.ranks.append(process)

    def text(self, name: str, rank: int = 0) -> str:
        """What a rank has written so far on "out" or "err"."""
        path = Path(self.outputs.name, f"{rank}.{name}")
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str) -> None:
        """Return when rank 0 has printed this, or raise if it ends before."""
        end, lives = time.monotonic() + HANGS, True
        while text not in self.text("out"):
            if not lives or time.monotonic() > end:
                raise RuntimeError(f"no {text!r} in {self.text('out')}{self.text('err')}")
            time.sleep(0.005)
            lives = self.ranks[0].is_alive()

    def send(self, number: int) -> None:
        """A signal to all ranks."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def end(self, ranks: slice = slice(None)) -> list[int]:
        """The statuses of ranks when they have ended; -n, as subprocess has them, for a signal."""
        for process in self.ranks[ranks]:
            process.join(HANGS)
            if process.exitcode is None:
                self.send(9)
                raise RuntimeError(f"it hangs: {self.text('out')}{self.text('err')}")
        return [process.exitcode for process in self.ranks[ranks]]


def before_step(number: int, action) -> None:
    """In a process of its own: let action() come before a step of the run, but the last one."""
    step_of = train_gpt.train_step

    def train_step(model, optimizers, inputs, targets, step, **options):
        if step == number:
            action()
        return step_of(model, optimizers, inputs, targets, step, **options)

    train_gpt.train_step = train_step


def rows(path: Path, killed: bool = False) -> list[dict]:
    """Of a run's .jsonl, all lines: one that is not whole raises, but the last of a killed run."""
    *lines, rest = path.read_text().split("\n")
    assert killed or not rest
    return [json.loads(line) for line in lines]


def val_losses(text: str) -> dict[int, float]:
    return {int(m[1]): float(m[3]) for m in VAL.finditer(text)}


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    getattr(importlib.import_module(module), name)(sys.argv[2:])
