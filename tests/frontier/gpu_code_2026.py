"""Compile what a GPU would run of the frontier, without one: as tests/gpu_code.py, with its flags.

python tests/frontier/gpu_code_2026.py h100 2026-03-06_SimplifyHC on layer loss muon
"""

import sys
from functools import partial
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "forks")]
import gpu_code  # noqa: E402
import train_gpt_2026  # noqa: E402
from gpu_code import CARD, captured  # noqa: E402
from train_gpt_2026 import GPT, Block, Moment, Run  # noqa: E402

import train_gpt  # noqa: E402

# As the function by which the fork asks for a device answers on the card.
SMALL = CARD.total_memory < 40e9
train_gpt_2026.memory_is_small = torch.compiler.assume_constant_result(
    lambda device, tokens=49152: SMALL
)
train_gpt.make_mask = train_gpt.block_lists  # as on any GPU


def layer_graphs(hp):
    """Yield the graphs of the layer that has most: earlier outputs, values from elsewhere, a long
    window; and the same of those whose heads are paired."""
    with torch.device("meta"):
        model = GPT(hp)
    now = Moment(0, hp)

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
        mask = model.masks(tokens, now)[layer.mask]
        call = captured(
            Block(hp, layer),
            x,
            x0,
            value,
            None if layer.skip_from is None else (torch.ones(()), output),
            model.rotary(torch.arange(hp.seq_len), now)[paired],
            mask,
            bigram=bigram if hp.bigram_rows else None,
            source=None if layer.source is None else source,
        )
        yield "paired layer" if paired else "layer", call


def losses(targets, hp):
    """Return the targets, and more for cross_entropy, in training and in validation."""
    count, training = hp.most_targets, (targets,)
    if count > 1:
        training = train_gpt_2026.next_targets(targets, count), torch.ones(count)
    return [training, (targets,)]


def loss_graphs(hp):
    """Yield the graphs of the fork's head and its loss."""
    grad_scale = 1.0 if hp.loss_sum else 1 / hp.seq_len
    yield from gpu_code.loss_graphs(hp, train_gpt_2026.Head, losses, grad_scale)


def muon_graphs(hp, square_only: bool = False):
    """Yield the graphs of the fork's matrices."""
    rule = train_gpt_2026.polar_express if hp.polar_express else None
    yield from gpu_code.muon_graphs(hp, square_only, Run, rule)


GRAPHS = {
    "layer": layer_graphs,
    "loss": loss_graphs,
    "muon": muon_graphs,
    "square": partial(muon_graphs, square_only=True),
}


if __name__ == "__main__":
    gpu_code.main(sys.argv[2:], Run, GRAPHS)
