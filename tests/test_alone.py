"""train_gpt.py copied, and a bundle of a fork, train alone in an empty folder."""

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import bundle
import pytest
import torch
from runs import SCRIPT, Program, val_losses

from train_gpt import HERE

FORK = HERE / "tests/small_fork.py"
RULE = "=" * 100


def as_script(words: list[str], script: str, packages: tuple[str, ...] = ()) -> None:
    """Run a script as `python script` does: it finds modules beside it, in folders of packages, and
    in the environment, and not in the project."""
    for name in ("train_gpt", "gpu_kernels"):
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


@pytest.mark.parametrize("original", [Path(SCRIPT), FORK], ids=["copy", "bundle"])
def test_alone_it_trains_as_in_the_project_and_resumes(original, flags, tmp_path):
    """Bit for bit; train_gpt.py alone has no Triton twins. A log has its script and no other."""
    words = [*flags, "--save_every", "2", "--batch_seqs", "2", "--val_tokens", "512"]
    words += ["--run_id", "it", "--kernels", "off"]
    expected = val_losses(printed(words, tmp_path, original, packages=(HERE,)))
    assert list(expected) == [0, 2, 4]

    one = tmp_path / "empty" / "one_file.py"
    one.parent.mkdir()
    if original == FORK:
        bundle.write([str(original), str(one)])
    else:
        shutil.copy(original, one)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {"cwd": one.parent, "env": environment, "text": True, "capture_output": True}
    done = subprocess.run([sys.executable, one.name, *words], **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert val_losses(done.stdout) == expected
    assert {path.name for path in one.parent.iterdir()} == {one.name, "logs"}
    log = (one.parent / "logs/it.txt").read_text()
    assert log.startswith(f"{one.read_text()}\n{RULE}\n")
    assert log.count(f"\n{RULE}\n") == 4  # source, software, machine, settings: no other file

    last = one.parent / "logs/it/state_step000004.pt"
    assert torch.load(last, weights_only=True)["script"] == one.name
    last.unlink()
    out = printed([*words, "--resume", "on"], one.parent, one)
    assert "\nresumed at step 2\n" in out and val_losses(out) == {4: expected[4]}
