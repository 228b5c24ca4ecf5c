"""Tests pass whatever surrounds them: each row of SURROUNDINGS has variables and some tests. What
tests/conftest.py sets is not inherited."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train_gpt import HERE

OF_CPU = {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "ALL", "MKL_CBWR": "COMPATIBLE"}
LAUNCHED = "tests/test_run.py tests/test_errors.py -k 'clock or killed or ranks'"
NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)" ;;
--query-gpu*) echo "NVIDIA H100 80GB HBM3, 81559 MiB" ;;
*) echo "| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |" ;;
esac
"""
# Variables, in which {tmp} is the test's folder, and tests.
SURROUNDINGS = {
    "a task of Slurm": ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", LAUNCHED),
    "a rank of torchrun": ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 NPROC=2", LAUNCHED),
    "no UTF-8": ("LC_ALL=C PYTHONUTF8=0", "tests/test_run.py tests/test_tokenize.py"),
    "another time zone": ("TZ=Asia/Kolkata", "tests/test_result.py tests/test_compare.py"),
    "two threads": ("OMP_NUM_THREADS=2", "tests/test_sample.py"),
    "a GPU that torch cannot use": (
        "PATH={tmp}/bin:{path}",
        "tests/test_run.py tests/test_scripts.py tests/test_seconds.py tests/test_machine.py",
    ),
    "a long TMPDIR": ("TMPDIR={tmp}/" + 100 * "x", LAUNCHED),
    "a home that cannot be written": ("HOME={tmp}/read-only", "tests/test_run.py"),
    "one file": ("", "tests/test_bundle.py"),
}


def failures(tests: list[str], variables: dict[str, str], project=HERE, **options) -> str:
    """Run tests in a process of its own; return the end of its output if one fails, or ""."""
    own = {k: v for k, v in os.environ.items() if k not in {*OF_CPU, "OMP_NUM_THREADS"}}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    options |= {"cwd": project, "env": own | variables, "stdout": subprocess.PIPE}
    done = subprocess.run(command, stderr=subprocess.STDOUT, text=True, **options)
    return done.stdout[-5000:] if done.returncode else ""


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_tests_pass_in_other_surroundings(name, tmp_path):
    variables, tests = SURROUNDINGS[name]
    variables = variables.format(tmp=tmp_path, path=os.environ["PATH"]).split()
    for folder in ("bin", "read-only", 100 * "x"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin/nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    (tmp_path / "read-only").chmod(0o555)
    words = [word.strip("'") for word in re.findall(r"'.*?'|\S+", tests)]
    assert not failures(words, dict(pair.split("=", 1) for pair in variables))


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="this CPU lacks AVX512_BF16")
def test_tests_pass_with_all_instructions_of_the_cpu():
    """Where fast, heads are bfloat16."""
    names = "loss", "model", "kernels", "fp8", "run", "export"
    files = [f"tests/test_{name}.py" for name in names]
    assert not failures([*files, "tests/frontier"], OF_CPU)


def copy_of_project(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "logs", "__pycache__")
    return shutil.copytree(HERE, folder, ignore=ignored)


def test_tests_pass_in_a_folder_with_blanks(tmp_path):
    project = copy_of_project(tmp_path / "a folder with blanks")
    files = [f"tests/test_{name}.py" for name in ("run", "checkpoints", "scripts", "readme")]
    assert not failures(files, {}, project)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_tests_pass_for_another_user(tmp_path):
    """Who can read the project, and cannot write there."""
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    try:
        subprocess.run([sys.executable, "-c", "import torch"], check=True, **nobody)
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("another user cannot start this Python")
    os.chown(tmp_path, 65534, 65534)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    own = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    assert not failures(["tests/test_run.py"], own, **nobody)


def test_tests_pass_in_random_order():
    files = [f"tests/test_{name}.py" for name in ("run", "scripts", "compile", "kernels", "errors")]
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", *files]
    listed = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    tests = re.findall(r"^tests/.*::.*$", listed, re.M)
    random.shuffle(tests)
    assert len(tests) > 100 and not failures(tests, {}), tests
