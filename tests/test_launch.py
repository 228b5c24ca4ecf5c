"""run.sh, tools/launch.py and tools/start.py: what they install, fetch and start."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import launch
import leaderboard
import machine
import result
import script
import start
import tokenizer
import train_gpt
from runs import HANGS, error_of
from train_gpt import HERE

PARALLEL = " -n auto --maxprocesses 4 --dist worksteal"
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(("nproc", "gpus", "processes"), [("", 3, 2), ("", 0, 1), ("2", 8, 2)])
def test_a_batch_of_8_has_a_number_of_processes_that_divides_it(
    nproc, gpus, processes, monkeypatch
):
    monkeypatch.setenv("NPROC", nproc)
    assert launch.processes(8, gpus) == processes
    monkeypatch.setenv("NPROC", "3")
    with pytest.raises(train_gpt.UserError, match="NPROC=3: .* --batch_seqs 8 allow 1, 2"):
        launch.processes(8, gpus)


@pytest.mark.parametrize(
    ("fork", "words", "shards"),
    [
        ("train_gpt.py", "--record 2025 --num_iterations 3", 1),
        ("train_gpt.py", "--record 2025 --train_files mine_*.bin", 0),
        ("forks/train_gpt_2026.py", "--record 2025-08 --num_iterations 1000", 5),  # 1.03 x 393.2M
        ("train_gpt.py", "--record 2025-01-26", 7),
        ("forks/train_gpt_2026_08.py", "--record 2026-07-17", 6),  # 1.6 times 338.8M
    ],
)
def test_a_run_fetches_the_shards_that_it_reads_and_is_started_by_torchrun(
    fork, words, shards, monkeypatch
):
    fetched = []
    words = [*words.split(), "--device", "cuda"]

    def fetch(command):
        fetched.append(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fetch)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: sys.exit(command[1:]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "lacks", lambda: "")
    with pytest.raises(SystemExit) as end:
        start.main([fork, *words])
    assert fetched == ([[str(shards)]] if shards else [])
    expected = ["--standalone", "--local_addr=127.0.0.1", "--nproc_per_node=8"]
    expected += [f"{HERE}/{fork}", *words, "--run_id"]
    assert end.value.code[1:-1] == [f"{HERE}/tools/ranks.py", *expected]


def test_a_signal_that_comes_before_the_program_ends_it(monkeypatch):
    begin = subprocess.Popen

    def begin_late(*arguments, **options):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)
        return begin(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", begin_late)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    assert launch.start(hp, ["-c", "import time; time.sleep(100)"]).status == 128 + signal.SIGTERM


def test_processes_share_the_cores_of_a_job(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)  # it knows the job's cores
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: sys.exit(env))
    with pytest.raises(SystemExit) as end:
        launch.start(replace(train_gpt.RECORDS["demo"], device="cpu"), ["it.py"])
    assert end.value.code["OMP_NUM_THREADS"] == "3"


def test_finished_runs_of_a_group_are_not_made_again(flags, monkeypatch, capsys):
    """One that has a checkpoint goes on. Other flags, or another source, are refused. The runs'
    statistics follow."""
    made, stopped = [], []

    def train(path, words, group, **known) -> dict:
        hp, record = script.parse(path, words)
        made.append((hp.run_id, hp.seed, hp.resume))
        begin = result.Start(path, hp, record, {"group": group})
        if stopped:
            return {"exit": stopped.pop()}
        train_gpt.main(words)
        found = result.result_of(begin, result.End(0))
        result.note(found)
        return found

    def statistics(command) -> subprocess.CompletedProcess:
        with pytest.raises(SystemExit) as end:
            leaderboard.main(command[2:])
        return subprocess.CompletedProcess(command, end.value.code)

    def ended(words: str) -> tuple[int, list]:
        made.clear()
        with pytest.raises(SystemExit) as end:
            start.main([*flags, "--num_iterations", "2", "--run_id", "ten", *words.split()])
        return end.value.code, made

    monkeypatch.setattr(launch, "train", train)
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(run=statistics))
    assert ended("--runs 2") == (0, [("ten_seed1", 1, False), ("ten_seed2", 2, False)])
    assert not list(Path("logs").glob("*/*.pt"))
    capsys.readouterr()
    assert ended("--runs 3 --keep 1") == (0, [("ten_seed3", 3, False)])
    assert Path("logs/ten_seed3/state_step000002.pt").exists() and ended("--runs 0") == (1, [])
    assert re.search(r"\nA  +3  +\d\.\d{5} ", capsys.readouterr().out)
    rows = [(run["run"], run["group"]) for run in result.noted()]
    assert rows == [(f"ten_seed{seed}", "ten") for seed in (1, 2, 3)]
    assert ended("--runs 2 --val_loss_every 1 --save_every 1 --keep 1") == (0, [])
    assert ended("--runs 2 --muon_lr 0.1") == (1, [])
    reason = "logs/ten_seed1.txt was made without --muon_lr 0.1: choose another --run_id"
    assert reason in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(result, "digest", lambda path: "edited")
        assert ended("--runs 2") == (1, [])
        assert "was made by another source: choose" in capsys.readouterr().err

    for seed in (4, 5):
        Path(f"logs/ten_seed{seed}.txt").write_text("begun")
        Path(f"logs/ten_seed{seed}.jsonl").write_text("{}")
    assert ended("--seed 4 --runs 1") == (0, [("ten_seed4", 4, False)])
    (aside,) = Path("logs").glob("ten_seed4.txt_*.unfinished")
    assert aside.read_text() == "begun"
    Path("logs/ten_seed5").mkdir()
    Path("logs/ten_seed5/state_step000001.pt").touch()
    stopped.append(3)
    assert ended("--seed 5 --runs 1") == (3, [("ten_seed5", 5, True)])


def test_a_run_s_last_object_with_a_log_counts_and_torn_flags_are_left_out(capsys):
    """A kill has torn the first line. The run was resumed alone, and stays in its group; that of
    another one has moved its log away."""
    run = {"log": "it.txt", "status": "finished", "run": "base_seed3", "flags": "--seed 3"}
    result.RESULTS.parent.mkdir()
    result.RESULTS.write_text('{"kind": "r')
    result.note(run | {"group": "base", "status": "stopped"})
    result.note(run | {"run": "other", "steps": 1})
    result.note(run | {"run": "other", "steps": 2, "log": None})
    result.note(run)
    result.note(run | {"log": None, "status": "failed"})  # it was refused
    result.note(run | {"flags": "--bad '"})
    other, found = result.runs_noted()
    assert (found["group"], found["status"], found["flags"]) == ("base", "finished", "--seed 3")
    assert (other["run"], other["steps"]) == ("other", 2)
    assert 'an object is left out, because its flags is "--bad \'"\n' in capsys.readouterr().err


def test_a_name_that_is_taken_or_a_typo_starts_nothing_and_adds_no_line(monkeypatch, capsys):
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("a run was started"))
    Path("logs").mkdir()
    Path("logs/it.txt").write_text("a log")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    messages = {"--num_iteration 3": "unknown words", "": "it.txt exists: .* or --resume on"}
    messages["--device cuda"] = "--device cuda: torch finds no GPU here"
    with open("logs/it.txt") as log:
        for words, message in messages.items():
            _, err = error_of(["--run_id", "it", *words.split()], capsys, start.main)
            assert re.search(message, err)
        fcntl.flock(log, fcntl.LOCK_EX)
        _, err = error_of(["--run_id", "it"], capsys, start.main)
        assert "another process is writing logs/it.txt" in err
    assert not result.RESULTS.exists()


@pytest.mark.parametrize("what", ["a link", "a file", "results", "vocab.bpe", "its mask"])
def test_what_the_end_of_a_run_needs_is_looked_up_before_it_begins(what, monkeypatch, capsys):
    monkeypatch.setattr(launch, "start", lambda *_, **more: pytest.fail("a run was started"))
    words, logs = ["--device", "cpu"], Path("logs")
    if what == "a link":
        logs.symlink_to("nowhere")
    elif what == "a file":
        logs.touch()
    elif what == "results":
        (logs / "results.jsonl").mkdir(parents=True)
    elif what == "vocab.bpe":
        monkeypatch.setattr(tokenizer, "MERGES", Path("data/vocab.bpe"))
    else:
        words = ["forks/train_gpt_2026_08.py", *words]
        monkeypatch.setattr(train_gpt, "HERE", Path("alone"))
    message = {"vocab.bpe": "data/vocab.bpe is missing", "its mask": "alone/data/vocab.bpe is"}
    _, err = error_of(words, capsys, start.main)
    assert message.get(what, "error: could not write logs") in err


def test_the_bar_of_a_run_whose_lines_are_hidden_shows_what_its_own_would(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((100, 30)))
    hp = replace(train_gpt.RECORDS["demo"], run_id="it", num_iterations=80)
    live = launch.Live(Path("my.py"), hp, "pair 1 of 20, A")
    Path("logs").mkdir()
    row = {"step": 20, "train_loss": 4.5678, "ms": 1500.0, "tokens_per_s": 2048}
    Path("logs/it.jsonl").write_text(f"{train_gpt.to_json(row)}\n")
    live.check()
    bar = re.sub(r"\|.*\|", "|", str(live.bar))
    assert bar == "pair 1 of 20, A:  25%| 20/80, loss 4.568, 2.0k tokens/s, 01:30 left"


@pytest.mark.parametrize(("free", "needs"), [(23_999, True), (24_000, False)])
def test_a_disk_that_is_too_small_for_the_checkpoints_is_said_once(
    free, needs, monkeypatch, capsys
):
    """Two, of three numbers of four bytes for each parameter, once the log has their number."""
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda folder: usage)
    hp = replace(train_gpt.RECORDS["demo"], run_id="it", save_every=4, keep=2)
    live = launch.Live(Path("my.py"), hp, "")
    Path("logs").mkdir()
    live.check()
    log = Path("logs/it.txt")
    log.write_text("the source\n")
    live.check()
    log.write_text("the source\nparameters: 600 and 400 that ranks share out\n")
    for _ in range(2):
        live.check()
    said = "run.sh: checkpoints may need 0.0 GB, logs has 0.0 GB free\n"
    assert capsys.readouterr().err == said * needs


def copy_run_sh(project: Path) -> None:
    """Copy run.sh, the tools, and what they need installed."""
    for folder in ("", "tools", "tests", "data"):
        (project / folder).mkdir(exist_ok=True)
        shutil.copy(HERE / folder / "requirements.txt", project / folder)
    for path in (HERE / "run.sh", *HERE.glob("tools/*.py")):
        shutil.copy(path, project / path.relative_to(HERE))


@pytest.fixture
def shell(tmp_path):
    """Return shell(words): it runs a copy of run.sh whose Python can train, and returns what that
    starts, a line each, and the packages that are installed by then."""
    copy_run_sh(tmp_path)
    stub = tmp_path / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    shutil.copy(HERE / "requirements.txt", tmp_path / ".venv" / ".installed-run")
    stub.write_text('#!/bin/sh\necho "$*"\n')
    stub.chmod(0o755)

    def call(words: str) -> tuple[list[str], set[str]]:
        command = [tmp_path / "run.sh", *words.split()]
        options = {"env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}, "capture_output": True}
        done = subprocess.run(command, cwd=tmp_path, text=True, **options)
        assert done.returncode == 0, done.stderr
        texts = [path.read_text() for path in tmp_path.glob(".venv/.installed-*")]
        installed = set(re.findall(r"(?m)^[\w-]+", "".join(texts)))
        return done.stdout.replace(f"{tmp_path}/", "").splitlines(), installed

    return call


@pytest.mark.parametrize(
    ("words", "started", "with_scipy"),
    [
        ("--seed 3", "tools/start.py --seed 3", False),
        ("--runs 2 --seed 3", "tools/start.py --runs 2 --seed 3", True),
        ("--compare A B", "tools/compare.py --compare A B", True),
        ("test", f"-P -m pytest{PARALLEL}", True),
    ],
)
def test_run_sh_starts_what_a_command_names_and_installs_once(words, started, with_scipy, shell):
    lines, installed = shell(words)
    again, installed_again = shell(words)
    assert lines[-1] == again[-1] == started and installed_again == installed
    assert ("pytest" in installed) == words.startswith("test")
    assert ("scipy" in installed) == with_scipy


# A Python without torch. An environment made of it has a copy of it, and its pip notes each call.
MADE_UP = f"""#!/bin/sh
case "$*" in
"-P -") exit 1 ;;
*_base_executable*) echo "$0" ;;
"-P -m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-P -m pip"*)
    echo begin >>calls
    echo "Collecting torch" && until grep -q "ing, 2 s: C" err; do /bin/sleep 0.02; done
    echo end >>calls ;;
