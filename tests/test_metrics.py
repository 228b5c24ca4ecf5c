"""A run's .jsonl: what its rows hold, and that it is in order when a run goes on."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from runs import rows, val_losses

import train_gpt
from train_gpt import GPT, Optimizers


def test_a_row_for_each_step_says_what_the_console_says(flags, tmp_path, capsys):
    flags += ["--num_iterations", "27", "--val_loss_every", "10", "--run_id", "it"]
    flags += ["--batch_seqs", "2", "--val_tokens", "512"]
    train_gpt.main(flags)
    losses = val_losses(capsys.readouterr().out)
    found = rows(tmp_path / "logs/it.jsonl")
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    assert [row["step"] for row in found] == list(range(28))
    validated = {row["step"]: round(row["val_loss"], 4) for row in found if "val_loss" in row}
    assert validated == losses and list(losses) == [0, 10, 20, 27]
    assert set(found[0]) == {"step", "val_loss"}
    norms = {f"grad_norm_{name}" for name in ("head", "muon", "embed", "values", "scalar")}
    always = {"step", "train_loss", "ms", "tokens", "tokens_per_s", "memory_mib"}
    always |= {f.name for f in dataclasses.fields(train_gpt.Moment)}
    for step, row in enumerate(found[1:]):
        assert row.items() >= (vars(train_gpt.moment(step, hp)) | {"step": step + 1}).items()
        assert row["tokens"] == 2 * 128 * (step + 1)
        assert 50 < row["memory_mib"] < 20000
        assert row.keys() - {"val_loss"} == (always | norms if step + 1 == 25 else always)
    assert found[1]["train_loss"] == pytest.approx(math.log(512), abs=1e-3)  # the head is zero
    assert found[27]["train_loss"] < 5.5


def test_gradient_norms_are_those_of_the_mean_loss(tiny, randomize):
    hp = replace(tiny, batch_seqs=2, grad_clip=1e9)
    model, plain = randomize(GPT(hp)), randomize(GPT(hp))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(hp.vocab_size, (2, 129), generator=generator)
    optimizers = Optimizers(model, hp)
    now = train_gpt.moment(3, hp)
    result = train_gpt.train_step(model, optimizers, tokens[:, :-1].int(), tokens[:, 1:], now)

    for table in (plain.embed, *plain.value_embeds["embed"].values()):
        table.weight.grad = torch.zeros_like(table.weight)
    losses = [torch.nn.functional.cross_entropy(plain.logits(t[:-1], 128), t[1:]) for t in tokens]
    torch.stack(losses).mean().backward()
    assert result[0].item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    squares = dict.fromkeys((group.name for group in train_gpt.parameter_table(hp)), 0.0)
    for name, p in plain.named_parameters():
        starts = {"lm_head": "head", "embed": "embed", "value_embeds": "values"}
        kind = starts.get(name.split(".")[0], "scalar" if p.ndim < 2 else "muon")
        squares[kind] += p.grad.double().square().sum().item()
    expected = [square**0.5 for square in squares.values()]
    assert result[2:].tolist() == pytest.approx(expected, rel=1e-4) and min(expected) > 1e-3


def test_rows_after_the_checkpoint_and_half_a_row_are_taken_back(flags, tmp_path):
    flags += ["--num_iterations", "6", "--batch_seqs", "2", "--val_tokens", "256"]
    flags += ["--save_every", "4", "--val_loss_every", "4", "--run_id", "it"]
    train_gpt.main(flags)
    path = tmp_path / "logs/it.jsonl"
    whole = rows(path)
    path.write_text(path.read_text() + '{"step": {"st')
    train_gpt.main([*flags, "--resume", "logs/it/state_step000004.pt"])
    found = rows(path)
    assert [row["step"] for row in found] == list(range(7))
    assert found[:5] == whole[:5] and found[6]["train_loss"] == whole[6]["train_loss"]


def test_a_new_run_begins_with_no_row(flags, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/it.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    train_gpt.main([*flags, "--num_iterations", "1", "--run_id", "it"])
    assert [row["step"] for row in rows(tmp_path / "logs/it.jsonl")] == [0, 1]
