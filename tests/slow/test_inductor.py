"""Inductor on a CPU changes no result and leaves no graph break."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import train_gpt
from frontier.small_runs import D, main, small_flags
from runs import rows
from test_edits import (
    edited,  # noqa: F401
    test_an_edited_line_changes_compiled_code_as_uncompiled,  # noqa: F401
)
from test_masks import check_flex_attention

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")
# Windows of 128, 256 and 384 tokens, and validations of another length.
WINDOWS = (
    "--seq_len 512 --val_seq_len 256 --window_span 384 --num_iterations 6 --adam_eps 1e-6 "
    "--layers short+v0,long"
)
# Stages, several targets, a tied head, bigrams, pairs of heads, NorMuon, cautious steps.
STAGES = "--layers short+v0+pair,long+v1+x0+in0+backout --val_seq_len 256 --keep 0"


@pytest.fixture
def compile_with():
    """Let Inductor compile, whatever backend a test names."""

    def use(backend) -> None:
        torch._dynamo.reset()
        counters.clear()

    return use


@pytest.mark.parametrize(("fork", "more", "count"), [(False, WINDOWS, 10), (True, STAGES, 13)])
def test_a_compiled_run_has_the_losses_of_eager_and_no_graph_break(
    fork, more, count, flags, tmp_path
):
    start = train_gpt.main
    if fork:
        start, flags = main, small_flags(tmp_path)[D]
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for choice in ("off", "on"):
        words = f"{more} --num_layers 2 --batch_seqs 2 --compile {choice} --run_id {choice}"
        start([*flags, *words.split()])
        steps = rows(tmp_path / f"logs/{choice}.jsonl")
        losses.append([row[key] for row in steps for key in row if key.endswith("_loss")])
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert len(losses[0]) == count and losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(
    tiny, randomize, monkeypatch
):
    check_flex_attention("inductor", tiny, randomize, monkeypatch)
