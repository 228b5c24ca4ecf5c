"""A run's .jsonl: what its rows hold, and that no SIGKILL leaves half of one."""

import math
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
from runs import rows, val_losses

import train_gpt
from train_gpt import GPT, GRAD_NORMS, Metrics, Optimizers


def test_a_row_for_each_step_says_what_the_console_says(flags, tmp_path, capsys):
    flags += ["--num_iterations", "27", "--val_loss_every", "10", "--run_id", "it"]
    train_gpt.main(flags)
    losses, found = val_losses(capsys.readouterr().out), rows(tmp_path / "logs/it.jsonl")
    hp, _ = train_gpt.parse_args(flags)
    assert [row["step"] for row in found] == list(range(28))
    validated = {row["step"]: round(row["val_loss"], 4) for row in found if "val_loss" in row}
    assert validated == losses and list(losses) == [0, 10, 20, 27]
    assert set(found[0]) == {"step", "val_loss"}
    for step, row in enumerate(found[1:]):
        assert row["lr"] == train_gpt.get_lr(step, hp)
        assert row["momentum"] == train_gpt.get_muon_momentum(step, hp)
        assert row["window"] == train_gpt.get_window_size(step, hp)
        assert row["tokens_per_s"] == pytest.approx(8 * 128 / row["ms"] * 1e3, rel=1e-3, abs=1)
        assert 50 < row["memory_mib"] < 20000
        assert (set(GRAD_NORMS) <= set(row)) == (step + 1 == 25)
    assert found[1]["train_loss"] == pytest.approx(math.log(512), abs=1e-3)  # the head is zero
    assert found[27]["train_loss"] < 5.5
    log = (tmp_path / "logs/it.txt").read_text()
    total = int(log.split("step:27/27 val_loss")[1].split("train_time:")[1].split("ms")[0])
    assert 0.5 * total < sum(row["ms"] for row in found[1:]) < total + 2  # a machine may be busy


def test_gradient_norms_are_those_of_the_mean_loss(tiny, randomize):
    """Against autograd's own gradient of all sequences' mean loss, with a plain head and loss."""
    hp = replace(tiny, batch_seqs=2, grad_clip=1e9)
    model, plain = (randomize(GPT(hp)) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(hp.vocab_size, (2, 129), generator=generator)
    optimizers = Optimizers(model, hp)
    result = train_gpt.train_step(model, optimizers, tokens[:, :-1].int(), tokens[:, 1:], 3)
    assert len(result) == 2 + len(GRAD_NORMS)

    for table in (plain.embed, *plain.value_embeds["embed"].values()):
        table.weight.grad = torch.zeros_like(table.weight)
    losses = [torch.nn.functional.cross_entropy(plain.logits(t[:-1], 128), t[1:]) for t in tokens]
    torch.stack(losses).mean().backward()
    assert result[0].item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    squares = dict.fromkeys(GRAD_NORMS, 0.0)
    for name, p in plain.named_parameters():
        kind = "head" if "lm_head" in name else "embed" if "embed" in name else None
        kind = kind or ("scalar" if p.ndim < 2 else "muon")
        squares[f"grad_norm_{kind}"] += p.grad.double().square().sum().item()
    expected = [square**0.5 for square in squares.values()]
    assert result[2:].tolist() == pytest.approx(expected, rel=1e-4) and min(expected) > 1e-3


def test_rows_after_the_checkpoint_and_halves_of_rows_are_taken_back(tmp_path, tiny):
    path = tmp_path / "it.jsonl"
    whole = "".join(f'{{"step": {step}}}\n' for step in range(8))
    for first_step, cut in ((5, 0), (5, 4), (7, 4), (0, 0)):
        path.write_text(whole[: len(whole) - cut])
        metrics = Metrics(path, tiny, first_step)
        metrics.row = {"step": "new"}
        metrics.write()
        kept = range(min(first_step + 1, 8 - bool(cut)) if first_step else 0)
        assert [row["step"] for row in rows(path)] == [*kept, "new"]
    path.write_text(whole.replace('{"step": 4}', '{"step": {"step": 4}'))
    Metrics(path, tiny, 6)
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3]


def test_a_killed_process_leaves_whole_rows(tmp_path):
    """As a write is cut only between pages, if at all: no row lies in two."""
    rng = random.Random(0)
    for i in range(20):
        path = tmp_path / f"{i}.jsonl"
        metrics = Metrics(path, train_gpt.RECORDS["demo"], 0)
        child = os.fork()
        if not child:
            try:
                for _ in range(10**6):
                    metrics.row = {"step": 0, "text": "x" * rng.randrange(700)}
                    metrics.write()
            finally:
                os._exit(1)
        try:
            time.sleep(0.02 + 0.03 * rng.random())
        finally:
            os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len(rows(path)) > 100 and path.read_bytes().endswith(b"\n")
        end = 0
        for line in path.read_bytes().splitlines(keepends=True):
            start, end = end, end + len(line)
            assert start // 4096 == (end - 1) // 4096
