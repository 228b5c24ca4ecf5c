"""./run.sh --runs: the real launcher and tool, in a copy of the project with Python set up."""

import re
import shutil
import subprocess
import sys

import numpy as np

from runs import val_losses
from train_gpt import HERE


def test_runs_differ_in_their_seeds_and_end_with_statistics(tmp_path):
    for path in (HERE / "run.sh", HERE / "requirements.txt", *HERE.glob("*.py")):
        shutil.copy(path, tmp_path)
    for name in ("tools", "data"):
        (tmp_path / name).symlink_to(HERE / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    shutil.copy(HERE / "requirements.txt", tmp_path / ".venv" / ".installed-run")
    shutil.copy(HERE / "tools" / "requirements.txt", tmp_path / ".venv" / ".installed-tools")
    size = "--record demo --num_layers 2 --model_dim 16 --num_heads 1 --head_dim 16"
    size += " --seq_len 128 --val_seq_len 128 --val_tokens 128 --num_iterations 2 --device cpu"
    command = ["./run.sh", *f"{size} --runs 2 --muon_lr 0.06 --seed=5".split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logs = sorted((tmp_path / "logs").glob("*.txt"))
    assert [re.search(r"_seed(\d)\.txt", log.name)[1] for log in logs] == ["5", "6"]
    assert all(f"\nseed: {seed}\n" in log.read_text() for seed, log in enumerate(logs, 5))
    losses = [val_losses(log.read_text())[2] for log in logs]
    row = done.stdout.splitlines()[-1].split()
    assert row[:3] == ["A", "2", f"{np.mean(losses):.5f}"] and losses[0] != losses[1]
    assert "--muon_lr 0.06" in " ".join(row)
