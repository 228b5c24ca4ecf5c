"""Compile what a GPU would run of the frontier, without one: as tests/gpu_code.py, with its flags.

python tests/frontier/gpu_code_2026.py h100 2026-03-06_SimplifyHC on layer loss muon
"""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "forks")]
import gpu_code  # noqa: E402
import train_gpt_2026  # noqa: E402
from gpu_code import CAPABILITY, CARD, captured  # noqa: E402
from train_gpt_2026 import GPT, Block, Run, moment  # noqa: E402

import train_gpt  # noqa: E402

# As the function by which the fork asks for a device answers on the card.
SMALL = CARD.total_memory < 40e9
train_gpt_2026.memory_is_small = torch.compiler.assume_constant_result(
    lambda device, tokens=49152: SMALL
)


def layer_graphs(hp):
    """Yield the graphs of the layer that has most: earlier outputs, values from elsewhere, a long
    window; and the same of those whose heads are paired."""
    with torch.device("meta"):
        model = GPT(hp)
    now = moment(0, hp)

    def features(layer) -> tuple[int, bool]:
        more = layer.values, layer.skip_from, layer.source
        return sum(field is not None for field in more), layer.window == "long"

    for paired in sorted({layer.paired for layer in model.layers}):
        layer = max([row for row in model.layers if row.paired == paired], key=features)
        shape = 1, hp.seq_len, hp.model_dim
        x, x0, value, output, bigram, source = (
            torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for _ in range(6)
        )
        tokens = torch.zeros(hp.seq_len, dtype=torch.int32)
        mask = model.masks(tokens, now, train_gpt.block_lists)[layer.mask]
        call = captured(
            Block(hp, layer),
            x,
            x0,
            value,
            None if layer.skip_from is None else (torch.ones(()), output),
            model.rotary_of(hp.seq_len, now, torch.device("cpu"))[paired],
            mask,
            train_gpt_2026.attend,
            bigram=bigram if hp.bigram_rows else None,
            source=None if layer.source is None else source,
        )
        yield "paired layer" if paired else "layer", call


@torch.no_grad()
def loss_graphs(hp):
    """Yield the graphs of the steps of the head and its loss, as a run compiles them."""
    with torch.device("meta"):
        head = train_gpt_2026.Head(hp)
    tokens, vocab = head.chunk_len(torch.device("cuda")), hp.padded_vocab
    train_gpt.LOSS_ROWS = tokens  # all rows of a chunk at once
    x = torch.empty(tokens, hp.model_dim, dtype=torch.bfloat16)
    targets = torch.zeros(tokens, dtype=torch.int64)
    several, shares, count = targets, None, hp.most_targets
    if count > 1:
        several, shares = train_gpt_2026.next_targets(targets, count), torch.ones(count)
    weight, grad_w = torch.empty(vocab, hp.model_dim), torch.zeros(vocab, hp.model_dim)
    quantize, forward, backward = train_gpt.HEAD_STEPS
    loss = partial(captured, forward, cross_entropy=head.cross_entropy)
    bfloat16 = weight.bfloat16()
    w, scales, inputs, dtype = bfloat16, None, x, torch.bfloat16
    if hp.fp8 and CAPABILITY >= 89:
        yield "head in float8", captured(quantize, weight, hp.w_s)
        w, scales = quantize(weight, hp.w_s), (hp.x_s, hp.w_s, hp.grad_s)
        inputs = train_gpt.to_fp8(x, hp.x_s, torch.float8_e4m3fn)
        dtype = torch.float8_e5m2
    grads = torch.empty(tokens, vocab, dtype=dtype)
    scale = 1.0 if hp.loss_sum else 1 / hp.seq_len
    options = hp.sigmoid_form, shares
    yield "loss", loss(x, w, several, options=options, grad_scale=scale, scales=scales)
    yield "loss backward", captured(backward, inputs, w, grads, grad_w, scales)
    options = hp.sigmoid_form, None
    yield (
        "loss of validation",
        loss(x, bfloat16, targets, options=options, grad_scale=None, scales=None),
    )


def muon_graphs(hp, square_only: bool = False):
    """Yield the graphs of gpu_code's function of this name, with the fork's model and rule."""

    rule = train_gpt.zeropower_via_newtonschulz5
    if hp.polar_express:
        rule = train_gpt_2026.polar_express
    own = {
        "GPT": GPT,
        "Optimizers": train_gpt_2026.Optimizers,
        "muon_updates": partial(train_gpt.muon_updates, orthogonalise=rule),
    }
    with patch.multiple(train_gpt, **own):
        yield from gpu_code.muon_graphs(hp, square_only)


GRAPHS = {
    "layer": layer_graphs,
    "loss": loss_graphs,
    "muon": muon_graphs,
    "square": partial(muon_graphs, square_only=True),
}


if __name__ == "__main__":
    gpu_code.main(sys.argv[2:], Run, GRAPHS)
