"""The Triton kernels for more cards, from 24 to 180 GB, as in tests/test_gpu_code.py."""

import pytest

from test_gpu_code import test_kernels_fit_a_card as check


@pytest.mark.parametrize(
    ("card", "kilobytes", "spilled"),
    [("a100", 163, 0), ("3090", 99, 0), ("4090", 99, 0), ("5090", 99, 0), ("b200", 227, 56)],
)
def test_kernels_fit_more_cards(card, kilobytes, spilled):
    """A B200 spills bytes of registers where all of an MLP is in FP8."""
    check(card, kilobytes, spilled)
