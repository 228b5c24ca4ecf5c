"""train_gpt.py alone: copied, or cut out of a log, it trains in an empty folder."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import SCRIPT, Program, val_losses

from train_gpt import HERE

RULE = "=" * 100
SOURCE = Path(SCRIPT).read_text()
STEPS = ["--num_iterations", "4", "--val_loss_every", "2", "--save_every", "2"]


@pytest.fixture
def flags(flags) -> list[str]:
    return [*flags, *STEPS, "--batch_seqs", "2", "--val_tokens", "512"]


@pytest.fixture
def empty(tmp_path) -> Path:
    """Return an empty folder."""
    path = tmp_path / "empty"
    path.mkdir()
    return path


def as_script(words: list[str], script: str, packages: tuple[str, ...] = ()) -> None:
    """Run a script as Python does that is started with it: nothing of the project is known, and
    modules are found beside the script, in folders of packages, and in the environment."""
    for name in ("train_gpt", "kernels"):
        sys.modules.pop(name, None)
    others = [path for path in sys.path if not Path(path or ".").resolve().is_relative_to(HERE)]
    installed = [path for path in sys.path if "site-packages" in path]
    sys.path[:] = [str(Path(script).parent), *packages, *others, *installed]
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def printed(words: list[str], folder: Path, script: Path, packages: tuple[Path, ...] = ()) -> str:
    """Run a script in a folder; return what it prints."""
    more = str(script), tuple(map(str, packages))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        program = Program(words, work=as_script, more=more)
        assert program.end() == [0], program.text("err")
    return program.text("out")


@pytest.fixture
def expected(flags, tmp_path) -> dict[int, float]:
    """Return the losses of the project's own script, without twins, from another folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    losses = val_losses(printed([*flags, "--kernels", "off"], folder, Path(SCRIPT)))
    assert list(losses) == [0, 2, 4]
    return losses


def test_copied_alone_it_trains_resumes_and_evaluates(flags, expected, empty):
    """As a program of its own: python train_gpt.py."""
    shutil.copy(SCRIPT, empty)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "train_gpt.py", *words],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    out = python(*flags, "--run_id", "it")
    assert val_losses(out) == expected
    assert "run.sh" not in out and "tools/" not in out  # it is not there
    assert {path.name for path in empty.iterdir()} == {"train_gpt.py", "logs"}
    path = empty / "logs/it/state_step000004.pt"
    path.unlink()
    out = python("--resume", "auto", "--run_id", "it", "--device", "cpu")
    assert "\nresumed at step 2\n" in out and val_losses(out) == {4: expected[4]}
    out = python("--eval", str(path), "--device", "cpu")
    assert f"val_loss:{expected[4]:.4f} over 512 tokens" in out


def test_the_first_part_of_a_log_is_a_script_with_the_losses_of_that_log(flags, empty, tmp_path):
    printed([*flags, "--run_id", "it"], tmp_path, Path(SCRIPT))
    first, rest = (tmp_path / "logs/it.txt").read_text().split(f"\n{RULE}\n", 1)
    assert first == SOURCE and "kernels.py:\n" in rest
    (empty / "cut_out.py").write_text(first)
    out = printed([*flags, "--run_id", "again"], empty, empty / "cut_out.py")
    assert val_losses(out) == val_losses(rest) and list(val_losses(out)) == [0, 2, 4]
    again = (empty / "logs/again.txt").read_text()
    assert again.startswith(f"{SOURCE}\n{RULE}\n")
    assert again.count(f"\n{RULE}\n") == 4  # source, software, machine, settings: no kernels.py


def test_an_edited_copy_beside_the_original_has_its_own_name_and_the_project_s_kernels(
    flags, tmp_path
):
    """Its log begins with it and has kernels.py, its checkpoints name it."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(HERE / "kernels.py", project)
    script = project / "my_fork.py"
    script.write_text(
        SOURCE.replace("muon_lr: float = setting(0.05", "muon_lr: float = setting(0.06")
    )
    printed([*flags, "--run_id", "it"], tmp_path, script)
    log = (tmp_path / "logs/it.txt").read_text()
    assert log.startswith(f"{script.read_text()}\n{RULE}\n") and "\nmuon_lr: 0.06\n" in log
    path = tmp_path / "logs/it/state_step000004.pt"
    assert torch.load(path, weights_only=True)["script"] == "my_fork.py"
    kernels = (HERE / "kernels.py").read_text()
    assert f"\n{RULE}\nkernels.py:\n{kernels}\n{RULE}\n" in log
    with pytest.raises(AssertionError, match="my_fork.py: error: unrecognized arguments: --nope"):
        printed(["--nope"], tmp_path, script)


def test_with_another_package_named_kernels_there_are_no_twins(flags, expected, empty, tmp_path):
    """PyPI has one."""
    package = tmp_path / "packages/kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def get_kernel(name):\n    raise RuntimeError\n")
    shutil.copy(SCRIPT, empty)
    out = printed(flags, empty, empty / "train_gpt.py", (package.parent,))
    assert val_losses(out) == expected
    with pytest.raises(AssertionError, match="--kernels on: kernels.py or Triton is missing"):
        printed([*flags, "--kernels", "on"], empty, empty / "train_gpt.py", (package.parent,))


def test_kernels_on_without_kernels_py_is_refused(flags, empty):
    shutil.copy(SCRIPT, empty)
    with pytest.raises(AssertionError, match="--kernels on: kernels.py or Triton is missing"):
        printed([*flags, "--kernels", "on"], empty, empty / "train_gpt.py")


def packages_of(path: Path) -> set[str]:
    """Return the names that a file imports, anywhere in it, without the standard library's."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


def test_it_imports_torch_numpy_tqdm_and_kernels_alone():
    """kernels.py wants Triton, too, and nothing of the project."""
    assert packages_of(HERE / "train_gpt.py") == {"torch", "numpy", "tqdm", "kernels"}
    assert packages_of(HERE / "kernels.py") == {"torch", "triton"}
    requirements = (HERE / "requirements.txt").read_text()
    assert {*re.findall(r"(?m)^[\w-]+", requirements)} == {
        "torch",
        "numpy",
        "tqdm",
        "huggingface-hub",
    }
