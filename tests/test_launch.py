"""run.sh and tools/launch.py: what they install, fetch and start."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import launch
import pytest
import torch

import train_gpt
from train_gpt import HERE

SCRIPT = str(HERE / "train_gpt.py")
FORK = "forks/train_gpt_2026.py"

# ---- tools/launch.py, on machines with any number of GPUs


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Return launched(words, gpus): it returns the status and what was called: commands, the last
    one after "exec" if it took this process's place, and "here" for training in this process.
    Commands with a word of `failing` end with status 3."""

    def start(words: str, gpus: int = 0, failing: str = "-") -> tuple[int, list]:
        calls = []

        def call(command):
            if "--run_id" in command:  # one of several: it shall save on Ctrl-C, and not be killed
                assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            calls.append(command)
            return SimpleNamespace(returncode=3 * (failing in command))

        def take_place(program, command):
            calls.extend(["exec", command])
            sys.exit(0)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "run", call)
        monkeypatch.setattr(os, "execv", take_place)
        monkeypatch.setattr(train_gpt, "train", lambda *_: calls.append("here"))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(sys, "argv", ["launch.py", *words.split()])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PYTHONPATH", "mine")
        try:
            launch.main()
        except SystemExit as end:
            return end.code, calls
        return 0, calls

    return start


@pytest.mark.parametrize(
    ("nproc", "gpus", "words", "processes", "shards"),
    [
        ("", 1, "--num_iterations 3", 1, 1),
        ("", 3, "--batch_seqs=4", 2, 4),
        ("", 8, "--device=cpu", 1, 0),
        ("", 8, f"{FORK}", 8, 7),  # 1.6 times 395.8M tokens
        ("", 8, f"{FORK} --record 2026-01-04_MixedPrecisionInterweavedOptimizer", 8, 8),  # 487.6M
        ("2", 8, "--record demo", 2, 0),
        ("2", 0, "--device cpu", 2, 0),
        ("1", 8, "--record demo", 1, 0),
    ],
)
def test_a_run_has_a_divisor_of_the_batch_and_the_shards_it_reads(
    nproc, gpus, words, processes, shards, launched, monkeypatch
):
    monkeypatch.setenv("NPROC", nproc)
    expected = []
    if shards:
        expected.append([sys.executable, f"{HERE}/cached_fineweb.py", str(shards)])
    if processes == 1:
        expected.append("here")
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        script = f"{HERE}/{FORK}" if FORK in words else SCRIPT
        flags = words.replace(FORK, "").split()
        expected += ["exec", [sys.executable, *torchrun, script, *flags]]
    assert launched(words, gpus) == (0, expected)
    assert processes == 1 or os.environ["PYTHONPATH"] == f"{HERE}:mine"


def test_runs_have_different_seeds_and_names_and_end_with_their_statistics(launched):
    words = "--muon_lr 0.06 --seed=5 --run_id mine --device cpu"
    run = [sys.executable, f"{HERE}/tools/launch.py", SCRIPT, "--keep", "0", *words.split()]
    logs = [f"logs/mine_seed{seed}.txt" for seed in (5, 6)]
    expected = [
        [*run, "--seed", "5", "--run_id", "mine_seed5"],
        [*run, "--seed", "6", "--run_id", "mine_seed6"],
        [sys.executable, f"{HERE}/tools/leaderboard.py", *logs],
    ]
    assert launched(f"--runs 2 {words}") == (0, expected)
    assert launched(f"{words} --runs=3", failing="mine_seed6") == (3, expected[:2])


