"""The schedules, against the published tables and formulas evaluated in exact fractions."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from train_gpt import RECORDS, get_lr, get_muon_momentum, get_window_size, moment

HP = RECORDS["2025-01-26_BatchSize"]
STEPS = (0, 125, 500, 885, 1062, 1063, 1416, 1770)


def test_window_of_the_record_follows_the_published_table():
    published = (128, 128, 512, 896, 1152, 1152, 1408, 1792)
    assert tuple(get_window_size(s, HP) for s in STEPS) == published


def test_learning_rate_of_the_record_follows_the_published_table():
    published = (1, 1, 1, 1, 1, 0.998729, 0.55, 0.1)
    assert [get_lr(s, HP) for s in STEPS] == pytest.approx(published, abs=1e-6)


def test_block_window_is_the_least_multiple_that_covers_the_grown_span():
    for step in range(HP.num_iterations + 1):
        grown = Fraction(1728 * step, 1770)
        multiples = (m for m in range(128, 4096, 128) if m >= grown)
        assert get_window_size(step, HP) == next(multiples)


# Computed by hand from the specification, at steps 0, 1, 300, 500, N - 1 and N.
BY_HAND = {
    "2024-11-19_FlexAttention": {
        get_window_size: (1024, 1024, 1024, 1024, 1024, 1024),
        get_lr: (1, 1, 1, 1, 1 / 562, 0),
        get_muon_momentum: (0.85, 0.8502, 0.91, 0.95, 0.95, 0.95),
    },
    "2024-11-24_WindowWarmup": {
        get_window_size: (64, 64, 320, 512, 1728, 1792),
        get_lr: (1, 1, 1, 1, 1 / 640, 0),
        get_muon_momentum: (0.85, 0.8503333, 0.95, 0.95, 0.95, 0.95),
    },
    "2025-01-26_BatchSize": {
        get_window_size: (128, 128, 384, 512, 1792, 1792),
        get_lr: (1, 1, 1, 1, 0.10127119, 0.1),
        get_muon_momentum: (0.85, 0.8503333, 0.95, 0.95, 0.95, 0.95),
    },
}


@pytest.mark.parametrize("name", BY_HAND)
def test_schedules_of_each_record_equal_numbers_computed_by_hand(name):
    hp = RECORDS[name]
    steps = (0, 1, 300, 500, hp.num_iterations - 1, hp.num_iterations)
    for schedule, expected in BY_HAND[name].items():
        assert [schedule(step, hp) for step in steps] == pytest.approx(expected, abs=1e-7)


def test_token_window_of_2024_11_24_grows_from_64_to_1792_in_steps_of_64():
    hp = RECORDS["2024-11-24_WindowWarmup"]
    windows = [get_window_size(s, hp) for s in range(1751)]
    assert windows == [64 * math.floor((Fraction(s, 1750) * 1728 + 64) / 64) for s in range(1751)]


def test_learning_rate_rises_then_falls_to_zero():
    hp = replace(RECORDS["2024-11-24_WindowWarmup"], warmup_steps=100)
    assert get_lr(0, hp) == pytest.approx(1 / 100)
    assert get_lr(49, hp) == pytest.approx(50 / 100)
    assert get_lr(1110, hp) == 1
    assert get_lr(1430, hp) == pytest.approx((1750 - 1430) / 640)


def test_muon_momentum_ramps_from_085_to_095_over_300_steps():
    for step, expected in ((0, 0.85), (150, 0.9), (300, 0.95), (1770, 0.95)):
        assert get_muon_momentum(step, HP) == pytest.approx(expected)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_moment_holds_all_that_is_scheduled_and_the_last_one_lasts(name):
    hp = RECORDS[name]
    for step in (0, 1, 300, hp.num_iterations - 1, hp.num_iterations, hp.num_iterations + 9):
        at, now = min(step, hp.num_iterations), moment(step, hp)
        schedules = get_lr(at, hp), get_muon_momentum(at, hp), get_window_size(at, hp)
        assert (now.step, now.lr, now.momentum, now.window) == (at, *schedules)
