"""What only a GPU can show of the optimizer benchmark. Run with `./run.sh test gpu`."""

from dataclasses import replace

import pytest
import test_gpu_frontier
import torch
from test_gpu import check_model, relative_error
from train_gpt_track3 import GPT, RECORDS, Run, capped

import train_gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
on_the_sample = test_gpu_frontier.on_the_sample


@pytest.mark.parametrize("record", ["muon", "adamw"])
def test_the_model_on_cuda_equals_the_model_on_a_cpu(record, randomize):
    hp = replace(RECORDS[record], model_dim=256, num_heads=2, seq_len=2048)
    check_model(lambda: randomize(GPT(hp)), 2048, train_gpt.Moment(0, hp))


def test_logits_are_capped_as_in_float64():
    logits = torch.linspace(-200, 200, 4001, device="cuda").bfloat16()
    expected = 15 * logits.double() / (logits.double().square() + 225).sqrt()
    assert relative_error(capped(logits, 15.0)[0], expected) < 1e-6


@pytest.mark.parametrize("record", ["muon", "adamw"])
def test_twenty_steps_of_each_record_on_the_sample(record, on_the_sample):
    """Its loss falls."""
    steps = "--num_iterations 20 --val_loss_every 10 --keep 0"
    losses = on_the_sample(f"--record {record} {steps}", Run)
    assert losses[0] == pytest.approx(10.8258, abs=1e-3)
    assert losses[-1] < losses[1] < 10
