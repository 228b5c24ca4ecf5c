"""The Triton kernels of all records build for cards without one of them, fit, and spill nothing. In
the interpreter, tests/test_kernels.py compares what they compute; other cards are in tests/slow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it is for Linux")

SCRIPT = Path(__file__).with_name("gpu_code.py")


@pytest.mark.parametrize(("card", "kilobytes"), [("h100", 227)])
def test_kernels_fit_a_card(card, kilobytes, spilled=0):
    """No float is an argument: torch.compile would pass it in float64, which is slow."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, SCRIPT, card]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} >= {"softcap_grad_kernel", "relu2_kernel"}
    for row in rows:
        assert row["stack"] <= spilled and row["shared"] <= kilobytes << 10, row
        assert not {"fp32", "fp64"} & {*row["types"]} and ".f64" not in row["instructions"], row
        if card == "h100" and row["kernel"].startswith("relu2"):
            assert "wgmma" in row["instructions"], row
