"""Warm-up compiles all that a run needs. By a backend without C++; tests/slow has Inductor."""

import torch
from torch._dynamo.utils import counters

import train_gpt


def test_a_run_compiles_nothing_after_warm_up(flags, monkeypatch):
    """Windows of 128, 256 and 384 tokens, validations of another length, two layers of a kind."""
    compile_, warm_up, graphs = torch.compile, train_gpt.warm_up, []

    def warm_up_and_count(*arguments):
        warm_up(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options)
    )
    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_count)
    torch._dynamo.reset()
    counters.clear()
    layers = "long+v0,short,short+v1,long+v0+x2,none+x1,short+x0"
    more = f"--compile on --layers {layers} --num_iterations 6 --val_loss_every 2 --seq_len 384"
    train_gpt.main([*flags, *more.split(), "--window_span", "384", "--batch_seqs", "2"])
    graphs.append(counters["stats"]["unique_graphs"])
    six_layers, loss, muon = 2 * 6, 2, 3  # with and without gradients; Muon's by shape of matrix
    assert graphs[0] == graphs[1] < six_layers + loss + muon and not counters["graph_break"]
