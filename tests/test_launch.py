"""run.sh and tools/launch.py: what they install, fetch and start."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import launch
import pytest
import torch
import train_gpt_2026
from runs import SCRIPT, error_of

import train_gpt
from train_gpt import HERE

FORK = "forks/train_gpt_2026.py"

# ---- tools/launch.py, on machines with any number of GPUs


@pytest.mark.parametrize(
    ("nproc", "gpus", "processes"), [("", 3, 2), ("", 16, 8), ("", 0, 1), ("2", 8, 2), ("4", 0, 4)]
)
def test_a_batch_of_8_has_a_number_of_processes_that_divides_it(
    nproc, gpus, processes, monkeypatch
):
    monkeypatch.setenv("NPROC", nproc)
    assert launch.processes(8, gpus) == processes


@pytest.mark.parametrize(
    ("run", "words", "shards"),
    [
        (train_gpt.Run, "--record 2025 --num_iterations 3", 1),
        (train_gpt.Run, "--record 2024-11-24", 10),  # 917.5M tokens
        (train_gpt.Run, "--record 2025-01-26", 7),  # 696.0M
        (train_gpt_2026.Run, "--record 2026-01-04", 8),  # 1.6 times 487.6M
    ],
)
def test_a_run_fetches_the_shards_that_it_reads_and_is_replaced_by_torchrun(
    run, words, shards, monkeypatch
):
    calls = []
    path, words = train_gpt.script_of(run), [*words.split(), "--device", "cuda"]
    monkeypatch.setattr(launch, "call", lambda command: calls.append(command[1:]))
    monkeypatch.setattr(os, "execv", lambda program, command: sys.exit(command[1:]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit) as end:
        launch.start([str(path), *words])
    assert calls == [[str(shards)]]
    assert end.value.code[2:] == ["--standalone", "--nproc_per_node=8", str(path), *words]


def test_runs_have_different_seeds_and_names_and_end_with_their_statistics(monkeypatch):
    calls = []

    def call(command):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # the run saves
        calls.append(command)

    monkeypatch.setattr(launch, "call", call)
    words = ["--muon_lr", "0.06", "--seed=5", "--run_id", "it", "--device", "cpu"]
    launch.start([*words, "--runs", "2"])
    run = [launch.__file__, SCRIPT, "--keep", "0", *words]
    assert calls == [
        [*run, "--seed", "5", "--run_id", "it_seed5"],
        [*run, "--seed", "6", "--run_id", "it_seed6"],
        [f"{HERE}/tools/leaderboard.py", "logs/it_seed5.txt", "logs/it_seed6.txt"],
    ]


@pytest.mark.parametrize(
    ("nproc", "words", "message"),
    [
        ("3", "--record 2025", "NPROC=3: .* allow 1, 2, 4, 8$"),
        ("", f"{FORK} --runs 3 --seq_len 5", "--seq_len 5: must be"),
        ("", "--runs 0", "--runs 0: must be 1 or more"),
    ],
)
def test_a_users_mistake_is_one_line(nproc, words, message, monkeypatch, capsys):
    monkeypatch.setenv("NPROC", nproc)
    monkeypatch.setattr(sys, "argv", ["launch.py", *words.split()])
    status, err = error_of([], capsys, lambda _: launch.main())
    assert status == 1 and re.match(f"run.sh: error: {message}", err)


# ---- run.sh, with a Python that only says what it is asked to do


@pytest.fixture
def shell(tmp_path):
    """Return shell(words): it runs a copy of run.sh whose Python can train, and returns what that
    starts, a line each, and the packages that are installed by then."""
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

    def call(words: str) -> tuple[list[str], set[str]]:
        command = [tmp_path / "run.sh", *words.split()]
        options = {"env": {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
        done = subprocess.run(command, cwd=tmp_path, **options)
        assert done.returncode == 0, done.stderr
        texts = [path.read_text() for path in tmp_path.glob(".venv/.installed-*")]
        installed = set(re.findall(r"(?m)^[\w-]+", "".join(texts)))
        return done.stdout.replace(f"{tmp_path}/", "").splitlines(), installed

    return call


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("--seed 3", "tools/launch.py --seed 3"),
        ("--runs 2 --seed 3", "tools/launch.py --runs 2 --seed 3"),
        ("--compare A B", "tools/compare.py --compare A B"),
        (f"--ablate {FORK}", f"tools/ablate.py --ablate {FORK}"),
        ("test", "-m pytest -n auto --maxprocesses 4 --dist worksteal"),
        ("test slow -q", "-m pytest tests/slow -q"),
    ],
)
def test_run_sh_starts_what_a_command_names_and_installs_once(words, started, shell):
    lines, installed = shell(words)
    assert lines[-1] == started and shell(words) == ([started], installed)
    assert ("pytest" in installed) == words.startswith("test")
    assert ("scipy" in installed) == (words != "--seed 3")


def imports_of(path: Path) -> set[str]:
    """Return the packages that are imported with a file, through files of the project, too."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    found = set()
    for name in names - sys.stdlib_module_names:
        places = [HERE / folder / f"{name}.py" for folder in ("", "tools", "data")]
        own = [place for place in places if place.exists()]
        found |= imports_of(own[0]) if own else {name}
    return found


@pytest.mark.parametrize("tool", sorted(HERE.glob("tools/*.py")), ids=lambda tool: tool.name)
def test_what_a_tool_imports_is_installed_for_it(tool, shell):
    if "__main__" in tool.read_text():
        assert imports_of(tool) <= shell(f"tools/{tool.name}")[1]
