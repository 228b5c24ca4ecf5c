"""The schedules, against the published tables and formulas evaluated in exact fractions. Windows of
whole blocks at all steps are those of row A in tests/frontier/test_rows.py."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from train_gpt import RECORDS, Moment, get_lr, get_window_size


@pytest.mark.parametrize(("span", "last"), [(1728, 1750), (49 * 64, 49)])
def test_token_window_grows_from_64_by_its_span_in_steps_of_64(span, last):
    """In floating point, 49 * (1 / 49) is less than 1."""
    hp = replace(RECORDS["2024-11-24_WindowWarmup"], window_span=span, num_iterations=last)
    steps = range(last + 1)
    windows = [get_window_size(step, hp) for step in steps]
    assert windows == [64 * math.floor((Fraction(s, last) * span + 64) / 64) for s in steps]


# Window, learning rate and momentum, computed by hand from the specification, at steps 0, 1, 300,
# 500, N - 1, N and N + 9, which is as the last one.
BY_HAND = {
    "2024-11-19_FlexAttention": [
        (1024, 1024, 1024, 1024, 1024, 1024, 1024),
        (1, 1, 1, 1, 1 / 562, 0, 0),
        (0.85, 0.8502, 0.91, 0.95, 0.95, 0.95, 0.95),
    ],
    "2024-11-24_WindowWarmup": [
        (64, 64, 320, 512, 1728, 1792, 1792),
        (1, 1, 1, 1, 1 / 640, 0, 0),
        (0.85, 0.8503333, 0.95, 0.95, 0.95, 0.95, 0.95),
    ],
    "2025-01-26_BatchSize": [
        (128, 128, 384, 512, 1792, 1792, 1792),
        (1, 1, 1, 1, 0.10127119, 0.1, 0.1),
        (0.85, 0.8503333, 0.95, 0.95, 0.95, 0.95, 0.95),
    ],
    "medium_2025-01-18": [
        (128, 128, 128, 128, 1792, 1792, 1792),
        (1, 1, 1, 1, 0.1003, 0.1, 0.1),
        (0.85, 0.8503333, 0.95, 0.95, 0.95, 0.95, 0.95),
    ],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_moments_of_each_record_equal_numbers_computed_by_hand(name):
    hp = RECORDS[name]
    last = hp.num_iterations
    steps = 0, 1, 300, 500, last - 1, last, last + 9
    for step, window, lr, momentum in zip(steps, *BY_HAND[name], strict=True):
        now = Moment(step, hp)
        assert (now.step, now.window) == (min(step, last), window)
        assert (now.lr, now.momentum) == pytest.approx((lr, momentum), abs=1e-7)


def test_learning_rate_rises_over_the_warmup_steps():
    hp = replace(RECORDS["2024-11-24_WindowWarmup"], warmup_steps=100)
    expected = [1 / 100, 50 / 100, 1, 1, (1750 - 1430) / 640]
    assert [get_lr(step, hp) for step in (0, 49, 99, 1110, 1430)] == pytest.approx(expected)
