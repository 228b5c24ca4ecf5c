"""A run's .jsonl: what its rows hold, and that it is in order when a run goes on."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from runs import rows, val_losses

import train_gpt
from train_gpt import GPT, Optimizers


def test_a_row_for_each_step_says_what_the_console_says(flags, tmp_path, capsys):
    flags += ["--num_iterations", "27", "--val_loss_every", "10", "--run_id", "it"]
    flags += ["--batch_seqs", "2", "--val_tokens", "512", "--grad_clip", "100"]
    train_gpt.main(flags)
    losses = val_losses(capsys.readouterr().out)
    found = rows(tmp_path / "logs/it.jsonl")
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    assert [row["step"] for row in found] == list(range(28))
    validated = {row["step"]: round(row["val_loss"], 5) for row in found if "val_loss" in row}
    assert validated == losses and list(losses) == [0, 10, 20, 27]
    assert set(found[0]) == {"step", "val_loss"}
    always = {"step", "train_loss", "ms", "tokens_per_s", "grad_norm"}
    always |= vars(train_gpt.Moment(0, hp)).keys()
    for step, row in enumerate(found[1:]):
        now = vars(train_gpt.Moment(step, hp))
        assert row.items() >= (now | {"step": step + 1}).items()
        assert row.keys() - {"val_loss"} == always
    assert found[1]["train_loss"] == pytest.approx(math.log(512), abs=1e-3)  # the head is zero
    assert found[27]["train_loss"] < 5.5


def test_the_gradient_s_norm_is_that_of_the_mean_loss(tiny, randomize):
    hp = replace(tiny, batch_seqs=2, grad_clip=1e9)
    model, plain = randomize(GPT(hp)), randomize(GPT(hp))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(hp.vocab_size, (2, 129), generator=generator)
    optimizers = Optimizers(model, hp)
    now = train_gpt.Moment(3, hp)
    result = train_gpt.train_step(model, optimizers, tokens[:, :-1].int(), tokens[:, 1:], now)
    losses = [
        F.cross_entropy(plain.lm_head.logits(plain.hidden(t[:-1], now)), t[1:]) for t in tokens
    ]
    torch.stack(losses).mean().backward()
    assert result[0].item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    squares = sum(p.grad.double().square().sum().item() for p in plain.parameters())
    assert result[2:].tolist() == pytest.approx([squares**0.5], rel=1e-4)


def test_rows_of_a_run_that_goes_on_follow_half_a_row_and_count(flags, tmp_path):
    flags += ["--num_iterations", "6", "--batch_seqs", "2", "--val_tokens", "256"]
    flags += ["--save_every", "4", "--val_loss_every", "4", "--run_id", "it"]
    train_gpt.main(flags)
    path = tmp_path / "logs/it.jsonl"
    whole = rows(path)
    path.write_text(path.read_text() + '{"step": {"st')
    (tmp_path / "logs/it/state_step000006.pt").unlink()
    train_gpt.main([*flags, "--resume", "on"])
    again = [json.loads(line)["step"] for line in path.read_text().split("st\n")[1].splitlines()]
    assert again == [5, 6, 6]
    for found, before in zip(rows(path), whole, strict=True):
        assert found.keys() == before.keys()
        assert found.get("train_loss") == before.get("train_loss")