@pytest.mark.parametrize(
    ("nproc", "gpus", "words", "message"),
    [
        ("3", 8, "--record 2025", "train_gpt.py: error: NPROC=3: .* allow 1, 2, 4, 8"),
        ("4", 2, "--record 2025", "train_gpt.py: error: NPROC=4: .* allow 1, 2"),
        ("", 8, f"{FORK} --seq_len 5", "train_gpt_2026.py: error: --seq_len 5: must be"),
        ("", 8, f"{FORK} --runs 3 --seq_len 5", "train_gpt_2026.py: error: --seq_len 5: must be"),
        ("", 8, "--runs 0", "train_gpt.py: error: --runs 0: must be 1 or more"),
        ("", 8, "--runs", "train_gpt.py: error: argument --runs: expected one argument"),
        ("", 8, "no_such.py --runs 2", "run.sh: error: there is no script no_such.py"),
    ],
)
def test_a_users_mistake_starts_nothing(nproc, gpus, words, message, launched, monkeypatch, capsys):
    monkeypatch.setenv("NPROC", nproc)
    assert launched(words, gpus) == (1, [])
    err = capsys.readouterr().err
    assert re.match(message, err) and err.count("\n") == 1


# ---- run.sh, with a Python that only says what it is asked to do


@pytest.fixture
def shell(tmp_path):
    """Return shell(words): it runs a copy of run.sh whose Python can train, and returns what that
    starts, a line each."""
    for folder in ("", "tools", "tests", "data"):
        (tmp_path / folder).mkdir(exist_ok=True)
        shutil.copy(HERE / folder / "requirements.txt", tmp_path / folder)
    for path in (HERE / "run.sh", *HERE.glob("tools/*.py")):
        shutil.copy(path, tmp_path / path.relative_to(HERE))
    (tmp_path / "tests" / "slow").mkdir()
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    shutil.copy(HERE / "requirements.txt", tmp_path / ".venv" / ".installed-run")
    stub.write_text('#!/bin/sh\necho "$*"\n')
    stub.chmod(0o755)
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "$GPUS"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)

    def call(words: str, gpus: str = ""):
        command = [tmp_path / "run.sh", *words.split()]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GPUS": gpus}
        options = {"env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=tmp_path, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.replace(f"{tmp_path}/", "").splitlines()

    return call


@pytest.mark.parametrize(
    ("words", "folders", "started"),
    [
        ("", [], "tools/launch.py"),
        ("tools/evaluate x.pt", ["data"], "tools/evaluate.py x.pt"),
        ("--runs 2 --seed 3", ["tools"], "tools/launch.py --runs 2 --seed 3"),
        ("--compare A B", ["tools"], "tools/compare.py --compare A B"),
        (f"--ablate {FORK}", ["tools"], f"tools/ablate.py --ablate {FORK}"),
        ("test", ["tools", "tests"], "-m pytest -n auto --maxprocesses 4 --dist worksteal"),
        ("test slow -q", ["tools", "tests"], "-m pytest tests/slow -q"),
    ],
)
def test_run_sh_installs_what_a_command_needs_once(words, folders, started, shell, tmp_path):
    *before, last = shell(words)
    assert last == started
    assert len([line for line in before if "pip install" in line]) == len(folders)
    for folder in folders:
        wanted = (tmp_path / folder / "requirements.txt").read_text()
        assert (tmp_path / ".venv" / f".installed-{folder}").read_text() == wanted
    assert shell(words) == [started]
    if words == "test":
        assert shell("test", gpus="GPU 0: NVIDIA H100") == ["-m pytest"]


@cache
def imports_of(path: Path) -> set[str]:
    """Return the packages that are imported with a file, through files of the project, too."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    places = [HERE / folder / f"{name}.py" for name in names for folder in ("", "tools", "data")]
    own = [place for place in places if place.exists()]
    found = names - {place.stem for place in own} - sys.stdlib_module_names
    return found.union(*map(imports_of, own))


def test_what_a_tool_imports_is_installed_for_it(shell, tmp_path):
    for tool in sorted(HERE.glob("tools/*.py")):
        if "__main__" not in tool.read_text():
            continue
        shell(f"tools/{tool.name}")
        marks = list(tmp_path.glob(".venv/.installed-*"))
        installed = set(re.findall(r"(?m)^[\w-]+", "".join(mark.read_text() for mark in marks)))
        assert imports_of(tool) <= installed, tool
        for mark in marks:
            if mark.name != ".installed-run":
                mark.unlink()
