"""One line of train_gpt.py, edited, changes whole compiled steps as it changes uncompiled ones."""

from dataclasses import replace

import pytest
import torch
from test_edits import check_edit, drawn, edited, needs_compiler, randn  # noqa: F401


@torch.enable_grad()
def steps(m, hp):
    """Two steps of a model with two layers, one of them with values from a table."""
    model = drawn(m.GPT(hp))
    optimizers = m.Optimizers(model, hp)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    results = [m.train_step(model, optimizers, *batch, m.Moment(step, hp)) for step in range(2)]
    return [*results, *model.parameters()]


@torch.enable_grad()
def linear_in_float8(m, hp):
    layer, x = drawn(m.CastedLinear(32, 48, True)), randn(16, 32).requires_grad_()
    out = m.compiled(layer.forward)(x)
    return [out.float(), *torch.autograd.grad(out, [x, layer.weight], randn(16, 48).bfloat16())]


EDITS = [
    (steps, "position + (1 - window)", "position + (1 - window // 2)"),
    (steps, "torch.cat([sin, -sin], dim=-1)", "torch.cat([sin, sin], dim=-1)"),
    (steps, "v = v + self.lambdas[1] * value.view_as(v)", "v = v - value.view_as(v)"),
    (steps, "F.relu(", "F.gelu("),
    (steps, "x = x + skip[0] * skip[1]", "x = x - skip[0] * skip[1]"),
    (steps, "most, slope = 2 * softcap", "most, slope = 3 * softcap"),
    (steps, "grad.lerp(buffer, momentum)", "grad.lerp(buffer, 0 * momentum)"),
    (linear_in_float8, "return matmul(x, w.T, x_s", "return 2 * matmul(x, w.T, x_s"),
    (linear_in_float8, "grad_w = matmul(grad.T, x, ", "grad_w = matmul(grad.T, x, 2 * "),
]


@needs_compiler
@pytest.mark.parametrize(("result_of", "old", "new"), EDITS)
def test_an_edited_line_changes_compiled_steps_as_uncompiled(result_of, old, new, edited, tiny):  # noqa: F811
    sizes = {"num_layers": 2, "layers": "long+v0,short", "batch_seqs": 1, "adam_eps": 1e-3}
    hp = replace(tiny, window_rule="tokens", window_min=64, window_step=64, **sizes)
    check_edit(result_of, old, new, edited, hp)
