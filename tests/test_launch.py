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
        monkeypatch.setattr(train_gpt, "work", lambda parsed, run_class: calls.append("here"))
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
        (8, "--num_iterations 255", 8, 2),
        (5, "", 4, 7),
        (3, "--batch_seqs=4", 2, 4),
        (8, "--record=2024-11-24_WindowWarmup", 8, 10),
        (8, "--device=cpu", 1, 0),
        (8, "--train_files x", 8, 0),
        (8, f"{FORK}", 8, 7),  # 1.6 times 395.8M tokens
        (8, f"{FORK} --align_to_documents off --stages length=1", 8, 2),  # 195.3M tokens
        (8, f"{FORK} --record 2025-08-23_SparseAttnGate", 8, 7),  # 1.03 times 666.5M tokens
        (8, f"{FORK} --record 2026-01-04_MixedPrecisionInterweavedOptimizer", 8, 8),  # 487.6M
        (8, f"{FORK} --record demo", 4, 0),
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
    shares = "8 sequences can be shared by 1, 2, 4, 8 processes"
    for wanted, gpus, said in (
        ("two", 8, shares),
        ("3", 8, shares),
        ("0", 0, shares),
        ("4", 2, "this machine has 2 GPUs"),
    ):
        monkeypatch.setenv("NPROC", wanted)
        assert launched("--record 2025-01-26_BatchSize", gpus) == (1, [])
        assert f"NPROC={wanted}: {said}" in capsys.readouterr().err


def test_help_starts_nothing(launched, capsys):
    for script in ("", FORK):
        assert launched(f"{script} --help", 8) == (0, [])
        assert "--muon_lr float" in capsys.readouterr().out


