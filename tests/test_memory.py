"""What a compiled model keeps for its backward pass, counted in the graphs that a GPU would run.

The graphs are captured on a CPU, in bfloat16 and with FlexAttention, and are never run.
"""

from dataclasses import replace

import pytest
import torch
from conftest import at_window
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

import train_gpt

VIEWS = ("view", "t", "transpose", "permute", "detach", "alias", "squeeze", "unbind", "select")


def storage(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node in whose memory this one's result is."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in VIEWS or (name == "getitem" and "unbind" in node.args[0].name):
        return storage(node.args[0])
    return node


@pytest.fixture
def graphs(compile_with, monkeypatch):
    """Let functions be captured as for a GPU, in graphs that return zeros. Return two lists that
    grow: of each graph made, the gradients that come in; of each one called, the results."""
    made, called = [], []

    def compiler(graph, inputs):
        results = graph.graph.output_node().args[0]
        values = [getattr(node, "meta", {}).get("val") for node in results]
        shapes = [None if v is None else (v.shape, v.dtype) for v in values]
        nodes = [node for node in results if hasattr(node, "meta")]
        made.append([node.name for node in graph.graph.nodes if node.name.startswith("tangents")])

        def call(*arguments):
            called.append(nodes)
            return [s and torch.zeros(s[0], dtype=s[1]) for s in shapes]

        return make_boxed_func(call)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )

    compile_with(backend)
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    monkeypatch.setattr(train_gpt, "make_mask", train_gpt.block_lists)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)  # refuses backward
    return made, called


def on_a_gpu(hp: train_gpt.Hyperparameters) -> train_gpt.GPT:
    """Return the layers of a record, narrower, as they would be compiled on a GPU."""
    narrow = replace(hp, model_dim=128, num_heads=2, head_dim=64, vocab_size=1024)
    model = train_gpt.GPT(narrow)
    for table in model.tables():
        table.bfloat16()
    return model


def kept_by(hp, width: int) -> float:
    """Return the bytes that layers keep for each token. BENCHMARKS.md has them of 49152 tokens."""
    rows = train_gpt.layer_table(hp)
    layers, attending = len(rows), sum(row.window != "none" for row in rows)
    # The normed input; q, k, v; rotated q and k; the mixed v; the result; the stream after it.
    of_attention = 1 + 3 + 2 + 1 + 1 + 1
    # The normed input; what ReLU gives, and its squares, each four times as wide (the Triton twin
    # keeps the squares alone); the layer's output.
    of_mlp = 1 + 4 + 4 + 1
    # What attention's softmax and the norms divided by, in float32: of q and k a head each.
    floats = attending * (hp.num_heads + 1 + 2 * hp.num_heads) + layers
    return 2 * width * (attending * of_attention + layers * of_mlp) + 4 * floats


def kept(called: list, tokens: int) -> float:
    """Return the bytes for each token that graphs handed to their backward passes. The first
    graphs make masks and rotary angles, and have none."""
    values = []
    for results in called[2:]:
        values += [n.meta["val"] for n in {storage(n) for n in results} if n.op != "placeholder"]
    return sum(v.nbytes for v in values if tokens in v.shape) / tokens


def layers_are_compiled_once(record, kinds, giving_v, graphs, evaluated: bool) -> None:
    """Check that a record's layers are compiled once for each of so many kinds, which differ in
    value embeddings, skip connection and attention. Validation has other lengths.

    Backward passes take one gradient, but for the layer that gives its v to others.
    """
    model = on_a_gpu(train_gpt.RECORDS[record])
    made = []
    for window in (128, 256, 640, 512):
        now = at_window(window, model.hp)
        hidden = model.train().hidden(torch.arange(640, dtype=torch.int32), now)
        if not made and not giving_v:
            assert kept(graphs[1], 640) == pytest.approx(kept_by(model.hp, 128), rel=1e-3)
        hidden.sum().backward()
        if evaluated:
            with torch.no_grad():
                model.eval().hidden(torch.arange(1024, dtype=torch.int32), now)
        made.append(len(graphs[0]))
    # Forward, backward, forward without gradients; and masks and angles of each length.
    assert made == [(2 + evaluated) * kinds + 2 * (1 + evaluated)] * 4
    assert [len(tangents) for tangents in graphs[0] if tangents].count(2) == giving_v


@pytest.mark.parametrize(
    ("record", "kinds", "giving_v", "evaluated"),
    [("2024-11-24_WindowWarmup", 3, 1, True), ("2025-01-26_BatchSize", 5, 0, False)],
)
def test_equal_layers_are_compiled_once_and_keep_what_is_counted(
    record, kinds, giving_v, evaluated, graphs
):
    """tests/slow also validates the record of 2025."""
    layers_are_compiled_once(record, kinds, giving_v, graphs, evaluated)
