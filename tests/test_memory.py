"""What a compiled model keeps for its backward pass, counted in the graphs that a GPU would run.

The graphs are made on a CPU, in bfloat16 and with FlexAttention, and are never run: so the record's
memory is known without a GPU.
"""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

import train_gpt

VIEWS = ("view", "t", "transpose", "permute", "detach", "alias", "squeeze", "unbind", "select")


def storage(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory this one's result lies in."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in VIEWS or (name == "getitem" and "unbind" in node.args[0].name):
        return storage(node.args[0])
    return node


def kept_bytes_a_token(hp, tokens: int, monkeypatch) -> float:
    """Bytes a token that the layers' forward graphs give and keep, and were not given."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)  # refuses backward
    kept = []

    def forward(graph, inputs):
        """Answers with zeros in the shapes of the graph's results."""
        results = graph.graph.output_node().args[0]
        values = [getattr(node, "meta", {}).get("val") for node in results]
        values = [v if v is None else torch.zeros(v.shape, dtype=v.dtype) for v in values]
        places = {storage(node) for node in results if hasattr(node, "meta")}
        found = [node.meta["val"] for node in places if node.op != "placeholder"]

        def run(*arguments):
            kept.append(sum(v.nbytes for v in found if tokens in v.shape))
            return values

        return make_boxed_func(run)

    options = {"fw_compiler": forward, "partition_fn": min_cut_rematerialization_partition}
    compile_, backend = torch.compile, aot_autograd(**options)
    monkeypatch.setattr(
        torch,
        "compile",
        lambda f, **options: compile_(f, backend=backend, fullgraph=True, **options),
    )
    model = train_gpt.GPT(hp).to_device(torch.device("cpu"), compiled=True)
    model.embed.bfloat16()
    model.value_embeds.bfloat16()
    model.use_flex = True
    model.hidden(torch.arange(tokens, dtype=torch.int32), 256)
    assert len(kept) == len(model.blocks)
    return sum(kept) / tokens


def test_layers_keep_what_the_count_of_memory_says(monkeypatch):
    """Of each layer: its input, q, k, v, the mixed v, what attention gives with its float32
    normalisation, the input of the MLP, and the square's input. Normed inputs, rotated q and k and
    squares are made again. BENCHMARKS.md multiplies this by 49152 tokens."""
    record = train_gpt.RECORDS["2025-01-26_BatchSize"]
    hp = replace(record, model_dim=128, num_heads=2, head_dim=64)
    width, layers, attending = hp.model_dim, 12, 11
    of_attention = attending * (1 + 3 + 1 + 1)
    bytes_a_token = 2 * width * (of_attention + layers * (1 + 4)) + 4 * hp.num_heads * attending
    assert kept_bytes_a_token(hp, 256, monkeypatch) == pytest.approx(bytes_a_token, rel=1e-3)
