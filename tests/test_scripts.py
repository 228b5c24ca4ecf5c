"""Edited copies of train_gpt.py and forks that import it: how tools find, import and start them."""

import contextlib
import shutil
import sys
from pathlib import Path

import compare
import launch
import pytest
import script
import torch
from runs import SCRIPT, Program, run, val_losses

import train_gpt
from train_gpt import HERE, UserError

FRONTIER = HERE / "forks" / "train_gpt_2026.py"
SMALL_FORK = HERE / "tests" / "small_fork.py"
RULE = "=" * 100


@pytest.fixture(autouse=True)
def modules(tmp_path):
    """Forget the modules of a test's folder, because other tests' scripts have the same names."""
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
    edited = text.replace("muon_lr: float = setting(0.05,", "muon_lr: float = setting(0.2,")
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
        ("forks/train_gpt_2026.py", FRONTIER),
        ("train_gpt_2026.py", FRONTIER),
        ("its_own.py", "its_own.py"),
        ("./its_own.py", "its_own.py"),
        ("mine/train_gpt.py", "mine/train_gpt.py"),
        ("~/mine/train_gpt.py", "mine/train_gpt.py"),
    ],
)
def test_a_script_is_a_path_or_a_name_in_the_project_in_forks_or_here(
    name, expected, copy, fork, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert script.find(name) == tmp_path / expected


@pytest.mark.parametrize("name", ["no_such.py", "./train_gpt.py", "mine", "logs.txt", ""])
def test_what_is_no_script_is_refused_and_scripts_are_named(name, copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("logs.txt").write_text("")
    known = ".* such as train_gpt.py, forks/train_gpt_2026.py"
    with pytest.raises(UserError, match=f"there is no script {name}:{known}"):
        script.find(name)


def test_a_name_that_two_scripts_have_is_not_enough(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    with pytest.raises(UserError, match=f"there are {SCRIPT} and {copy}: name one with its folder"):
        script.find("train_gpt.py")
    assert script.find("./train_gpt.py") == copy


@pytest.mark.parametrize(
    ("words", "expected", "rest"),
    [
        ("", SCRIPT, ""),
        ("--seed 3", SCRIPT, "--seed 3"),
        ("logs/x/state_step000128.pt", SCRIPT, "logs/x/state_step000128.pt"),
        ("its_own.py --seed 3", "its_own.py", "--seed 3"),
        ("train_gpt_2026.py", FRONTIER, ""),
        ("--script its_own.py", "its_own.py", ""),
        ("x.pt --script its_own.py --seed 3", "its_own.py", "x.pt --seed 3"),
        ("x.pt --script=its_own.py --seed 3", "its_own.py", "x.pt --seed 3"),
        ("train_gpt.py --script its_own.py", "its_own.py", "train_gpt.py"),
        ("--seed 3 its_own.py", SCRIPT, "--seed 3 its_own.py"),
    ],
)
def test_the_script_is_the_first_word_or_that_of_a_flag(
    words, expected, rest, fork, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    argv = words.split()
    assert script.take_script(argv) == (tmp_path / expected, rest.split())
    assert argv == words.split()


def test_a_flag_without_its_script_is_said():
    with pytest.raises(UserError, match="--script wants a path, or the name of a file"):
        script.take_script(["--seed", "3", "--script"])


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
    """So are two copies of one name. Their errors are the project's UserError."""
    others = [tmp_path / name for name in ("train_gpt.py", "other.py")]
    for other in others:
        shutil.copy(copy, other)
    for path in (copy, *others):
        run_class = script.load(path)
        core = script.core(run_class)
        assert not issubclass(run_class, train_gpt.Run) and core.Run is run_class
        assert core is not train_gpt and Path(core.__file__) == path
        assert script.load(path) is run_class
        assert train_gpt.script_of(run_class) == path
        hp, _ = core.parse_args(["--device", "cpu"], run_class)
        assert hp.muon_lr == 0.2
        with pytest.raises(UserError, match="--seq_len 5: must be"):
            core.parse_args(["--seq_len", "5"], run_class)
    assert len({script.load(path) for path in (copy, *others)}) == 3
    assert train_gpt.RECORDS["demo"].muon_lr == 0.05
    assert sys.modules["train_gpt"] is train_gpt


@pytest.mark.parametrize("text", ["", "from train_gpt import Run\n", "Run = 1\n", "Run = print\n"])
def test_a_script_without_a_run_of_its_own_is_refused(text, tmp_path):
    path = tmp_path / "script_without.py"
    path.write_text(text)
    with pytest.raises(UserError, match=r'has no Run of its own: "class Run\(train_gpt.Run\)"'):
        script.load(path)


def test_a_script_that_cannot_be_imported_is_not_kept(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import train_gpt\nraise NameError('of the fork')\n")
    before = list(sys.path)
    with pytest.raises(NameError, match="of the fork"):
        script.load(path)
    assert "wrong" not in sys.modules and sys.path == before
    path.write_text(SMALL_FORK.read_text())
    assert script.load(path).default_record == "demo"


def test_a_script_imports_what_lies_beside_it_rather_than_the_project_s(fork, monkeypatch):
    monkeypatch.delitem(sys.modules, "cached_fineweb", raising=False)
    (fork.parent / "cached_fineweb.py").write_text("HALF = 0.5\n")
    fork.write_text(f"import cached_fineweb\n{fork.read_text()}")
    script.load(fork)
    assert Path(sys.modules["cached_fineweb"].__file__).parent == fork.parent


@pytest.mark.parametrize("folder", [".", "forks"])
def test_modules_of_another_project_are_not_mixed_with_these(folder, fork, copy, tmp_path):
    """Python, started with that script, would import its own project's."""
    path = tmp_path / folder / "of_another.py"
    path.parent.mkdir(exist_ok=True)
    shutil.copy(fork, path)
    shutil.copy(SCRIPT, tmp_path / "train_gpt.py")
    script.load(path)  # they are equal
    del sys.modules["of_another"]
    shutil.copy(copy, tmp_path / "train_gpt.py")
    with pytest.raises(UserError) as error:
        script.load(path)
    text = f"{path} imports {tmp_path / 'train_gpt.py'}, which is not {SCRIPT}: rename train_gpt.py"
    assert str(error.value).startswith(text)


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
    """This is the real torchrun, where only the launcher knows the project."""
    words = [str(fork), *flags, *SIZES.split(), "--adam_eps", "1e-6"]
    alone = launched([*words, "--run_id", "alone"], tmp_path)
    assert len(alone) == 3 and beginning("alone") == fork.read_text()
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = run(words, script=launch.__file__)
    assert done.returncode == 0, done.stderr
    assert "on 2 x CPU" in done.stdout
    assert val_losses(done.stdout) == pytest.approx(alone, abs=1.5e-4)


def test_a_copy_beside_the_original_trains_with_what_lies_there(flags, copy, tmp_path):
    """Its project's launcher starts it. Its log begins with it and has kernels.py. Its checkpoints
    and messages name it."""
    project = tmp_path / "project"
    shutil.copytree(HERE / "tools", project / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_gpt.py", "kernels.py"):
        shutil.copy(HERE / name, project / name)
    shutil.copy(copy, project / "faster.py")
    launcher = str(project / "tools" / "launch.py")
    done = run(["faster.py", *flags, "--run_id", "it"], script=launcher)
    assert done.returncode == 0, done.stderr
    log, kernels = Path("logs/it.txt").read_text(), (HERE / "kernels.py").read_text()
    assert beginning("it") == copy.read_text() and "\nmuon_lr: 0.2\n" in log
    assert f"\n{RULE}\nkernels.py:\n{kernels}\n{RULE}\n" in log
    saved = torch.load("logs/it/state_step000004.pt", weights_only=True)
    assert saved["script"] == "faster.py"
    done = run(["faster.py", "--no"], script=launcher)
    assert done.stderr == "faster.py: error: unrecognized arguments: --no\n"


def test_a_comparison_has_a_script_and_flags_of_its_own_for_each_side(fork):
    words = ["--compare", "", f"{fork} --speed 0.25", "--num_iterations", "3"]
    a, b, *_ = compare.parse_args(words)
    common = ("--num_iterations", "3")
    assert a == compare.Side("A", common, Path(SCRIPT))
    assert b == compare.Side("B", (*common, "--speed", "0.25"), fork)
    a, b, *_ = compare.parse_args([str(fork), "--compare", "train_gpt.py", "--fp8 off"])
    assert (a.path, b.path) == (Path(SCRIPT), fork)
    a, b, *_ = compare.parse_args(["--compare", "", "--fp8 off", f"--script={fork}"])
    assert (a.path, b.path) == (fork, fork)
    assert a.launcher == b.launcher == Path(launch.__file__)
    for side_a, side_b, said in (
        ("--speed 0.25", str(fork), "unrecognized arguments: --speed"),
        (f"{fork} --resume auto", "", f"--resume is for {fork.name}: here runs are new"),
    ):
        with pytest.raises(UserError, match=said):
            compare.parse_args(["--compare", side_a, side_b])
