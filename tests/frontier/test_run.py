"""Runs on the sample corpus, and a warm-up that compiles all that a run needs."""

from dataclasses import replace
from functools import partial

import torch
from runs import val_losses
from test_compile import graphs_of
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from train_gpt_2026 import GPT, Moment

import train_gpt
from frontier.small_runs import TECHNIQUES, A, D, main
from train_gpt import HERE

SMALL = (
    "--model_dim 64 --num_heads 2 --head_dim 32 --batch_seqs 3 --device cpu --seq_len 128 "
    "--val_seq_len 256 --val_tokens 256 --num_iterations 8 --keep 0 --num_layers 4 "
    f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin --epochs 0"
)


def test_without_flags_the_demo_trains_on_the_sample(capsys):
    """All is its own but the width and the number of steps."""
    narrow = "--device cpu --model_dim 32 --head_dim 16 --num_iterations 8 --keep 0"
    main(f"{narrow} --val_tokens 1024 --val_loss_every 4".split())
    console = capsys.readouterr().out
    losses = val_losses(console)
    assert console.startswith("record demo --") and list(losses) == [0, 4, 8]
    assert abs(losses[0] - 10.8258) < 0.01 and losses[8] < 9


def test_aligned_the_sample_trains(capsys, monkeypatch):
    """Each sequence begins with a document that is cut, and none comes twice."""
    seen, step_of = [], train_gpt.train_step

    def watching(model, optimizers, inputs, *others, **options):
        seen.append(inputs.clone())
        return step_of(model, optimizers, inputs, *others, **options)

    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(train_gpt, "train_step", watching)
    main(f"--record {A} {SMALL} --val_loss_every 0 --max_document_tokens 100".split())
    assert val_losses(capsys.readouterr().out)[8] < 10
    assert len(seen) == 8 and all((inputs[:, [0, 100]] == 50256).all() for inputs in seen)
    assert len({tuple(inputs.flatten().tolist()) for inputs in seen}) == 8


def test_graphs_of_four_layers_equal_the_layers(bare, randomize, compile_with, monkeypatch):
    """Loss and all gradients of two graphs: the later one reads what the first has left. The second
    of two micro-batches is added to each gradient; two that were one tensor would get it twice."""
    hp = replace(
        bare,
        num_layers=6,
        layers="short+v0+pair,long+v1,short+backout,short+x0,none+x1,long+v0+in3",
        **TECHNIQUES,
    )
    compile_with(aot_eager)
    tokens = torch.randint(0, 511, (257,), generator=torch.Generator().manual_seed(0))
    tokens[[0, 90, 200]] = 511
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(train_gpt.compiled, "allowed", compiled)
        model = randomize(GPT(hp))
        for _ in range(2):
            loss = model(tokens[:-1].int(), tokens[1:], Moment(0, hp))
            loss.backward()
        # Masks, rotary tables, tokens, layers twice, the loss, its backward pass.
        assert counters["stats"]["unique_graphs"] == (7 if compiled else 0)
        found.append({name: p.grad.to_dense() for name, p in model.named_parameters()})
        found[-1]["loss"] = loss.detach()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)


def test_a_run_compiles_nothing_after_warm_up(compile_with, monkeypatch, flags):
    """Stages have lengths, windows, targets, a tied head, and Adam learns at each second step."""
    stages = "length=1+window=128+targets=1/.5,length=1+window=128,length=2+window=256"
    more = f"--compile on --batch_seqs 2 --keep 0 --stages {stages} --extension_frac 0"
    words = [*flags[D], *more.split(), *["--layers", "short+v0+pair,long+v1+x0+in0"]]
    run = partial(main, [*words, "--num_layers", "2"])
    after_warm_up, at_end = graphs_of(run, compile_with, monkeypatch)
    assert after_warm_up == at_end > 10
