"""Warm-up compiles all that a run needs: here with aot_eager, in tests/slow with Inductor."""

import gc
import weakref

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

import train_gpt


def graphs_of(run, compile_with, monkeypatch) -> list[int]:
    """Return how many graphs run() has compiled after its warm-up, and at its end."""
    warm_up, graphs = train_gpt.warm_up, []

    def warm_up_and_count(*arguments):
        warm_up(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(train_gpt, "warm_up", warm_up_and_count)
    compile_with(aot_eager)
    run()
    assert not counters["graph_break"]
    return [*graphs, counters["stats"]["unique_graphs"]]


def test_a_run_compiles_nothing_after_warm_up(flags, compile_with, monkeypatch):
    """With windows of 128, 256 and 384 tokens, and validations of another length."""
    layers = "long+v0,short+v1,none,short"
    more = f"--compile on --layers {layers} --num_iterations 6 --val_loss_every 2 --batch_seqs 2"
    sizes = "--seq_len 256 --val_seq_len 128 --window_span 384"
    words = [*flags, *more.split(), *sizes.split()]
    graphs = graphs_of(lambda: train_gpt.main(words), compile_with, monkeypatch)
    layers, loss, muon = 2 * 3, 3, 3  # two of a kind, with and without gradients; by shapes
    masks, angles = 2, 2  # by lengths
    assert graphs == [layers + loss + muon + masks + angles] * 2


def test_warm_up_leaves_no_garbage_in_cycles(tiny, monkeypatch):
    """torch.compile leaves some, which would keep gigabytes of a GPU. The last step compiles
    nothing."""

    class Cycle:
        def __init__(self):
            self.me, self.tensor = self, torch.zeros(1)

    def train_step(*arguments):
        left.append(weakref.ref(Cycle()))

    left = []
    monkeypatch.setattr(train_gpt, "train_step", train_step)
    monkeypatch.setattr(train_gpt, "evaluate", lambda *arguments: None)
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    gc.disable()
    try:
        model = train_gpt.GPT(tiny)
        optimizers = train_gpt.Optimizers(model, tiny)
        moments = [train_gpt.Moment(0, tiny)]
        train_gpt.warm_up(model, optimizers, moments, torch.device("cpu"))
        alive = [cycle() is not None for cycle in left]
    finally:
        gc.enable()
    assert alive == [False, True]
