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


def on_a_gpu(hp: train_gpt.Hyperparameters) -> train_gpt.GPT:
    """The layers of a record, narrower, as they would be compiled on a GPU."""
    narrow = replace(hp, model_dim=128, num_heads=2, head_dim=64, vocab_size=1024)
    model = train_gpt.GPT(narrow).to_device(torch.device("cpu"), compiled=True)
    model.embed.bfloat16()
    model.value_embeds.bfloat16()
    model.use_flex = True
    return model


def kept_by(hp, small: bool, width: int) -> float:
    """Bytes a token that layers keep: their outputs, q, k, v, the mixed v, what attention gives
    with its float32 normalisation, the input of the MLP, and the squares. Normed inputs and rotated
    q and k are made again where memory is small. BENCHMARKS.md multiplies this by 49152 tokens."""
    rows = train_gpt.layer_table(hp)
    layers, attending = len(rows), sum(row.window != "none" for row in rows)
    activations = attending * (1 + 3 + 1 + 1) + layers * (1 + 4)
    floats = hp.num_heads * attending
    if not small:
        activations += attending * (1 + 2) + layers
        # What norms divided by, of q and k a head each.
        floats += attending * (1 + 2 * hp.num_heads) + layers
    return 2 * width * activations + 4 * floats


def kept(called: list, tokens: int) -> float:
    """Bytes a token that the graphs called so far have handed to their backward passes."""
    values = []
    for results in called:
        values += [n.meta["val"] for n in {storage(n) for n in results} if n.op != "placeholder"]
    return sum(v.nbytes for v in values if tokens in v.shape) / tokens


def keeps_what_is_counted(hp, small: bool, graphs, monkeypatch) -> None:
    answer = torch.compiler.assume_constant_result(lambda device, tokens: small)
    monkeypatch.setattr(train_gpt, "memory_is_small", answer)
    model = on_a_gpu(hp)
    model.hidden(torch.arange(256, dtype=torch.int32), 256)
    assert kept(graphs[1], 256) == pytest.approx(kept_by(model.hp, small, 128), rel=1e-3)


def test_layers_keep_less_where_memory_is_small(graphs, monkeypatch):
    """One with attention and one without; tests/slow has all of the record."""
    two = replace(train_gpt.RECORDS["2025-01-26_BatchSize"], num_layers=2, layers="long+v0,none+x0")
    keeps_what_is_counted(two, True, graphs, monkeypatch)


def layers_are_compiled_once(record, kinds, giving_v, graphs, evaluated: bool) -> None:
    """kinds differ in value embeddings, skip connection and attention. Backward passes take one
    gradient, but for the layer that gives its v to others. Validation has other lengths."""
    model, made = on_a_gpu(train_gpt.RECORDS[record]), []
    for window in (128, 256, 640, 512):
        hidden = model.train().hidden(torch.arange(640, dtype=torch.int32), window)
        if not made and not giving_v:
            assert kept(graphs[1], 640) == pytest.approx(kept_by(model.hp, False, 128), rel=1e-3)
        hidden.sum().backward()
        if evaluated:
            with torch.no_grad():
                model.eval().hidden(torch.arange(1024, dtype=torch.int32), window)
        made.append(len(graphs[0]))
    assert made == [(2 + evaluated) * kinds] * 4  # forward, backward, forward without gradients
    assert [len(tangents) for tangents in graphs[0] if tangents].count(2) == giving_v


def test_equal_layers_of_2024_and_new_windows_are_not_compiled_again(graphs):
    layers_are_compiled_once("2024-11-24_WindowWarmup", 3, 1, graphs, evaluated=True)


def test_equal_layers_of_2025_are_not_compiled_again_and_keep_what_is_counted(graphs):
    """In training; tests/slow validates, too."""
    layers_are_compiled_once("2025-01-26_BatchSize", 5, 0, graphs, evaluated=False)
