"""Runs on several ranks equal a run on one, and each rank does its share of the work."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import spy
import torch
from conftest import language
from runs import Program, console_of, rows, val_losses

import train_gpt


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """Eight steps, with an Adam epsilon that does not amplify rounding noise."""
    flags = language(tmp_path_factory.mktemp("data"))
    flags += ["--num_iterations", "8", "--val_loss_every", "2", "--adam_eps", "1e-6"]
    flags += ["--num_layers", "6", "--model_dim", "32", "--num_heads", "1", "--save_every", "8"]
    return [*flags, "--val_tokens", "1024"]  # 4 sequences: of 8 ranks, 4 get none


def outcome(folder: Path, stdout: str) -> SimpleNamespace:
    """Return losses, final weights, what each rank saw, and the rows of the .jsonl."""
    (path,) = folder.glob("logs/*/state_step000008.pt")
    return SimpleNamespace(
        losses=val_losses(stdout),
        weights=train_gpt.load_checkpoint(path, train_gpt.Run)["model"],
        reports=[json.loads(p.read_text()) for p in sorted(folder.glob("rank*.json"))],
        rows=rows(path.parent.with_suffix(".jsonl")),
    )


def alone(flags, tmp_path_factory) -> SimpleNamespace:
    """Return the outcome on one rank, which sends nothing."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "reduce_scatter", None)
        patch.setattr(train_gpt, "all_gather", None)
        found = outcome(folder, console_of(flags, folder))
    assert list(found.losses) == [0, 2, 4, 6, 8] and found.losses[8] < found.losses[0] - 1
    return found


@pytest.fixture(scope="module")
def unclipped(flags, tmp_path_factory) -> SimpleNamespace:
    return alone(flags, tmp_path_factory)


def assert_same(found, alone, ranks: int):
    """Check losses to 1e-4, weights and gradients' norms to 1e-3, and that all ranks are equal."""
    assert list(found.losses) == list(alone.losses)
    for step, loss in alone.losses.items():
        assert found.losses[step] == pytest.approx(loss, abs=1e-4)
    for name, weight in alone.weights.items():
        error = (found.weights[name] - weight).norm() / weight.norm()
        assert error < 1e-3, f"{name}: {error:.1e}"
    assert len(found.reports) == ranks and len({r["weights"] for r in found.reports}) == 1
    for row, expected in zip(found.rows, alone.rows, strict=True):
        assert row.get("train_loss") == pytest.approx(expected.get("train_loss"), abs=1e-4)
        norm = expected.get("grad_norm", 0.0)
        assert row.get("grad_norm", 0.0) == pytest.approx(norm, rel=1e-3)


def expected_bytes(model: torch.nn.Module, ranks: int) -> int:
    """Return the bytes of a step's reduce-scatters and all-gathers, as in BENCHMARKS.md.

    Each table of the vocabulary, and all value tables together, is padded to a multiple of the
    ranks; so are messages of matrices, which have at least 8 and one a rank. Each travels once as
    gradient and once as weight or update, in float32.
    """

    def up(n: int) -> int:
        return -(-n // ranks) * ranks

    tables = Counter()  # rows of a group of tables, and of matrices of a shape
    matrices = Counter()
    for name, p in model.named_parameters():
        if name.startswith("blocks.") and p.ndim >= 2:
            matrices[p.shape[-2:]] += p.shape[:-2].numel()
        elif p.ndim == 2:
            tables[name.split(".")[0], p.shape[1]] += len(p)
    elements = sum(up(count) * width for (_, width), count in tables.items())
    for shape, count in matrices.items():
        message = up(min(count, max(8, ranks)))
        elements += -(-count // message) * message * shape.numel()
    return 2 * 4 * elements


def assert_shared(flags, reports: list[dict], ranks: int):
    """Check that a step sends what the formula says, gradients first, and that each rank keeps
    1/ranks of the state, up to padding: two floats for each element that Adam trains, one for each
    of Muon's."""
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    model = train_gpt.GPT(hp)
    muon = [p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim > 1]
    state = 4 * (2 * sum(p.numel() for p in model.parameters()) - sum(muon))
    for report in reports:
        assert sum(size for _, size in report["sent"]) == expected_bytes(model, ranks)
        order = [name for name, _ in report["sent"]]
        assert order == sorted(order, reverse=True)
        assert state / ranks <= report["state"] < 1.35 * state / ranks


def test_eight_ranks_equal_one_and_share_the_work(flags, unclipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = Program(flags, 8, spy.main)
    assert program.end() == [0] * 8, program.text("err")
    assert not any(program.text("out", rank) for rank in range(1, 8))
    found = outcome(tmp_path, program.text("out"))
    assert_same(found, unclipped, 8)
    assert_shared(flags, found.reports, 8)


def test_two_nodes_of_two_ranks_clip_gradients_as_one_does(
    flags, unclipped, tmp_path, tmp_path_factory, monkeypatch
):
    """Each row then has the gradient's norm."""
    flags = [*flags, "--grad_clip", "0.1"]
    expected = alone(flags, tmp_path_factory)
    assert all(row["grad_norm"] > 0.1 for row in expected.rows[1:])
    assert expected.losses != unclipped.losses
    monkeypatch.chdir(tmp_path)
    program = Program(flags, 4, spy.main, nodes=2)
    assert program.end() == [0] * 4, program.text("err")
    assert_same(outcome(tmp_path, program.text("out")), expected, 4)


def test_gradients_are_sent_in_bfloat16_only_where_the_published_records_did(tiny, monkeypatch):
    """Those of the embeddings, which are bfloat16 on CUDA; their sums are kept in float32."""
    sent = []
    monkeypatch.setattr(train_gpt, "reduce_scatter", lambda _, x, async_op: sent.append(x.dtype))
    monkeypatch.setattr(train_gpt.dist, "all_reduce", lambda x, async_op: sent.append(x.dtype))
    model = train_gpt.GPT(tiny)
    model.embed.bfloat16()
    for group, shared in train_gpt.Optimizers(model, tiny, rank=0, world_size=2).groups:
        sent.clear()
        shared.missing.update(range(len(shared.sums)))
        shared.send_rest()
        dtype = torch.bfloat16 if group.name == "embed" else torch.float32
        assert set(sent) == {dtype}
        assert shared.sums.dtype == torch.float32
    assert model.embed.weight.grad.dtype == torch.float32
