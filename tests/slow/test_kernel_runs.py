"""Fifty steps with Triton's kernels, in its interpreter, against fifty without."""

import pytest
from runs import val_losses
from test_kernels import interpreted, interpreter  # noqa: F401

import train_gpt


def losses_of_a_run(choice: str, flags, capsys) -> dict[int, float]:
    """Return validation losses of two layers in float32, with the epsilon for sums that differ."""
    more = "--num_layers 2 --batch_seqs 1 --val_tokens 256 --adam_eps 1e-6"
    steps = f"--num_iterations 50 --val_loss_every 10 --kernels {choice}"
    train_gpt.main([*flags, *more.split(), *steps.split()])
    return val_losses(capsys.readouterr().out)


@interpreted
def test_fifty_steps_with_kernels_give_the_losses_without(flags, capsys):
    plain, fused = (losses_of_a_run(choice, flags, capsys) for choice in ("off", "on"))
    assert list(plain) == [0, 10, 20, 30, 40, 50] and plain[50] < plain[0] - 1
    assert fused == pytest.approx(plain, abs=1e-4)
