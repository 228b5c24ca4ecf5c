"""Helpers for tests of whole runs: start them, wait for them, read what they print."""

import contextlib
import gc
import importlib
import io
import json
import multiprocessing.forkserver
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import train_gpt
from train_gpt import HERE

SCRIPT, RUNS = str(HERE / "train_gpt.py"), __file__
STEP = re.compile(r"step:(\d+)/(\d+) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
HANGS = 60  # seconds after which a test fails; what takes seconds passes on a busy machine, too
PYTHON_S_OWN = sys.prefix, sys.base_prefix  # where Python and packages are

# Importing torch takes seconds, so programs are forks of a process that has imported it. What
# torch.compile needs takes another second.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "train_gpt", "torch._dynamo"])


def run(arguments: list, ranks: int = 0, script: str = SCRIPT, **options):
    """Run a script, under torchrun if there are ranks, and return its finished process. With this
    file as the script, the first argument names what to run, as MODULE:FUNCTION."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, script, *map(str, arguments)]
    timeout = options.pop("timeout", HANGS)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def console_of(arguments: list, folder: Path, main=train_gpt.main) -> str:
    """Call main in this process, in a folder, and return what it prints. Fixtures of any scope can
    use this. A fork's main is partial(train_gpt.main, run=...)."""
    console = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(console):
        main([str(a) for a in arguments])
    return console.getvalue()


def error_of(arguments: list, capsys, main=train_gpt.main) -> tuple[int, str]:
    """Call main in this process; return its exit status and its one line on standard error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return stop.value.code, err


def begin(work, arguments: tuple, environment: dict[str, str], output: Path) -> None:
    """Call work(*arguments) in a forked process, as a program in this environment."""
    gc.freeze()  # a run collects garbage, of which torch's modules are none
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    work(*arguments)


class Program:
    """train_gpt.py's main, or other work, in a new process for each rank, in the current folder.

    Ranks meet as under torchrun, in a store of this process. Unlike torchrun, nothing stops the
    other ranks when one ends, but `fail` does. `work` is a function of a module, or a partial of
    one. It is called with the list of arguments as strings, and with `more`.
    """

    def __init__(self, arguments: list, ranks: int = 0, work=train_gpt.main, more=(), nodes=1):
        self.outputs = tempfile.TemporaryDirectory()
        self.store = None
        self.ranks = []
        environment = {}
        if ranks:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks // nodes),
            }
        with contextlib.chdir(HERE):  # where the server finds train_gpt.py when it starts
            multiprocessing.forkserver.ensure_running()
        for rank in range(max(ranks, 1)):
            if ranks:
                environment["RANK"] = str(rank)
                environment["LOCAL_RANK"] = str(rank % (ranks // nodes))
            words = [str(a) for a in arguments], *more
            output = Path(self.outputs.name, str(rank))
            process = FORKS.Process(target=begin, args=(work, words, environment, output))
            process.daemon = True  # so that it ends with the tests
            process.start()
            self.ranks.append(process)

    def text(self, name: str, rank: int = 0) -> str:
        """Return what a rank has written so far on "out" or "err"."""
        path = Path(self.outputs.name, f"{rank}.{name}")
        return path.read_text() if path.exists() else ""

    def fail(self) -> list[int]:
        """Wait until a rank fails, end the others as torchrun does, and return the statuses."""
        end = time.monotonic() + HANGS
        while not any(process.exitcode for process in self.ranks) and time.monotonic() < end:
            time.sleep(0.1)
        self.send(signal.SIGTERM)
        return self.end()

    def wait_for(self, text: str) -> None:
        """Return when rank 0 has printed this, or raise if it ends before."""
        end = time.monotonic() + HANGS
        lives = True
        while text not in self.text("out"):
            if not lives or time.monotonic() > end:
                raise RuntimeError(f"no {text!r} in {self.text('out')}{self.text('err')}")
            time.sleep(0.005)
            lives = self.ranks[0].is_alive()

    def send(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def end(self, ranks: slice = slice(None)) -> list[int]:
        """Wait until ranks end, and return their statuses: -n is signal n."""
        for process in self.ranks[ranks]:
            process.join(HANGS)
            if process.exitcode is None:
                self.send(9)
                raise RuntimeError(f"it hangs: {self.text('out')}{self.text('err')}")
        return [process.exitcode for process in self.ranks[ranks]]


def run_as_program(script: str, words: list[str], env: dict[str, str]) -> None:
    """Be Python that was started with a script: a process that has imported torch, but nothing of
    the project."""
    os.closerange(3, 4096)
    os.environ.clear()
    os.environ.update(env)
    for number in train_gpt.STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:
            is_sigint = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_sigint else signal.SIG_DFL)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(PYTHON_S_OWN):
            del sys.modules[name]
    own = [path for path in sys.path if path.startswith(PYTHON_S_OWN)]
    sys.path[:] = [os.path.dirname(script), *filter(None, env["PYTHONPATH"].split(":")), *own]
    sys.argv[:] = [script, *words]
    runpy.run_path(script, run_name="__main__")


def start_fork(command: list[str], env: dict[str, str], **options) -> subprocess.Popen:
    """Start Python with a script as subprocess.Popen would, as a fork of this process: Python need
    not import torch."""
    _, script, *words = command

    def instead() -> None:
        status = 1
        try:
            run_as_program(script, words, env)
            status = 0
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    sys.stdout.flush()
    return subprocess.Popen(command, env=env, preexec_fn=instead, **options)


def before_step(number: int, action) -> None:
    """Call action() before a step of the run; not the last one, which the warm-up makes, too. Only
    for a process of its own, because the patch stays."""
    step_of = train_gpt.train_step

    def train_step(model, optimizers, inputs, targets, now, **options):
        if now.step == number:
            action()
        return step_of(model, optimizers, inputs, targets, now, **options)

    train_gpt.train_step = train_step


def wait_at_most(seconds: float) -> None:
    """Shorten time.sleep: a rank that has failed sleeps for 10 seconds, until torchrun ends it.
    Only for a process of its own, because the patch stays."""
    sleep = time.sleep
    time.sleep = lambda wanted: sleep(min(wanted, seconds))


def rows(path: Path) -> list[dict]:
    """Return a run's .jsonl by steps: later fields of a step count, torn lines do not."""
    found = {}
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            found.setdefault(row["step"], {}).update(row)
    return [found[step] for step in sorted(found)]


def outcome(folder: Path, last: int = 8, run: type[train_gpt.Run] = train_gpt.Run):
    """Return of the run `it` its weights and optimizers' state after a step (after the last one, no
    state), and the rows of its .jsonl, but for what differs from run to run."""
    saved = train_gpt.load_checkpoint(folder / f"logs/it/state_step{last:06}.pt", run)
    state = {f"{n} {key}": v for n, of in saved["optimizers"].items() for key, v in of.items()}
    found = rows(folder / "logs/it.jsonl")
    for row in found:
        row.pop("ms", None)
        row.pop("tokens_per_s", None)
    return SimpleNamespace(folder=folder, tensors=saved["model"] | state, rows=found)


def begin_from(before: SimpleNamespace, step: int, folder: Path) -> None:
    """Give a folder another outcome's checkpoint, from which the run there can go on."""
    (folder / "logs/it").mkdir(parents=True)
    for file in before.folder.glob(f"logs/it/state_step{step:06}.pt*"):
        shutil.copy(file, folder / "logs/it")


def rows_after(outcome: SimpleNamespace, step: int) -> list[dict]:
    """Return an outcome's rows of later steps."""
    return [row for row in outcome.rows if row["step"] > step]


def assert_same(found: SimpleNamespace, expected: SimpleNamespace, since: int = -1) -> None:
    """Check that two outcomes have the same bits, of rows in those after a step, at which a resumed
    run validates once more."""
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name
    assert rows_after(found, since) == rows_after(expected, since)


def assert_close(found: SimpleNamespace, expected: SimpleNamespace, since: int = -1) -> None:
    """Check that two outcomes differ by rounding alone, of rows in those after a step."""
    for row, of_expected in zip(rows_after(found, since), rows_after(expected, since), strict=True):
        assert row.keys() == of_expected.keys()
        for name, value in of_expected.items():
            assert row[name] == pytest.approx(value, abs=1e-4, rel=1e-3 * (name == "grad_norm"))
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        error = (found.tensors[name] - tensor).norm() / tensor.norm().clamp(min=1e-9)
        assert error < 3e-4, name


def val_losses(text: str) -> dict[int, float]:
    """Return the validation losses in a run's log or console, by step."""
    line = r"step:(\d+)/\d+ val_loss:(\d+\.\d{5}) train_time:\d+ms step_avg:\d+\.\d\dms"
    return {int(m[1]): float(m[2]) for m in re.finditer(line, text)}


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    getattr(importlib.import_module(module), name)(sys.argv[2:])
