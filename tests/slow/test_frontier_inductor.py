"""torch.compile changes no result of the frontier, and compiles nothing after warm-up."""

import shutil
from dataclasses import replace

import pytest
import torch
from frontier.conftest import bare, with_window  # noqa: F401 (fixtures)
from frontier.small_runs import D, small_flags
from torch._dynamo.utils import counters
from train_gpt_2026 import GPT, Optimizers, Run, attend, moment

import train_gpt
from train_gpt import END_OF_TEXT, block_lists

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor on a CPU needs g++")


def training_losses(hp, compiled: bool) -> list[float]:
    """Return the losses of a run of all stages, and of its last validation."""
    torch.manual_seed(0)
    device = torch.device("cpu")
    model = GPT(hp).to_device(device, compiled)
    optimizers = Optimizers(model, hp)
    moments = [moment(step, hp) for step in range(hp.num_iterations + 1)]
    if compiled:
        train_gpt.warm_up(model, optimizers, moments, device)
    warm = counters["stats"]["unique_graphs"]
    words = torch.randint(1, 24, (2, 385), generator=torch.Generator().manual_seed(1)).cumsum(1)
    words %= hp.vocab_size
    losses = []
    for now in moments[:-1]:
        inputs, targets = words[:, : now.seq_len].int(), words[:, 1 : now.seq_len + 1]
        losses.append(train_gpt.train_step(model, optimizers, inputs, targets, now)[0].item())
    batch = words[:1, :256].int(), words[:1, 1:257]
    losses.append(train_gpt.evaluate(model, batch, moments[-1], device))
    assert counters["stats"]["unique_graphs"] == warm and not counters["graph_break"]
    return losses


def test_compiled_training_equals_eager_without_graph_breaks_or_late_compilation(tmp_path):
    """Stages, several targets, a tied head, bigrams, pairs of heads, NorMuon, cautious steps."""
    more = "--layers short+v0+pair,long+v1+x0+in0+backout --num_layers 2 --batch_seqs 2"
    words = [*small_flags(tmp_path)[D], *more.split(), "--val_seq_len", "256"]
    hp, _ = train_gpt.parse_args(words, Run)
    torch._dynamo.reset()
    counters.clear()
    assert training_losses(hp, compiled=True) == pytest.approx(training_losses(hp, False), abs=1e-4)


def test_compiled_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(
    bare,  # noqa: F811
    randomize,
    with_window,  # noqa: F811
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
    model = randomize(GPT(hp).eval())
    generator, length = torch.Generator().manual_seed(1), 512
    flex = torch.compile(attend, dynamic=False)

    def compare(starts: tuple[int, ...], window: int) -> None:
        tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
        tokens[list(starts)] = END_OF_TEXT
        now = with_window(window, hp)
        masks = model.masks(tokens, now, block_lists)
        rotary = model.rotary_of(length, now, torch.device("cpu"))
        found = model.trunk(*model.embedded(tokens), rotary, masks, attend=flex)
        torch.testing.assert_close(found, model.hidden(tokens, now), rtol=0, atol=1e-4)

    with torch.no_grad():
        compare((0,), 128)  # compiles it
        with torch._dynamo.config.patch(error_on_recompile=True):
            for window in (256, 512, 1792):
                compare((0, 100, 300, 301), window)
