"""Warm-up compiles all that a run needs, and what is compiled computes the same: here with
aot_eager, in tests/slow with Inductor."""

import re
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

import train_gpt
import train_gpt_2026
import train_gpt_2026_08
from conftest import language
from frontier.small_runs import AUGUST, JULY, ROW, STAGES_JULY, TECHNIQUES, WORDS, D
from train_gpt_2026 import GPT, Hyperparameters, Moment

# Windows of 128, 256 and 384 tokens, and validations of another length.
WINDOWS = (
    "--layers long+v0,short+v1,none,short --num_iterations 6 --val_loss_every 2 --seq_len 256 "
    "--val_seq_len 128 --window_span 384 --run_id it"
)
# Lengths, windows, targets, a tied head; Adam learns at each second step, and the n-gram table in
# cycles, each of which has read another number of rows. In July, all steps have one length.
RUNS = [
    (train_gpt, WINDOWS),
    (train_gpt_2026, f"{WORDS} {ROW[D]}"),
    (train_gpt_2026_08, f"{JULY} --stages {re.sub('length=.', 'length=1', STAGES_JULY)}"),
    (train_gpt_2026_08, AUGUST),
]


@pytest.mark.parametrize(("script", "words"), RUNS)
def test_a_run_compiles_nothing_after_warm_up_and_has_no_graph_break(
    script, words, elsewhere, tmp_path, compile_with, monkeypatch
):
    """The backend runs graphs as they are: a break depends on what is traced alone."""
    warm_up, graphs = script.Run.warm_up, []

    def warm_up_and_count(*arguments):
        warm_up(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(script.Run, "warm_up", staticmethod(warm_up_and_count))
    compile_with(lambda graph, inputs: graph)
    # In FP8, the head asks what a CPU can do.
    more = ["--compile", "on", "--batch_seqs", "2", "--keep", "0", "--fp8", "on"]
    train_gpt.main([*language(tmp_path), *words.split(), *more], script.Run)
    assert not counters["graph_break"]
    assert [counters["stats"]["unique_graphs"]] == graphs and graphs[0] > 0
    train_gpt.refuse_assignments(script.Run)  # Dynamo has left no names for which a next run is


def test_compiled_layers_equal_the_layers(tiny, randomize, compile_with, monkeypatch):
    """Loss and all gradients of several graphs: later ones read what the first has left. The second
    of two micro-batches is added to each gradient; two that were one tensor would get it twice."""
    layers = "short+v0+pair,long+v1,short+backout,short+x0,none+x1,long+v0+in3"
    hp = replace(Hyperparameters(**vars(tiny)), num_layers=6, **TECHNIQUES, layers=layers)
    compile_with(aot_eager)
    tokens = torch.randint(0, 512, (257,), generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(train_gpt.compilation, "allowed", compiled)
        model = randomize(GPT(hp))
        for _ in range(2):
            loss = model(tokens[:-1].int(), tokens[1:], Moment(0, hp))
            loss.backward()
        assert bool(counters["stats"]["unique_graphs"]) == compiled
        found.append({name: p.grad.to_dense() for name, p in model.named_parameters()})
        found[-1]["loss"] = loss.detach()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)
