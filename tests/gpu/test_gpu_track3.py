"""What only a GPU can show of the optimizer benchmark. Run with `./run.sh test gpu`."""

from dataclasses import replace

import pytest
import test_gpu_frontier
import torch
from test_gpu import documents, relative_error
from train_gpt_track3 import GPT, RECORDS, Run, capped

import train_gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
on_the_sample = test_gpu_frontier.on_the_sample


@pytest.mark.parametrize("record", ["muon", "adamw"])
def test_the_model_on_cuda_equals_the_model_on_a_cpu(record, randomize):
    """Loss and gradients: bfloat16, compiled and FlexAttention against float32."""
    hp = replace(RECORDS[record], model_dim=256, num_heads=2, seq_len=2048)
    tokens = documents(2049)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = randomize(GPT(hp)).to_device(device, compiled=device.type == "cuda")
        inputs, targets = tokens[:-1].to(device), tokens[1:].long().to(device)
        loss = model(inputs, targets, train_gpt.moment(0, hp))
        loss.backward()
        named = model.named_parameters()
        grads = {n: train_gpt.gradient_buffer(p) for n, p in named if p.ndim >= 2}
        results.append((loss.item(), grads))
    (cpu_loss, cpu_grads), (cuda_loss, cuda_grads) = results
    assert cuda_loss == pytest.approx(cpu_loss, rel=1e-2)
    for name, grad in cpu_grads.items():
        assert relative_error(cuda_grads[name], grad) < 0.1, name


def test_logits_are_capped_as_in_float64():
    logits = torch.linspace(-200, 200, 4001, device="cuda").bfloat16()
    expected = 15 * logits.double() / (logits.double().square() + 225).sqrt()
    assert relative_error(capped(logits, 15.0)[0], expected) < 1e-6


@pytest.mark.parametrize("record", ["muon", "adamw"])
def test_twenty_steps_of_each_record_on_the_sample(record, on_the_sample):
    """Its loss falls."""
    steps = "--num_iterations 20 --val_loss_every 10 --save_last off"
    losses = on_the_sample(f"--record {record} {steps}", Run)
    assert losses[0] == pytest.approx(10.8258, abs=1e-3)
    assert losses[-1] < losses[1] < 10
