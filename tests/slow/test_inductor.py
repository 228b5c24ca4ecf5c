"""Inductor on a CPU changes no result and leaves no graph break."""

import shutil

import pytest
import torch
from runs import rows
from test_masks import check_flex_attention
from torch._dynamo.utils import counters

import train_gpt

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")


def test_a_compiled_run_has_the_losses_of_eager_and_no_graph_break(flags, tmp_path):
    """With windows of 128, 256 and 384 tokens, and validations of another length."""
    sizes = "--seq_len 512 --val_seq_len 256 --window_span 384 --num_iterations 6 --batch_seqs 2"
    more = "--num_layers 2 --layers short+v0,long --adam_eps 1e-6"
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


def test_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(tiny, randomize):
    check_flex_attention("inductor", tiny, randomize)
