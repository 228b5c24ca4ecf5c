"""run.sh and tools/launch.py: what they install, fetch and start."""

import ast
import importlib.util
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
        handled = []

        def call(command, **options):
            if "--run_id" in command:  # one of several: it shall save on Ctrl-C, and not be killed
                assert handled == [signal.SIGINT]
            calls.append(command)
            return SimpleNamespace(returncode=3 * (failing in command))

        def take_place(program, command):
            calls.extend(["exec", command])
            sys.exit(0)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "run", call)
        monkeypatch.setattr(signal, "signal", lambda number, action: handled.append(number))
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
    ("gpus", "words", "processes", "shards"),
    [
        (1, "--num_iterations 3", 1, 1),
        (3, "--batch_seqs=4", 2, 4),
        (8, "--device=cpu", 1, 0),
        (8, f"{FORK}", 8, 7),  # 1.6 times 395.8M tokens
        (8, f"{FORK} --record 2026-01-04_MixedPrecisionInterweavedOptimizer", 8, 8),  # 487.6M
    ],
)
def test_a_run_has_a_divisor_of_the_batch_and_the_shards_it_reads(
    gpus, words, processes, shards, launched, capsys
):
    status, calls = launched(words, gpus)
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
        assert os.environ["PYTHONPATH"] == f"{HERE}:mine"
    assert (status, calls) == (0, expected)
    said = f"{gpus} GPUs cannot share" in capsys.readouterr().err
    assert said == (gpus > 1 and processes not in (1, gpus))


def test_nproc_has_the_last_word(launched, monkeypatch, capsys):
    monkeypatch.setenv("NPROC", "2")
    for words, gpus in (("--record demo", 2), ("--device cpu", 0)):
        assert "--nproc_per_node=2" in launched(words, gpus)[1][-1]
    monkeypatch.setenv("NPROC", "1")
    assert launched("--record demo", 8) == (0, ["here"])
    for wanted, gpus, said in (
        ("3", 8, "8 sequences can be shared by 1, 2, 4, 8 processes"),
        ("4", 2, "this machine has 2 GPUs"),
    ):
        monkeypatch.setenv("NPROC", wanted)
        assert launched("--record 2025-01-26_BatchSize", gpus) == (1, [])
        assert f"NPROC={wanted}: {said}" in capsys.readouterr().err


def test_a_python_without_huggingface_hub_gets_it(launched, monkeypatch):
    """Such as a container's Python, which is used without a virtual environment."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n.startswith("hug") else find(n)
    )
    target = ["--target", f"{HERE}/.venv/hub"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *target, "huggingface-hub"]
    assert launched("", 1)[1][0] == pip
    status, calls = launched("", 1, failing=f"{HERE}/cached_fineweb.py")
    assert status == 3 and len(calls) == 2


def test_runs_have_different_seeds_and_names_and_end_with_their_statistics(launched):
    words = "--muon_lr 0.06 --seed=5 --run_id mine --device cpu"
    status, calls = launched(f"--runs 2 {words}")
    run = [sys.executable, f"{HERE}/tools/launch.py", SCRIPT, "--keep", "0", *words.split()]
    logs = [f"logs/mine_seed{seed}.txt" for seed in (5, 6)]
    assert status == 0 and calls == [
        [*run, "--seed", "5", "--run_id", "mine_seed5"],
        [*run, "--seed", "6", "--run_id", "mine_seed6"],
        [sys.executable, f"{HERE}/tools/leaderboard.py", *logs],
    ]
    status, calls = launched(f"{words} --runs=3", failing="mine_seed6")
    assert status == 3 and len(calls) == 2  # the one that fails is the last one
    status, calls = launched(f"{words} --runs 1", failing=f"{HERE}/tools/leaderboard.py")
    assert status == 3 and len(calls) == 2


def test_a_users_mistake_starts_nothing_and_names_the_script(launched, capsys):
    for words in ("--runs 3 --seq_len 5", "--seq_len 5"):
        assert launched(f"{FORK} {words}", 8) == (1, [])
        assert capsys.readouterr().err.startswith("train_gpt_2026.py: error: --seq_len 5: must be")
    assert launched("no_such.py --runs 2", 8) == (1, [])
    err = capsys.readouterr().err
    assert err.startswith("run.sh: error: there is no script ") and err.count("\n") == 1


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
    for folder in ("gpu", "slow"):
        (tmp_path / "tests" / folder).mkdir()
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


TESTS = ["tools", "tests"]


@pytest.mark.parametrize(
    ("words", "folders", "started"),
    [
        ("", [], "tools/launch.py"),
        ("tools/hellaswag x.pt", ["data"], "tools/hellaswag.py x.pt"),
        ("--runs 2 --seed 3", ["tools"], "tools/launch.py --runs 2 --seed 3"),
        ("--compare A B", ["tools"], "tools/compare.py --compare A B"),
        (f"--ablate {FORK}", ["tools"], f"tools/ablate.py --ablate {FORK}"),
        ("test", TESTS, "-m pytest -n auto --maxprocesses 4 --dist worksteal"),
        ("test slow -q", TESTS, "-m pytest tests/slow -q"),
        ("test tests/test_a.py::test_it", TESTS, "-m pytest tests/test_a.py::test_it"),
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


def test_on_a_gpu_one_process_runs_all_tests(shell):
    assert shell("test", gpus="GPU 0: NVIDIA H100")[-1] == "-m pytest"


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


TOOLS = [path for path in sorted(HERE.glob("tools/*.py")) if "__main__" in path.read_text()]


def test_what_a_tool_imports_is_installed_for_it(shell, tmp_path):
    for tool in TOOLS:
        shell(f"tools/{tool.name}")
        marks = [*tmp_path.glob(".venv/.installed-*")]
        installed = set(re.findall(r"(?m)^[\w-]+", "".join(mark.read_text() for mark in marks)))
        assert imports_of(tool) <= installed, tool
        for mark in marks:
            if mark.name != ".installed-run":
                mark.unlink()
