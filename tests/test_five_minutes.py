"""forks/five_minutes.py: the table in its docstring, from the models that its records build."""

import pytest
import torch

import five_minutes
import train_gpt

ROWS = [line.split() for line in five_minutes.__doc__.splitlines() if "e1" in line]


def million(text: str) -> float:
    return 1e6 * float(text.removesuffix("M"))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_record_trains_20_tokens_a_parameter_in_about_five_minutes_at_the_assumed_rate(row):
    name, rate, budget, parameters, tokens, cost, seconds, batch, steps = row
    hp = five_minutes.RECORDS[name]
    with torch.device("meta"):
        model = train_gpt.GPT(hp)
    embeddings = sum(p.numel() for table in model.tables() for p in table.parameters())
    scalars = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    count = sum(p.numel() for p in model.parameters()) - embeddings - scalars
    read = hp.num_iterations * hp.batch_seqs * hp.seq_len
    assert read / count == pytest.approx(20, abs=0.02)
    assert [count, read] == [pytest.approx(million(x), rel=3e-3) for x in (parameters, tokens)]
    assert [int(steps), int(batch)] == [hp.num_iterations, hp.batch_seqs * hp.seq_len]
    assert float(cost) == pytest.approx(6 * count * read, rel=5e-3)
    assert float(budget) == pytest.approx(300 * 1e12 * float(rate), rel=5e-3)
    assert float(seconds) == pytest.approx(6 * count * read / (1e12 * float(rate)), abs=1)
    assert float(seconds) == pytest.approx(300, rel=0.07)


def test_momentum_rises_in_the_share_of_the_steps_in_which_the_original_rises():
    original = train_gpt.RECORDS["2025-01-26_BatchSize"]
    share = original.momentum_warmup_steps / original.num_iterations
    for hp in five_minutes.RECORDS.values():
        assert round(share * hp.num_iterations) == hp.momentum_warmup_steps
    assert set(five_minutes.RECORDS) == {row[0] for row in ROWS} | {"demo"}
