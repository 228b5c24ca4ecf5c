"""torch.compile changes no result of the frontier."""

import shutil
from dataclasses import replace

import pytest
import torch
from frontier.conftest import bare, with_window  # noqa: F401 (fixtures)
from frontier.small_runs import D, main, small_flags
from runs import rows
from torch._dynamo.utils import counters
from train_gpt_2026 import GPT

import train_gpt
from train_gpt import END_OF_TEXT

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")


def test_a_compiled_run_has_the_losses_of_eager_and_no_graph_break(tmp_path, monkeypatch):
    """Stages, several targets, a tied head, bigrams, pairs of heads, NorMuon, cautious steps."""
    monkeypatch.chdir(tmp_path)
    more = "--layers short+v0+pair,long+v1+x0+in0+backout --num_layers 2 --batch_seqs 2"
    words = [*small_flags(tmp_path)[D], *more.split(), "--val_seq_len", "256", "--keep", "0"]
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for choice in ("off", "on"):
        main([*words, "--compile", choice, "--run_id", choice])
        steps = rows(tmp_path / f"logs/{choice}.jsonl")
        losses.append([row[key] for row in steps for key in row if key.endswith("_loss")])
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert len(losses[0]) == 8 + 5 and losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_compiled_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(
    bare,  # noqa: F811
    randomize,
    with_window,  # noqa: F811
    monkeypatch,
):
    """Of paired heads. FlexAttention has no backward on a CPU: gradients are in tests/gpu."""
    hp = replace(
        bare,
        vocab_size=50257,
        num_layers=2,
        layers="none,short+v0+pair",
        paired_heads=True,
        window_rule="distance",
    )
    model, flexible = (randomize(GPT(hp).eval()) for _ in range(2))
    flexible.blocks[1].attn.attend = torch.compile(train_gpt.attend, dynamic=False)
    generator, length = torch.Generator().manual_seed(1), 512

    def compare(starts: tuple[int, ...], window: int) -> None:
        tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
        tokens[list(starts)] = END_OF_TEXT
        now = with_window(window, hp)
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, "make_mask", train_gpt.block_lists)
            found = flexible.hidden(tokens, now)
        torch.testing.assert_close(found, model.hidden(tokens, now), rtol=0, atol=1e-4)

    with torch.no_grad():
        compare((0,), 128)  # compiles it
        with torch._dynamo.config.patch(error_on_recompile=True):
            for window in (256, 512, 1792):
                compare((0, 100, 300, 301), window)
