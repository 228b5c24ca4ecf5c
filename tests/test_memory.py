"""What a compiled model keeps for its backward pass, counted in the graphs that a GPU would run.

The graphs are made on a CPU, in bfloat16 and with FlexAttention, and are never run: so the record's
memory is known without a GPU.
"""

from dataclasses import replace
from types import SimpleNamespace

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


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile as for a GPU: of each graph it makes, the gradients that come in, and of each
    that is called, the results.

    Nothing is computed: graphs answer with zeros in the shapes of their results.
    """
    made, called, compile_ = [], [], torch.compile

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

    partition = {"partition_fn": min_cut_rematerialization_partition}
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, **partition)
    fixed = {"backend": backend, "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **fixed, **options))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)  # refuses backward
    torch._dynamo.reset()
    return made, called


def test_a_card_of_24_gb_has_small_memory_and_one_of_80_has_not(monkeypatch):
    gpu = torch.device("cuda", 0)
    for gigabytes, chunk in ((24, 8192), (40, 16384), (80, 16384)):
        card = SimpleNamespace(total_memory=gigabytes << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert train_gpt.memory_is_small(gpu) == (gigabytes == 24)
        assert train_gpt.loss_chunk_len(gpu) == chunk
        assert train_gpt.memory_is_small(gpu, 262144)


def on_a_gpu(record: str) -> train_gpt.GPT:
    """The record's layers, narrower, as they would be compiled on a GPU."""
    hp = replace(train_gpt.RECORDS[record], model_dim=128, num_heads=2, head_dim=64)
    model = train_gpt.GPT(hp).to_device(torch.device("cpu"), compiled=True)
    model.embed.bfloat16()
    model.value_embeds.bfloat16()
    model.use_flex = True
    return model


@pytest.mark.parametrize("small", [True, False])
def test_layers_keep_what_the_count_of_memory_says(small, graphs, monkeypatch):
    """Of each layer: its output, q, k, v, the mixed v, what attention gives with its float32
    normalisation, the input of the MLP, and the squares. Normed inputs and rotated q and k are made
    again where memory is small. BENCHMARKS.md multiplies this by 49152 tokens."""
    answer = torch.compiler.assume_constant_result(lambda device, tokens: small)
    monkeypatch.setattr(train_gpt, "memory_is_small", answer)
    model, tokens, kept = on_a_gpu("2025-01-26_BatchSize"), 256, 0
    model.hidden(torch.arange(tokens, dtype=torch.int32), 256)
    for results in graphs[1]:
        values = [n.meta["val"] for n in {storage(n) for n in results} if n.op != "placeholder"]
        kept += sum(v.nbytes for v in values if tokens in v.shape) / tokens
    attending, layers = 11, 12
    activations = attending * (1 + 3 + 1 + 1) + layers * (1 + 4)
    floats = 2 * attending
    if not small:
        activations += attending * (1 + 2) + layers
        floats += attending * (1 + 2 * 2) + layers  # what norms divided by, of q and k a head each
    assert kept == pytest.approx(2 * 128 * activations + 4 * floats, rel=1e-3)


@pytest.mark.parametrize(
    "record, kinds, giving_v", [("2025-01-26_BatchSize", 5, 0), ("2024-11-24_WindowWarmup", 3, 1)]
)
def test_equal_layers_and_new_windows_are_not_compiled_again(record, kinds, giving_v, graphs):
    """With FlexAttention; kinds differ in value embeddings, skip connection and attention. Backward
    passes take one gradient, but for the layer that gives its v to others."""
    model, made = on_a_gpu(record), []
    for window in (128, 256, 640, 512):
        model.train().hidden(torch.arange(512, dtype=torch.int32), window).sum().backward()
        with torch.no_grad():
            model.eval().hidden(torch.arange(1024, dtype=torch.int32), window)
        made.append(len(graphs[0]))
    assert made == [3 * kinds] * 4  # forward, backward, and forward without gradients
    assert [len(tangents) for tangents in graphs[0] if tangents].count(2) == giving_v
