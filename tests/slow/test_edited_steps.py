"""One line of train_gpt.py, edited, changes whole compiled steps as it changes uncompiled ones."""

from dataclasses import replace

import pytest
import torch

from test_edits import check_edit, drawn, edited, needs_compiler  # noqa: F401


@torch.enable_grad()
def steps(m, hp):
    """Two steps of a model with two layers, one of them with values from a table."""
    model = drawn(m.GPT(hp))
    optimizers = m.Optimizers(model, hp)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    results = [m.train_step(model, optimizers, *batch, m.Moment(step, hp)) for step in range(2)]
    return [*results, *model.parameters()]


EDITS = [
    (steps, "position + (1 - window)", "position + (1 - window // 2)"),
    (steps, "pairs.flip(-2) * (sin", "pairs.flip(-2) * (-sin"),
    (steps, "v = v + self.lambdas[1] * value.view_as(v)", "v = v - value.view_as(v)"),
    (steps, "F.relu(", "F.gelu("),
    (steps, "x = x + skip[0] * skip[1]", "x = x - skip[0] * skip[1]"),
    (steps, "return 2 * self.softcap *", "return 3 * self.softcap *"),
    (steps, "grad.lerp(buffer, momentum)", "grad.lerp(buffer, 0 * momentum)"),
]


@needs_compiler
@pytest.mark.parametrize(("result_of", "old", "new"), EDITS)
def test_an_edited_line_changes_compiled_steps_as_uncompiled(result_of, old, new, edited, tiny):  # noqa: F811
    sizes = {"num_layers": 2, "layers": "long+v0,short", "batch_seqs": 1, "adam_eps": 1e-3}
    hp = replace(tiny, window_rule="tokens", window_min=64, window_step=64, **sizes)
    check_edit(result_of, old, new, edited, hp)
