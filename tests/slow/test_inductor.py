"""Inductor on a CPU changes no result and leaves no graph break."""

import shutil
from dataclasses import replace

import pytest
import torch
from runs import rows
from test_masks import check_flex_attention
from torch._dynamo.utils import counters

import train_gpt
from train_gpt import HEAD_STEPS, Head, HeadLoss

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")


def test_a_compiled_run_has_the_losses_of_eager_and_no_graph_break(flags, tmp_path, monkeypatch):
    """With windows of 128, 256 and 384 tokens, and validations of another length."""
    sizes = "--seq_len 512 --val_seq_len 256 --window_span 384 --num_iterations 6 --batch_seqs 2"
    more = "--num_layers 2 --layers short+v0,long --adam_eps 1e-6"
    monkeypatch.setattr(train_gpt, "LOSS_ROWS", 256)  # a chunk's loss is one piece
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for choice in ("off", "on"):
        words = ["--compile", choice, "--run_id", choice]
        train_gpt.main([*flags, *sizes.split(), *more.split(), *words])
        steps = rows(tmp_path / f"logs/{choice}.jsonl")
        losses.append([row.get("val_loss", row.get("train_loss")) for row in steps])
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert len(losses[0]) == 7 and losses[1] == pytest.approx(losses[0], abs=1e-4)


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
