"""What layers are compiled, and what they keep for their backward passes; also on small cards."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import train_gpt_2026
from test_memory import kept  # of train_gpt.py
from train_gpt_2026 import GPT, RECORDS, Hyperparameters, Moment, layer_table

from frontier.small_runs import LAYERS, D

# One layer with attention and one without.
TWO = replace(Hyperparameters(), num_layers=2, layers="long+v0,none+x0")


def test_a_card_of_24_gb_has_small_memory_and_one_of_80_has_not(monkeypatch):
    """And then the head takes fewer tokens at a time."""
    gpu, head = torch.device("cuda", 0), train_gpt_2026.Head(replace(TWO, model_dim=16))
    for gigabytes, chunk in ((24, 8192), (40, 16384), (80, 16384)):
        card = SimpleNamespace(total_memory=gigabytes << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, card=card: card)
        assert train_gpt_2026.memory_is_small(gpu) == (gigabytes == 24)
        assert head.chunk_len(gpu) == chunk
        assert train_gpt_2026.memory_is_small(gpu, 262144)


def on_a_gpu(hp: Hyperparameters) -> GPT:
    """Return the layers of a record, narrower, as they would be compiled on a GPU."""
    sizes = {"model_dim": 128, "num_heads": 2, "head_dim": 64, "vocab_size": 1024}
    if hp.bigram_rows:
        sizes["bigram_rows"] = 1024
    model = GPT(replace(hp, **sizes))
    for table in model.tables():
        table.bfloat16()
    return model


def kept_by(hp, small: bool, width: int) -> float:
    """Return the bytes a token that two layers keep. Normed inputs and rotated q and k are made
    again where memory is small."""
    rows = layer_table(hp)
    layers, attending = len(rows), sum(row.window != "none" for row in rows)
    # q, k, v; the mixed v; attention's result; the stream after it. What ReLU gives, and its
    # squares (the Triton twin keeps the squares alone); the output.
    activations = attending * (3 + 1 + 1 + 1) + layers * (4 + 4 + 1)
    floats = hp.num_heads * attending
    activations += 2  # x0; the last norm's result
    floats += 2  # what the first and the last norm divided by
    if not small:
        activations += 1  # the second layer's input with a share of x0: both layers are one graph
        activations += attending * (1 + 2) + layers
        # What norms divided by, of q and k a head each.
        floats += attending * (1 + 2 * hp.num_heads) + layers
    return 2 * width * activations + 4 * floats


@pytest.mark.parametrize("small", [True, False])
def test_layers_keep_less_where_memory_is_small(small, graphs, monkeypatch, with_window):
    answer = torch.compiler.assume_constant_result(lambda device, tokens=0: small)
    monkeypatch.setattr(train_gpt_2026, "memory_is_small", answer)
    model = on_a_gpu(TWO)
    model.hidden(torch.arange(256, dtype=torch.int32), with_window(256, TWO))
    assert kept(graphs[1], 256) == pytest.approx(kept_by(model.hp, small, 128), rel=1e-3)
    assert kept_by(model.hp, True, 128) < 0.85 * kept_by(model.hp, False, 128)


def test_four_layers_are_a_graph_and_new_windows_make_no_other(graphs):
    """At moments with other windows and rotary tables, nothing new is compiled."""
    model = on_a_gpu(replace(RECORDS[D], layers=LAYERS[D], num_layers=5))
    last = model.hp.num_iterations
    made = []
    for step in (0, last // 3 + 9, 2 * last // 3 + 9, last - 1):
        hidden = model.train().hidden(torch.arange(640, dtype=torch.int32), Moment(step, model.hp))
        hidden.sum().backward()
        made.append(len(graphs[0]))
    # Masks; angles; smear with bigrams, and two graphs of layers, each forward and backward.
    assert made == [8] * 4
