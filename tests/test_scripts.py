"""Edited copies of train_gpt.py and forks that import it: how tools find, import and start them."""

import contextlib
import shutil
import sys
from pathlib import Path

import launch
import pytest
import script
from runs import SCRIPT, Program, run, val_losses

import train_gpt
from train_gpt import HERE, UserError

FRONTIER = HERE / "forks" / "train_gpt_2026.py"
SMALL_FORK = HERE / "tests" / "small_fork.py"
RULE = "=" * 100


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Forget the modules of a test's folder, because other tests' scripts have the same names, and
    their functions that have twins."""
    if gpu_kernels := sys.modules.get("gpu_kernels"):
        monkeypatch.setattr(gpu_kernels, "PLAIN", dict(gpu_kernels.PLAIN))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return an edited copy of train_gpt.py, alone in another folder: matrices learn faster."""
    path = tmp_path / "mine" / "train_gpt.py"
    path.parent.mkdir()
    text = Path(SCRIPT).read_text()
    edited = text.replace("muon_lr: float = 0.05", "muon_lr: float = 0.2")
    assert edited != text
    path.write_text(edited)
    return path


@pytest.fixture
def fork(tmp_path) -> Path:
    """Return a fork that imports train_gpt.py, alone in another folder."""
    return Path(shutil.copy(SMALL_FORK, tmp_path / "its_own.py"))


# ---- Finding a script


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train_gpt.py", SCRIPT),
        ("train_gpt_2026.py", FRONTIER),
        ("its_own.py", "its_own.py"),
        ("~/mine/train_gpt.py", "mine/train_gpt.py"),
    ],
)
def test_a_script_is_a_path_or_a_name_in_the_project_in_forks_or_here(
    name, expected, copy, fork, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert script.find(name) == tmp_path / expected


def test_a_script_that_does_not_exist_is_said_with_those_that_do():
    said = "there is no script no_such.py:.* such as train_gpt.py, forks/train_gpt_2026.py"
    with pytest.raises(UserError, match=said):
        script.find("no_such.py")


@pytest.mark.parametrize(
    ("words", "expected", "rest"),
    [
        ("", SCRIPT, ""),
        ("logs/x/state_step000128.pt", SCRIPT, "logs/x/state_step000128.pt"),
        ("its_own.py --seed 3", "its_own.py", "--seed 3"),
        ("x.pt --script=its_own.py --seed 3", "its_own.py", "x.pt --seed 3"),
    ],
)
def test_the_script_is_the_first_word_or_that_of_a_flag(
    words, expected, rest, fork, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert script.take_script(words.split()) == (tmp_path / expected, rest.split())


# ---- Importing it


def test_a_fork_keeps_the_project_s_functions(fork):
    assert script.load(Path(SCRIPT)) is train_gpt.Run
    for path in (fork, FRONTIER):
        run_class = script.load(path)
        assert issubclass(run_class, train_gpt.Run) and run_class is not train_gpt.Run
        assert script.core(run_class) is train_gpt
        assert script.load(path) is run_class
        assert train_gpt.script_of(run_class) == path


def test_an_edited_copy_is_a_module_of_its_own(copy, tmp_path):
    """So are two copies of one name."""
    other = Path(shutil.copy(copy, tmp_path))
    for path in (copy, other):
        run_class = script.load(path)
        core = script.core(run_class)
        assert not issubclass(run_class, train_gpt.Run) and core.Run is run_class
        assert core is not train_gpt and Path(core.__file__) == path
        assert train_gpt.script_of(run_class) == path
        hp, _ = core.parse_args(["--device", "cpu"], run_class)
        assert hp.muon_lr == 0.2
        with pytest.raises(UserError, match="--seq_len 5: must be"):
            core.parse_args(["--seq_len", "5"], run_class)
    assert script.load(copy) is not script.load(other)
    assert sys.modules["train_gpt"] is train_gpt


def test_a_script_imports_what_lies_beside_it_rather_than_the_project_s(fork, monkeypatch):
    monkeypatch.delitem(sys.modules, "cached_fineweb", raising=False)
    (fork.parent / "cached_fineweb.py").write_text("HALF = 0.5\n")
    fork.write_text(f"import cached_fineweb\n{fork.read_text()}")
    script.load(fork)
    assert Path(sys.modules["cached_fineweb"].__file__).parent == fork.parent


def test_modules_of_another_project_are_not_mixed_with_these(fork, copy):
    """Python, started with that script, would import its own project's."""
    shutil.copy(copy, fork.parent)
    with pytest.raises(UserError, match=f"{fork} imports .*, which is not {SCRIPT}: rename train_"):
        script.load(fork)


# ---- Starting it


SIZES = "--num_iterations 2 --val_loss_every 1 --batch_seqs 2 --val_tokens 512 --save_every 0"


def launched(words: list, folder: Path) -> dict[int, float]:
    """Call tools/launch.py in a process of its own, in a folder; return a run's losses by step."""
    with contextlib.chdir(folder):
        program = Program(words, work=launch_with)
        assert program.end() == [0], program.text("err")
    return val_losses(program.text("out"))


def launch_with(words: list[str]) -> None:
    """Do what tools/launch.py does with these words."""
    sys.argv = ["launch.py", *words]
    launch.main()


def beginning(run_id: str) -> str:
    """Return the first part of a run's log."""
    return Path("logs", f"{run_id}.txt").read_text().partition(f"\n{RULE}")[0]


def test_copies_and_forks_train_as_flags_of_the_same_effect_would(flags, copy, fork, tmp_path):
    """A log begins with its script. The fork's rates are half of the record's."""
    words = [*flags, *SIZES.split()]
    faster = launched([*words, "--muon_lr", "0.2", "--run_id", "faster"], tmp_path)
    assert launched([copy, *words, "--run_id", "copy"], tmp_path) == faster
    assert launched(["its_own.py", *words, "--speed", "1", "--muon_lr", "0.2"], tmp_path) == faster
    assert beginning("copy") == copy.read_text()
    assert beginning("faster") == Path(SCRIPT).read_text()


def test_several_processes_find_the_project_from_a_fork_elsewhere(
    flags, fork, tmp_path, monkeypatch
):
    """Under the real torchrun."""
    words = [str(fork), *flags, *SIZES.split(), "--adam_eps", "1e-6"]
    alone = launched([*words, "--run_id", "alone"], tmp_path)
    assert len(alone) == 3 and beginning("alone") == fork.read_text()
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = run(words, script=launch.__file__)
    assert done.returncode == 0, done.stderr
    assert "on 2 x CPU" in done.stdout
    assert val_losses(done.stdout) == pytest.approx(alone, abs=1.5e-4)
