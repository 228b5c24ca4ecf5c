"""Runs on several ranks equal a run on one, and each rank keeps its share of the state."""

from pathlib import Path

import pytest

import spy
import train_gpt
from runs import Program, assert_close, console_of, outcome, val_losses


@pytest.fixture
def flags(flags) -> list[str]:
    """Eight steps, with an Adam epsilon that does not amplify rounding noise."""
    flags += ["--num_iterations", "8", "--val_loss_every", "2", "--adam_eps", "1e-6"]
    flags += ["--num_layers", "6", "--model_dim", "32", "--num_heads", "1", "--run_id", "it"]
    return [*flags, "--val_tokens", "1024"]  # 4 sequences: of 8 ranks, 4 get none


def check_ranks(flags: list[str], alone: Path, together: Path, ranks: int) -> None:
    """Compare the runs of two folders. All ranks have the same weights, and 1/ranks of the state,
    up to padding: two floats for each element that Adam trains, one for each of Muon's."""
    expected = outcome(alone)
    assert_close(outcome(together), expected)
    assert expected.rows[8]["val_loss"] < expected.rows[0]["val_loss"] - 1
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    model = train_gpt.GPT(hp)
    muon = [p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim > 1]
    state = 4 * (2 * sum(p.numel() for p in model.parameters()) - sum(muon))
    reports = spy.reports(together)
    assert len(reports) == ranks and len({report["weights"] for report in reports}) == 1
    for report in reports:
        assert state / ranks <= report["state"] < 1.35 * state / ranks


@pytest.mark.parametrize(("ranks", "nodes", "clip"), [(8, 1, 0), (4, 2, 0.1)])
def test_ranks_of_some_nodes_equal_one(ranks, nodes, clip, flags, tmp_path, monkeypatch):
    """With clipping, each row has the gradient's norm."""
    flags += ["--grad_clip", str(clip)]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    losses = val_losses(console_of(flags, alone))
    assert all(row["grad_norm"] > clip for row in outcome(alone).rows[1:] if clip)
    monkeypatch.chdir(together)
    program = Program(flags, ranks, spy.main, nodes=nodes)
    assert program.end() == [0] * ranks, program.text("err")
    check_ranks(flags, alone, together, ranks)
    assert val_losses(program.text("out")) == pytest.approx(losses, abs=1e-4)
    assert not any(program.text("out", rank) for rank in range(1, ranks))
