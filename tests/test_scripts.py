"""Copies of train_gpt.py, forks that import it, and checkpoints: how tools find and start them."""

import contextlib
import shutil
import sys
from pathlib import Path

import evaluate
import launch
import pytest
import script
import torch
from runs import SCRIPT, Program, error_of, run, val_losses

import train_gpt
from train_gpt import HERE, UserError

FRONTIER = HERE / "forks" / "train_gpt_2026.py"
RULE = "=" * 100
pytestmark = pytest.mark.usefixtures("modules")


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Forget a test's scripts, and give the project's modules of their names back. Functions with
    twins are known by name, too."""
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    before = dict(sys.modules)
    if "gpu_kernels" in before:
        plain = dict(before["gpu_kernels"].PLAIN)
        monkeypatch.setattr(before["gpu_kernels"], "PLAIN", plain)
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(before)


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
    return Path(shutil.copy(HERE / "tests" / "small_fork.py", tmp_path / "its_own.py"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", SCRIPT),
        ("logs/x/state_step000128.pt", SCRIPT),
        ("train_gpt.py --seed 3", SCRIPT),
        ("train_gpt_2026.py", FRONTIER),
        ("forks/train_gpt_2026.py", FRONTIER),
        ("its_own.py --seed 3", "its_own.py"),
        ("~/mine/train_gpt.py", "mine/train_gpt.py"),
    ],
)
def test_a_script_is_a_path_or_a_name_in_the_project_in_forks_or_here(
    words, expected, copy, fork, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    rest = [word for word in words.split() if not word.endswith(".py")]
    assert script.take_script(words.split()) == (tmp_path / expected, rest)


def test_a_missing_or_ambiguous_script_is_said_with_those_that_exist(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    with pytest.raises(UserError, match="there is no script no_such.py:.* such as train_gpt.py, f"):
        script.find("no_such.py")
    with pytest.raises(UserError, match=f"{copy} and {SCRIPT}: name one with its folder"):
        script.find("train_gpt.py")


def test_a_fork_has_the_project_s_functions_and_a_copy_its_own(fork, copy):
    for path in (Path(SCRIPT), FRONTIER, fork, copy):
        run_class = script.load(path)
        assert train_gpt.script_of(run_class) == path and script.load(path) is run_class
        core = script.core(run_class)
        assert Path(core.__file__) == (path if path == copy else Path(SCRIPT))
        with pytest.raises(UserError, match="--seq_len 5: must be"):
            core.parse_args(["--seq_len", "5"], run_class)
    assert core.parse_args([], run_class)[0].muon_lr == 0.2


def test_a_script_imports_what_lies_beside_it_rather_than_the_project_s(fork, monkeypatch):
    monkeypatch.delitem(sys.modules, "cached_fineweb", raising=False)
    (fork.parent / "cached_fineweb.py").write_text("HALF = 0.5\n")
    fork.write_text(f"import cached_fineweb\n{fork.read_text()}")
    script.load(fork)
    assert Path(sys.modules["cached_fineweb"].__file__).parent == fork.parent


def test_modules_of_another_project_are_not_mixed_with_these(fork, copy):
    """Python, started with that script, would import its own project's."""
    (copy.parent / "forks").mkdir()
    for place in (copy.parent, copy.parent / "forks"):
        path = Path(shutil.copy(fork, place))
        with pytest.raises(UserError, match=f"{path} imports {copy}, which is not {SCRIPT}"):
            script.load(path)


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


# ---- The checkpoint that a tool reads


@pytest.fixture
def saved(trained, tmp_path, monkeypatch):
    """Return save(name, **changed): it writes the trained checkpoint, changed, under logs/."""
    monkeypatch.chdir(tmp_path)
    state = torch.load(trained.path, weights_only=True)

    def save(name: str, **changed) -> Path:
        path = Path("logs", name, "state_step000008.pt")
        path.parent.mkdir(parents=True)
        torch.save(state | changed, path)
        return path

    save.settings = state["hyperparameters"]
    return save


def test_the_newest_checkpoint_that_a_tool_can_use_is_named_with_its_script(saved, fork, capsys):
    """Of a path the name alone counts: a checkpoint cannot choose a file elsewhere."""
    saved("first")
    shutil.copy(SCRIPT, "copy_of_it.py")
    used = saved("used", script=f"{fork.parent}/elsewhere/copy_of_it.py")
    saved("lost", script="no_longer_there.py")
    saved("words", hyperparameters=saved.settings | {"vocab_size": 512})
    saved("half").write_bytes(used.read_bytes()[:9999])
    evaluate.main(["--device", "cpu"])
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{used}, saved by {fork.parent}/elsewhere/copy_of_it.py\nval_loss")
    lines = shown.err.splitlines()
    assert len(lines) == 3 and all(line.endswith("; trying an older one") for line in lines)
    evaluate.main(["--run_id", "first", "--device", "cpu"])
    evaluate.main(["--script", SCRIPT, "--device", "cpu"])
    assert capsys.readouterr().out.count("logs/first/state_step000008.pt, saved by train_gpt") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no checkpoint under logs/: train a model first, or name one"),
        ("logs/none.pt", "there is no checkpoint logs/none.pt"),
        ("--seed 3 it.pt", "it.pt: name the checkpoint first, before all flags"),
        ("logs/lost/state_step000008.pt", "was saved by lost.py; there is no script lost.py"),
    ],
)
def test_without_a_checkpoint_a_tool_ends_with_one_line(words, message, saved, capsys):
    if "lost" in words:
        saved("lost", script="lost.py")
    status, err = error_of(words.split(), capsys, evaluate.main)
    assert status == 1 and err.startswith("evaluate.py: error: ") and message in err
