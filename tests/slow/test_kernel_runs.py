"""Fifty steps with Triton's kernels, in its interpreter, against fifty without."""

import pytest
from test_kernels import interpreted, interpreter, losses_of_a_run  # noqa: F401


@interpreted
def test_fifty_steps_with_kernels_give_the_losses_without(flags, capsys):
    plain, fused = (losses_of_a_run(choice, 50, 10, flags, capsys) for choice in ("off", "on"))
    assert list(plain) == [0, 10, 20, 30, 40, 50] and plain[50] < plain[0] - 1
    assert fused == pytest.approx(plain, abs=1e-4)
