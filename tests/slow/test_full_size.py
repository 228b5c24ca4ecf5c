"""The records at their full size, against float64."""

import math

import pytest
import torch

import reference
from conftest import at_window
from test_model import PUBLISHED, sequence
from train_gpt import GPT, RECORDS, get_window_size, layer_table


@pytest.mark.parametrize("year", [2024, 2025])
def test_full_size_records_equal_the_float64_reading(year, randomize):
    """1024 tokens; the zero head of the start would hide everything, so all weights are random."""
    records = [RECORDS[name] for name in PUBLISHED if name.startswith(str(year))]
    inputs, targets = sequence(1024, reference.END_OF_TEXT)
    with torch.no_grad():
        model = randomize(GPT(records[0]))
        weights = {k: v.double() for k, v in model.named_parameters()}
        for hp in records:
            assert layer_table(hp) == model.layers  # what differs is the schedule and the window
            window = get_window_size(hp.num_iterations // 2, hp)
            model.hp = hp
            loss = model(inputs, targets, at_window(window, hp)).item()
            expected = reference.loss(weights, inputs.long(), targets, window, 6, year).item()
            assert loss == pytest.approx(expected, abs=2e-5)
            assert abs(loss - math.log(50304)) > 0.1
