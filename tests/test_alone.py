"""train_gpt.py alone: copied, or cut out of a log, it trains in an empty folder."""

import ast
import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import language
from runs import SCRIPT, Program, val_losses

from train_gpt import HERE

RULE = "=" * 100
SOURCE = Path(SCRIPT).read_text()


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = [*language(tmp_path_factory.mktemp("data")), "--save_every", "2"]
    return [*flags, "--batch_seqs", "2", "--val_tokens", "512", "--run_id", "it"]


@pytest.fixture(scope="module")
def own(flags, tmp_path_factory) -> SimpleNamespace:
    """Run the project's own script without Triton twins; return its losses and its log."""
    folder = tmp_path_factory.mktemp("own")
    losses = val_losses(printed([*flags, "--kernels", "off"], folder, Path(SCRIPT)))
    assert list(losses) == [0, 2, 4]
    return SimpleNamespace(losses=losses, log=(folder / "logs/it.txt").read_text())


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a copy of train_gpt.py in an empty folder."""
    (tmp_path / "empty").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / "empty"))


def as_script(words: list[str], script: str, packages: tuple[str, ...] = ()) -> None:
    """Run a script as `python script` does: it finds modules beside it, in folders of packages, and
    in the environment, and not in the project."""
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
    with contextlib.chdir(folder):
        program = Program(words, work=as_script, more=more)
        assert program.end() == [0], program.text("err")
    return program.text("out")


def test_copied_alone_it_trains_resumes_and_evaluates(flags, own, copy):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, copy.name, *flags]
    options = {"cwd": copy.parent, "env": environment, "text": True}
    done = subprocess.run(command, capture_output=True, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert val_losses(done.stdout) == own.losses
    assert "run.sh" not in done.stdout and "tools/" not in done.stdout  # there are none
    assert {path.name for path in copy.parent.iterdir()} == {"train_gpt.py", "logs"}
    path = copy.parent / "logs/it/state_step000004.pt"
    path.unlink()
    out = printed(["--resume", "auto", "--run_id", "it", "--device", "cpu"], copy.parent, copy)
    assert "\nresumed at step 2\n" in out and val_losses(out) == {4: own.losses[4]}
    out = printed(["--eval", str(path), "--device", "cpu"], copy.parent, copy)
    assert f"val_loss:{own.losses[4]:.4f} over 512 tokens" in out


def test_the_first_part_of_a_log_is_a_script_with_the_losses_of_that_log(flags, own, tmp_path):
    first, rest = own.log.split(f"\n{RULE}\n", 1)
    assert first == SOURCE and "kernels.py:\n" in rest
    script = tmp_path / "cut_out.py"
    script.write_text(first)
    assert val_losses(printed(flags, tmp_path, script)) == own.losses == val_losses(rest)
    again = (tmp_path / "logs/it.txt").read_text()
    assert again.startswith(f"{SOURCE}\n{RULE}\n")
    assert again.count(f"\n{RULE}\n") == 4  # source, software, machine, settings: no kernels.py


@pytest.mark.parametrize("other_package", [False, True])
def test_without_kernels_py_there_are_no_twins(other_package, flags, own, copy, tmp_path):
    """PyPI has another package of that name."""
    package = tmp_path / "packages/kernels"
    package.mkdir(parents=True)
    if other_package:
        text = "def get_kernel(name):\n    raise RuntimeError\n"
        (package / "__init__.py").write_text(text)
        assert val_losses(printed(flags, copy.parent, copy, (package.parent,))) == own.losses
    with pytest.raises(AssertionError, match="--kernels on: kernels.py or Triton is missing"):
        printed([*flags, "--kernels", "on"], tmp_path, copy, (package.parent,))


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
    """kernels.py imports torch and Triton alone."""
    assert packages_of(HERE / "train_gpt.py") == {"torch", "numpy", "tqdm", "kernels"}
    assert packages_of(HERE / "kernels.py") == {"torch", "triton"}
    requirements = (HERE / "requirements.txt").read_text()
    names = {*re.findall(r"(?m)^[\w-]+", requirements)}
    assert names == {"torch", "numpy", "tqdm", "huggingface-hub"}
