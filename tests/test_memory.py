"""What compiled models keep for their backward passes, counted in the graphs that a GPU would run.

The graphs are captured on a CPU, in bfloat16 and with FlexAttention, and are never run.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention

import train_gpt
import train_gpt_2026
from train_gpt_2026 import Hyperparameters

VIEWS = ("view", "t", "transpose", "permute", "detach", "alias", "squeeze", "unbind", "select")


def storage(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node in whose memory this one's result is."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in VIEWS or (name == "getitem" and "unbind" in node.args[0].name):
        return storage(node.args[0])
    return node


@pytest.fixture
def graphs(compile_with, monkeypatch):
    """Let functions be captured as for a GPU, in graphs that return zeros. Return a list that grows
    by the results of each one that is called and has a backward pass."""
    called = []

    def compiler(graph, inputs, log=None):
        results = graph.graph.output_node().args[0]
        values = [getattr(node, "meta", {}).get("val") for node in results]
        shapes = [None if v is None else (v.shape, v.dtype) for v in values]

        def call(*arguments):
            if log is not None:
                log.append([node for node in results if hasattr(node, "meta")])
            return [s and torch.zeros(s[0], dtype=s[1]) for s in shapes]

        return make_boxed_func(call)

    backend = aot_autograd(
        fw_compiler=partial(compiler, log=called),
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    compile_with(backend)
    monkeypatch.setattr(train_gpt.compilation, "allowed", True)
    monkeypatch.setattr(train_gpt, "make_mask", train_gpt.block_lists)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)  # refuses backward
    return called


def on_a_gpu(script, hp):
    """Return the layers of a record, narrower, as they would be compiled on a GPU."""
    sizes = {"model_dim": 128, "num_heads": 2, "head_dim": 64, "vocab_size": 1024}
    model = script.GPT(replace(hp, **sizes))
    for table in model.tables():
        table.bfloat16()
    return model


def kept(called: list, tokens: int) -> float:
    """Return the bytes for each token that graphs handed to their backward passes."""
    values = []
    for results in called:
        values += [n.meta["val"] for n in {storage(n) for n in results} if n.op != "placeholder"]
    return sum(v.nbytes for v in values if tokens in v.shape) / tokens


def kept_by_the_record_of_2025(heads: int, width: int) -> float:
    """Return the bytes that 12 layers keep for each token, 11 of them with attention. BENCHMARKS.md
    has them of 49152 tokens."""
    # The normed input; q, k, v; rotated q and k; the mixed v; the result; the stream after it.
    of_attention = 1 + 3 + 2 + 1 + 1 + 1
    # The normed input; what goes into ReLU, four times as wide; the layer's output.
    of_mlp = 1 + 4 + 1
    # What attention's softmax and the norms divided by, in float32: of q and k a head each.
    floats = 11 * (heads + 1 + 2 * heads) + 12
    return 2 * width * (11 * of_attention + 12 * of_mlp) + 4 * floats


def test_the_record_of_2025_keeps_what_is_counted(graphs):
    """Graphs of masks and rotary angles keep nothing."""
    model = on_a_gpu(train_gpt, train_gpt.RECORDS["2025-01-26_BatchSize"])
    model.hidden(torch.arange(640, dtype=torch.int32), train_gpt.Moment(0, model.hp))
    expected = kept_by_the_record_of_2025(heads=2, width=128)
    assert kept(graphs, 640) == pytest.approx(expected, rel=1e-3)


def test_the_fork_keeps_less_where_memory_is_small(graphs, monkeypatch):
    """Of a layer with attention and one without. Normed inputs, and rotated q and k are then made
    again."""
    hp, found = replace(Hyperparameters(), num_layers=2, layers="long+v0,none+x0"), []
    for small in (False, True):
        monkeypatch.setattr(train_gpt, "memory_is_small", lambda *given, small=small: small)
        torch._dynamo.reset()
        graphs.clear()
        model = on_a_gpu(train_gpt_2026, hp)
        now = train_gpt_2026.Moment(0, model.hp)
        model.hidden(torch.arange(256, dtype=torch.int32), now)
        found.append(kept(graphs, 256))
    # q, k, v; the mixed v; attention's result; the stream after it; x0; the last norm's result.
    # Of both layers what goes into ReLU, and the output; of the second one, also its mixed input.
    activations = 3 + 1 + 1 + 1 + 1 + 1 + 2 * (4 + 1) + 1
    floats = 2 + 2  # of two heads; what the first and the last norm divided by
    assert found[1] == pytest.approx(2 * 128 * activations + 4 * floats, rel=1e-3)
    assert found[1] < 0.85 * found[0]


def test_a_card_of_24_gb_has_small_memory_and_one_of_80_has_not(monkeypatch):
    """And then the head takes fewer tokens at a time."""
    head = train_gpt.Head(replace(train_gpt.Hyperparameters(), model_dim=16))
    gpu = torch.device("cuda", 0)
    for gigabytes, chunk in ((24, 8192), (40, 16384), (80, 16384)):
        card = SimpleNamespace(total_memory=gigabytes << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert train_gpt.memory_is_small(gpu) == (gigabytes == 24)
        assert head.chunk_len(gpu) == chunk
        assert train_gpt.memory_is_small(gpu, 262144)
