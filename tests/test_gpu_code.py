"""A GPU's kernels, compiled without one, build, fit the card and spill no more than known. Other
records and cards, and --kernels off, are in tests/slow."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT

pytest.importorskip("triton", reason="Triton is not installed: it is for Linux")

SCRIPT = Path(__file__).with_name("gpu_code.py")
PINNED = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
GRAPHS = {"layer", "layer backward", "loss", "loss backward"}
GRAPHS |= {"loss of validation", "muon 768 x 768"}
# Bytes of registers that kernels spill: PyTorch's own attention kernel, whatever is fused with it.
SPILLED = {"h100": {r"triton_tem_\w*flex_attention_backward": 48}}


def rows_of(card: str, record: str, kernels: str, *parts: str) -> list[dict]:
    command = [sys.executable, SCRIPT, card, record, kernels, *parts]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    version = torch.__version__.split("+")[0]
    if done.returncode and version != PINNED:  # gpu_code.py uses torch's internals
        pytest.skip(f"torch {version} instead of {PINNED}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(card: str, rows: list[dict]) -> set[str]:
    """Check that every kernel builds and, in one of its configurations at least, fits; return the
    names of all kernels."""
    configurations = {}
    for row in rows:
        assert "error" not in row, row
        configurations.setdefault((row["graph"], row["kernel"]), []).append(row)
    for (graph, name), tried in configurations.items():
        fitting = [row for row in tried if "too large" not in row]
        assert fitting, tried
        spilled = SPILLED.get(card, {}).items()
        allowed = [n for pattern, n in spilled if re.search(pattern, f"{graph} {name}")]
        for row in fitting:
            assert ".f64" not in row["instructions"], f"float64 in {graph}: {row}"
        assert min(row["stack"] for row in fitting) <= sum(allowed), f"{graph} spills: {fitting}"
    return {name for _, name in configurations}


def test_an_h100_could_run_the_record():
    rows = rows_of("h100", "2025-01-26_BatchSize", "on", "layer", "loss", "square")
    names = check("h100", rows)
    assert {row["graph"] for row in rows if row["kernel"].startswith("triton_")} == GRAPHS
    launches = {name for name in names if not name.startswith("triton_")}
    mlp = {"relu2_forward_kernel_0", "relu2_backward_kernel_0"}
    assert launches == {"softcap_grad_kernel_0", *mlp}
    for row in [row for row in rows if "too large" not in row]:
        matmul = row["kernel"].startswith(("relu2", "triton_tem"))
        assert ("wgmma" in row["instructions"]) == matmul
