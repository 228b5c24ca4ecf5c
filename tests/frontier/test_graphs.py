"""Compiled code of the forks is whole: nothing in it stops torch.compile and begins a new graph."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import train_gpt
import train_gpt_2026
import train_gpt_2026_07 as july
import train_gpt_2026_08 as august


@pytest.mark.parametrize("script", [train_gpt_2026, july, august])
def test_a_demo_has_no_graph_break(script, compile_with, monkeypatch):
    """With several targets and one, with a tied head and its own, and in the last validation. The
    backend runs graphs as they are: a break depends on what is traced alone."""
    compile_with(lambda graph, inputs: graph)
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)  # until the test ends
    hp, device = replace(script.RECORDS["demo"], compile="on"), torch.device("cpu")
    model = train_gpt.build(script.Run, hp, device)
    optimizers = script.Run.Optimizers(model, hp)
    for step in (1, hp.num_iterations - 1):
        now = script.Run.Moment(step, hp)
        tokens = torch.arange(now.seq_len)[None] + 1
        train_gpt.train_step(model, optimizers, tokens.int(), tokens, now)
    now = script.Run.Moment(hp.num_iterations, hp)
    train_gpt.evaluate(model, (tokens.int(), tokens), now, device)
    assert counters["stats"]["unique_graphs"] > 10 and not counters["graph_break"]
