"""tools/bundle.py: a script with the modules that it imports, as one file that trains alone."""

import inspect
import shutil
import sys
from pathlib import Path

import bundle
import pytest
import script
import torch
from runs import val_losses
from test_alone import printed

import train_gpt
from train_gpt import HERE, UserError

gpu_kernels = pytest.importorskip("gpu_kernels", reason="Triton is not installed")
RULE = "=" * 100
SMALL_FORK = HERE / "tests" / "small_fork.py"
STEPS = "--num_iterations 4 --val_loss_every 2 --save_every 2 --batch_seqs 2 --val_tokens 512"


@pytest.fixture(autouse=True)
def modules():
    """Give the project's modules back: a bundle that is imported brings others of their names."""
    modules, finders, folders = dict(sys.modules), list(sys.meta_path), list(sys.path)
    yield
    sys.meta_path[:], sys.path[:] = finders, folders
    for name in ("train_gpt", "gpu_kernels"):
        sys.modules[name] = modules[name]
    sys.modules.pop("all_in_one", None)


@pytest.fixture
def made(tmp_path):
    """Return made(path): it makes the bundle of a script, alone in a folder, and returns its
    path."""

    def make(path: str | Path) -> Path:
        out = tmp_path / "alone" / "all_in_one.py"
        out.parent.mkdir(exist_ok=True)
        bundle.write([str(path), str(out)])
        return out

    return make


@pytest.fixture
def small_fork(tmp_path) -> Path:
    """Return a fork in a folder of its own."""
    path = tmp_path / "mine" / "small_fork.py"
    path.parent.mkdir()
    return Path(shutil.copy(SMALL_FORK, path))


# ---- It trains


def test_a_bundle_trains_alone_as_the_script_does_in_the_project(flags, made, small_fork, tmp_path):
    """Bit for bit. Its log has its source and no other; it resumes."""
    words = [*flags, *STEPS.split()]
    expected = val_losses(printed(words, tmp_path, small_fork, packages=(HERE,)))
    assert list(expected) == [0, 2, 4]

    one = made(small_fork)
    out = printed([*words, "--run_id", "it"], one.parent, one)
    assert val_losses(out) == expected and "run.sh" not in out
    assert {path.name for path in one.parent.iterdir()} == {one.name, "logs"}
    log = (one.parent / "logs/it.txt").read_text()
    assert log.startswith(f"{one.read_text()}\n{RULE}\n")
    assert log.count(f"\n{RULE}\n") == 4  # source, software, machine, settings: no other file

    *_, first, last = sorted(one.parent.glob("logs/it/*.pt"))
    assert torch.load(last, weights_only=True)["script"] == one.name
    last.unlink()
    out = printed([*words, "--run_id", "it", "--resume", "on"], one.parent, one)
    assert "resumed at step 2\n" in out and val_losses(out) == {4: expected[4]}


# ---- What is in it


def test_tools_take_a_bundle_as_a_script_with_its_own_modules(made, small_fork):
    one = made(small_fork)
    run_class = script.load(one)
    core = script.core(run_class)
    assert core is not train_gpt and core.Run is run_class.__mro__[1]
    assert one.parent == core.HERE and train_gpt.script_of(run_class) == one
    for module in (core, sys.modules["gpu_kernels"]):
        assert Path(module.__file__) == one
    assert core.project_files(one) == [one]


def test_lines_of_its_functions_are_those_in_it(made, small_fork):
    """Tracebacks show these lines, and Triton compiles them."""
    one = made(small_fork)
    core = script.core(script.load(one))
    for name, function in inspect.getmembers(train_gpt, inspect.isfunction):
        if function.__module__ == "train_gpt":
            assert inspect.getsource(getattr(core, name)) == inspect.getsource(function)
    twins = sys.modules["gpu_kernels"].TWINS
    assert twins.keys() == gpu_kernels.TWINS.keys()
    for name, (twin, *_) in gpu_kernels.TWINS.items():
        assert inspect.getsource(twins[name][0]) == inspect.getsource(twin)


def test_a_source_is_not_overwritten(small_fork, monkeypatch):
    before = small_fork.read_text()
    monkeypatch.chdir(small_fork.parent)
    with pytest.raises(UserError, match="is one of the sources: choose another name"):
        bundle.write(["./small_fork.py", "small_fork.py"])
    assert small_fork.read_text() == before


@pytest.mark.parametrize("fork", sorted(HERE.glob("forks/*.py")), ids=lambda path: path.stem)
def test_the_project_s_forks_can_be_in_one_file(fork, made):
    one = made(fork)
    run_class = script.load(one)
    assert script.core(run_class) is not train_gpt and train_gpt.script_of(run_class) == one
    assert run_class.default_record in run_class.records
