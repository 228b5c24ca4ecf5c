"""torch.compile changes no result, leaves no graph break, and compiles nothing after warm-up."""

import shutil
from dataclasses import replace

import pytest
import torch
from test_masks import check_flex_attention
from torch._dynamo.utils import counters

import train_gpt
from train_gpt import HEAD_STEPS, Head, HeadLoss

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")


def training_losses(hp, compiled: bool) -> list[float]:
    """Return the losses of six steps over growing windows, and of a validation."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = train_gpt.GPT(hp).to_device(device, compiled)
    optimizers = train_gpt.Optimizers(model, hp)
    moments = [train_gpt.moment(step, hp) for step in range(hp.num_iterations + 1)]
    if compiled:
        train_gpt.warm_up(model, optimizers, moments, device)
    warm = counters["stats"]["unique_graphs"]
    generator = torch.Generator().manual_seed(1)
    losses = []
    tokens = torch.randint(0, hp.vocab_size, (2, hp.seq_len + 1), generator=generator)
    inputs, targets = tokens[:, :-1].int(), tokens[:, 1:]
    for now in moments[:-1]:
        losses.append(train_gpt.train_step(model, optimizers, inputs, targets, now)[0].item())
    batch = inputs[:1, : hp.val_seq_len], targets[:1, : hp.val_seq_len]
    losses.append(train_gpt.evaluate(model, batch, 256, device))
    assert counters["stats"]["unique_graphs"] == warm and not counters["graph_break"]
    return losses


def test_compiled_training_equals_eager_without_graph_breaks_or_late_compilation(tiny):
    hp = replace(tiny, num_layers=2, layers="short+v0,long", batch_seqs=2, adam_eps=1e-6)
    hp = replace(hp, seq_len=512, val_seq_len=256, window_span=384, num_iterations=6)
    torch._dynamo.reset()
    counters.clear()
    assert training_losses(hp, compiled=True) == pytest.approx(training_losses(hp, False), abs=1e-4)


def test_compiled_fp8_loss_equals_eager(monkeypatch):
    """With all rows at once, as on CUDA."""
    monkeypatch.setattr(train_gpt, "LOSS_ROWS", 256)
    generator = torch.Generator().manual_seed(0)
    head = Head(replace(train_gpt.RECORDS["2025-01-26_BatchSize"], model_dim=64, vocab_size=512))
    head.weight.data = 0.05 * torch.randn(512, 64, generator=generator)
    hidden = torch.randn(256, 64, generator=generator).bfloat16()
    targets = torch.randint(0, 512, (256,), generator=generator)
    results = []
    for steps in (HEAD_STEPS, tuple(torch.compile(step, dynamic=False) for step in HEAD_STEPS)):
        head.steps = steps
        x = hidden.clone().requires_grad_()
        weight = head.weight.detach().clone().requires_grad_()
        loss = HeadLoss.apply(x, weight, targets, head, (15.0,), 1 / len(x), head.scales)
        loss.backward()
        results.append((loss.detach(), x.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        assert (eager - compiled).norm() / eager.norm() < 0.01


def test_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(tiny, randomize):
    check_flex_attention("inductor", tiny, randomize)