*fcntl*) exec {sys.executable} "$@" ;;
*) echo "NAME $*" ;;
esac
"""


def test_an_environment_is_made_once_of_the_python_that_is_named_while_run_sh_speaks(tmp_path):
    """Two commands at once install one after the other. What a killed setup leaves is replaced."""
    for name in ("run.sh", "requirements.txt"):
        shutil.copy(HERE / name, tmp_path)
    kills = MADE_UP.replace("mkdir", "kill -9 $PPID; mkdir")
    for name, text in {"python3.11": MADE_UP, "python3.12": MADE_UP, "kills": kills}.items():
        (tmp_path / name).write_text(text.replace("NAME", name))
        (tmp_path / name).chmod(0o755)

    def start(python: str, commands: int = 1) -> str:
        Path("err").write_text("")
        words = f"PATH={tmp_path}:/usr/bin:/bin PYTHON={python} ./run.sh --seed 3 2>>err"
        options = {"shell": True, "text": True, "stdout": subprocess.PIPE}
        started = [subprocess.Popen(words, **options) for _ in range(commands)]
        for process in started:
            out, _ = process.communicate(timeout=HANGS)
            assert out.splitlines()[-1] == f"{python} {tmp_path}/tools/start.py --seed 3"
        return Path("err").read_text()

    subprocess.run(["./run.sh"], env={"PATH": "/usr/bin:/bin", "PYTHON": "./kills"})
    assert Path(".venv/.made-by-run.sh").exists()
    Path(".venv/left").touch()
    assert "\nrun.sh: installing, 2 s: Collecting torch\n" in start("python3.11", 2)
    assert not Path(".venv/left").exists()
    assert Path("calls").read_text() == "begin\nend\n" * 2  # torch, then requirements.txt
    assert "installing" not in start("python3.11")
    replaced = f"run.sh: {tmp_path}/.venv is of another Python than python3.12: replacing it\n"
    assert replaced in start("python3.12")
    assert "replacing" not in start("python3.12")
    Path(".venv/bin/python").unlink()
    Path(".venv/bin/python").symlink_to("no_longer_there")
    assert f"setting up {tmp_path}/.venv (once)" in start("python3.12")


# A Python that prints what it is started for. Code of run.sh runs, with the packages of a folder.
PRINTS = f"""#!/bin/sh
lib="${{0%/bin/*}}/lib"
case "$*" in
*base_prefix*) echo "$0" ;;
*.py* | *"-m "*) echo "$0 $*$PYTHONSAFEPATH" ;;
*) PYTHONPATH="$lib" exec {sys._base_executable} -S "$@" ;;
esac
"""
TORCH = """
class cuda:
    is_available = bool  # its value is False
