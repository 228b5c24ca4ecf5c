"""train_gpt.py alone: copied, it trains in an empty folder."""

import contextlib
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from runs import SCRIPT, Program, val_losses

from train_gpt import HERE


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


def test_copied_alone_it_trains_and_resumes(flags, tmp_path):
    """With the losses of the project's own script without Triton twins."""
    flags = [*flags, "--save_every", "2", "--batch_seqs", "2", "--val_tokens", "512"]
    flags += ["--run_id", "it"]
    own = val_losses(printed([*flags, "--kernels", "off"], tmp_path, Path(SCRIPT)))
    assert list(own) == [0, 2, 4]
    (tmp_path / "empty").mkdir()
    copy = Path(shutil.copy(SCRIPT, tmp_path / "empty"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, copy.name, *flags]
    options = {"cwd": copy.parent, "env": environment, "text": True}
    done = subprocess.run(command, capture_output=True, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert val_losses(done.stdout) == own
    assert {path.name for path in copy.parent.iterdir()} == {"train_gpt.py", "logs"}
    path = copy.parent / "logs/it/state_step000004.pt"
    path.unlink()
    out = printed([*flags, "--resume", "on"], copy.parent, copy)
    assert "\nresumed at step 2\n" in out and val_losses(out) == {4: own[4]}