def test_a_python_without_huggingface_hub_gets_it(launched, monkeypatch, capsys):
    """Such as a container's Python, which is used without a virtual environment."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n.startswith("hug") else find(n)
    )
    target = ["--target", f"{HERE}/.venv/hub"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *target, "huggingface-hub"]
    assert launched("", 1)[1][0] == pip
    assert launched("", 1, failing="pip") == (1, [pip])
    assert "pip could not install huggingface-hub" in capsys.readouterr().err
    status, calls = launched("", 1, failing=f"{HERE}/cached_fineweb.py")
    assert status == 3 and len(calls) == 2


def test_runs_have_different_seeds_and_names_and_end_with_their_statistics(launched, capsys):
    words = "--muon_lr 0.06 --seed=5 --run_id mine --device cpu"
    status, calls = launched(f"--runs 2 {words}")
    run = [sys.executable, f"{HERE}/tools/launch.py", SCRIPT, "--save_last", "off", *words.split()]
    logs = [f"logs/mine_seed{seed}.txt" for seed in (5, 6)]
    assert status == 0 and calls == [
        [*run, "--seed", "5", "--run_id", "mine_seed5"],
        [*run, "--seed", "6", "--run_id", "mine_seed6"],
        [sys.executable, f"{HERE}/tools/leaderboard.py", *logs],
    ]
    assert "2 runs, logs in logs/mine_seed*.txt" in capsys.readouterr().err
    status, calls = launched(f"{words} --runs=3", failing="mine_seed6")
    assert status == 3 and len(calls) == 2  # the one that fails is the last one
    status, calls = launched(f"{words} --runs 1", failing=f"{HERE}/tools/leaderboard.py")
    assert status == 3 and len(calls) == 2


@pytest.mark.parametrize("words", ["--runs", "--runs=", "--runs 0", "--runs=many"])
def test_a_number_of_runs_is_wanted(words, launched, capsys):
    assert launched(f"--device cpu {words}") == (2, [])
    assert "must be a number of runs" in capsys.readouterr().err


def test_a_users_mistake_starts_nothing_and_names_the_script(launched, capsys):
    for script in (SCRIPT, FORK):
        for words in ("--runs 3 --seq_len 5", "--seq_len 5"):
            assert launched(f"{script} {words}", 8) == (2, [])
            name = os.path.basename(script)
            assert capsys.readouterr().err.startswith(f"{name}: error: --seq_len 5: must be")
    for words in ("no_such.py --runs 2", "--script forks/no_such.py"):
        assert launched(words, 8) == (2, [])
        err = capsys.readouterr().err
        assert err.startswith("run.sh: error: there is no script ") and err.count("\n") == 1


# ---- run.sh, with a Python that only says what it is asked to do


@pytest.fixture
def shell(tmp_path):
    """Return shell(words): it runs a copy of run.sh whose Python can train, and returns what that
    starts, a line each; with a status other than 0, the lines of run.sh's error."""
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

    def call(words: str, says: str = "$*", folder: str = "", status: int = 0, **environment):
        stub.write_text(f'#!/bin/sh\necho "{says}"\n')
        stub.chmod(0o755)
        done = subprocess.run(
            [tmp_path / "run.sh", *words.split()],
            cwd=tmp_path / folder,
            env={"PATH": "/usr/bin:/bin", **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stderr
        said = done.stderr if status else done.stdout
        return said.replace(f"{tmp_path}/", "").splitlines()

    return call


def pretend(run_sh: Path, test: str, answer: str) -> None:
    """Give a test of the shell script an answer; root, who may write everywhere, has another."""
    text = run_sh.read_text()
    assert text.count(test) == 1
    run_sh.write_text(text.replace(test, answer))


CACHES = {"TORCHINDUCTOR_CACHE_DIR": ".cache/inductor", "TRITON_CACHE_DIR": ".cache/triton"}


def test_run_sh_keeps_compiled_code_in_the_project_if_it_can_be_written(shell, tmp_path):
    """Unless the user has said otherwise."""
    says = " ".join(f"${name}" for name in CACHES)
    assert shell("", says) == [" ".join(CACHES.values())]
    for name in CACHES:
        expected = {**CACHES, name: "mine"}
        assert shell("", says, **{name: "mine"}) == [" ".join(expected.values())]
    pretend(tmp_path / "run.sh", '[ -w "$here" ]', "false")
    assert shell("", f"<{says}>") == ["< >"]


TESTS = ["tools", "tests"]


@pytest.mark.parametrize(
    ("words", "folders", "started"),
    [
        ("", [], "tools/launch.py"),
        (f"{FORK} --adam_betas 0.8 0.9", [], f"tools/launch.py {FORK} --adam_betas 0.8 0.9"),
        ("tools/watch.py logs/x.txt", ["tools"], "tools/watch.py logs/x.txt"),
        ("tools/hellaswag x.pt", ["data"], "tools/hellaswag.py x.pt"),
        ("./tools/records --diff A B", [], "tools/records.py --diff A B"),
        ("tools/records.py logs/x.txt", ["tools"], "tools/records.py logs/x.txt"),
        ("--runs 2 --seed 3", ["tools"], "tools/launch.py --runs 2 --seed 3"),
        ("--seed 3 --runs=2", ["tools"], "tools/launch.py --seed 3 --runs=2"),
        ("--compare A B", ["tools"], "tools/compare.py --compare A B"),
        ("x.py --compare A B --runs 3", ["tools"], "tools/compare.py x.py --compare A B --runs 3"),
        (f"--ablate {FORK}", ["tools"], f"tools/ablate.py --ablate {FORK}"),
        ("test -q", TESTS, "-m pytest -q"),
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


def test_a_tool_that_is_not_there_is_said_with_those_that_are(shell):
    known = " ".join(f"tools/{tool.name}" for tool in TOOLS)
    for words, name in (("tools/sampel.py", "tools/sampel.py"), ("tools", "tools.py")):
        assert shell(words, status=1) == [f"run.sh: there is no {name}; there are {known}"]


@pytest.mark.parametrize(
    ("folder", "words", "expected"),
    [
        ("", "-k test_b", "-k test_b"),
        ("", "slow -q", "tests/slow -q"),
        ("", "gpu", "tests/gpu"),
        ("elsewhere", "", "-n auto --maxprocesses 4 --dist worksteal"),
        ("elsewhere", "tests/test_a.py", "tests/test_a.py"),
        ("tests/gpu", "../test_a.py::test_it", "tests/gpu/../test_a.py::test_it"),
        ("tests", "test_a.py", "tests/test_a.py"),
        ("tests/gpu", "./test_b.py", "tests/gpu/./test_b.py"),
    ],
)
def test_run_sh_starts_pytest_in_the_project_with_paths_from_the_current_folder(
    folder, words, expected, shell, tmp_path
):
    for name in ("test_a.py", "gpu/test_b.py", "slow/test_c.py"):
        (tmp_path / "tests" / name).write_text("")
    (tmp_path / "elsewhere").mkdir()
    shell("test")  # installs
    said = shell(f"test {words}", "$PWD: $*", folder)
    assert said == [f"{tmp_path}: -m pytest {expected}".rstrip()]


def test_pytest_collects_all_but_the_slow_tests_unless_they_are_named(tmp_path):
    shutil.copy(HERE / "pyproject.toml", tmp_path)
    for name in ("test_a.py", "gpu/test_b.py", "slow/test_c.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("def test_it(): pass\n")
    for words, expected in ((), ["a", "b"]), (("tests/slow",), ["c"]):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert sorted(re.findall(r"test_(\w)\.py::test_it", done.stdout)) == expected


@pytest.mark.parametrize("words", ["setup", "tools/sample.py"])
def test_where_nothing_can_be_installed_that_is_said_in_one_line(words, shell, tmp_path):
    """In a project without packages, and in one without those of the tools."""
    pretend(tmp_path / "run.sh", '[ ! -w "$place" ]', "true")
    if words == "setup":
        (tmp_path / ".venv" / ".installed-run").unlink()
    assert shell(words, status=1, PYTHON="/bin/false") == [
        "run.sh: cannot write to .venv, where packages are to be installed: "
        "copy the project to a folder that you can write to, and start it there"
    ]