class version:
    cuda = None
__version__ = "2.13.0"
"""
TRAIN = "numpy torch tqdm"


def make_python(folder: Path, packages: str) -> None:
    """Write folder/bin/python, which has these packages."""
    for name in packages.split():
        (folder / "lib" / f"{name.replace('-', '_')}-1.dist-info").mkdir(parents=True)
        (folder / "lib" / f"{name}.py").write_text(TORCH if name == "torch" else "")
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (folder / "bin" / name).write_text(PRINTS)
        (folder / "bin" / name).chmod(0o755)


def said_by(command: str, project: Path) -> str:
    """Return what a command prints, with paths from here or from the project."""
    command = command.replace("./run.sh", f"'{project}/run.sh'")
    env = {"PATH": f"{Path.cwd()}/other/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True)
    said = re.sub(r"run\.sh: starting Python.*\n", "", done.stderr + done.stdout)
    for text in ("\\", f"{project}/", f"{Path.cwd()}/"):
        said = said.replace(text, "")
    return said.strip()


def files_of(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.glob("**/*") if path.is_file()}


NAMED = "PYTHON=other/bin/python3 ./run.sh"
HELPS = "not run.sh's to change. This helps: "
PIP = f"{HELPS}.venv/bin/python -m pip install -r"
OTHER_PIP = f"{HELPS}other/bin/python3 -m pip install -r"
UV = f"{HELPS}uv pip install --python .venv/bin/python -r"


@pytest.mark.parametrize(
    ("command", "packages", "others", "expected"),  # packages of .venv and of the other python3
    [
        ("./run.sh setup", TRAIN, "", "^.venv/bin/python tools/machine.py$"),
        ("PYTHONSAFEPATH=1 ./run.sh setup", TRAIN, "", "^.venv/bin/python tools/machine.py$"),
        ("bin/again setup", TRAIN, "", "^.venv/bin/python tools/machine.py$"),
        ("sh ./run.sh setup", TRAIN, "", "tools/machine.py$|^run.sh: this is a script of bash: "),
        ("./run.sh setup", "pip numpy", "", f"No module named 'torch'.*{PIP} requirements.txt"),
        ("./run.sh --runs 2", f"pip {TRAIN}", "", f"lacks scipy, .*{PIP} tools/requirements.txt"),
        ("./run.sh tools/sample", TRAIN, "", f"lacks tiktoken, .*{UV} data/requirements.txt"),
        (f"{NAMED} setup", TRAIN, "pip", f"'numpy'.*{OTHER_PIP} requirements.txt"),
    ],
)
def test_an_environment_of_the_user_is_used_or_advised_on_but_not_changed(
    command, packages, others, expected, tmp_path
):
    """From another folder, whatever characters are in names."""
    project = tmp_path / "a [b] c"
    copy_run_sh(project)
    make_python(project / ".venv", packages)
    make_python(tmp_path / "other", others)
    Path("bin").mkdir()
    Path("bin/run").symlink_to("../a [b] c/run.sh")
    Path("bin/again").symlink_to("run")
    before = files_of(tmp_path)
    assert re.search(expected, said_by(command, project))
    assert files_of(tmp_path) == before


def test_what_a_link_leads_to_is_not_replaced(tmp_path):
    """Packages are added if run.sh has made it, and it can train."""
    copy_run_sh(tmp_path)
    make_python(tmp_path / "other", "")
    make_python(tmp_path / "linked", "pip")
    (tmp_path / "linked" / ".made-by-run.sh").touch()
    Path(".venv").symlink_to("linked")
    before = files_of(tmp_path)
    assert PIP in said_by("./run.sh setup", tmp_path)
    assert f".venv is {HELPS}uv" in said_by(f"{NAMED} setup", tmp_path)
    assert files_of(tmp_path) == before
    shutil.copy("requirements.txt", "linked/.installed-run")
    assert said_by("./run.sh --runs 2", tmp_path).endswith("tools/start.py --runs 2")
    assert Path("linked/.installed-tools").exists() and before.items() <= files_of(tmp_path).items()


def test_no_file_of_the_current_folder_runs(tmp_path):
    """The help of a comparison needs no Python."""
    modules = "ast importlib numpy re runpy torch tqdm"
    for name in modules.split():
        Path(f"{name}.py").write_text(f"open('{tmp_path}/ran', 'a').write(__name__)\n")
    project = tmp_path / "project"
    copy_run_sh(project)
    for name in ("compare", "machine"):
        (project / f"tools/{name}.py").write_text('"""Its help.\n"""\nprint("__main__")\n')
    for named, words, printed in (
        (sys.executable, "setup", "__main__\n"),
        ("no_such", "--compare --help", "Its help.\n"),
    ):
        env = {"PATH": "/usr/bin:/bin", "PYTHON": named}
        command = [project / "run.sh", *words.split()]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.stdout == printed, done.stderr
    assert not Path("ran").exists()
