"""The chunked head and loss against float64, and gradients that are summed in place."""

from collections import Counter
from dataclasses import replace

import pytest
import reference
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train_gpt import (
    GPT,
    HEAD_STEPS,
    RECORDS,
    CastedLinear,
    Head,
    HeadLoss,
    Optimizers,
    gradient_buffer,
    lookup,
    moment,
    relu2_mlp,
)

WIDTH, VOCAB = 48, 1000


def loss_of(x, weight, targets, cap, scales=None, steps=HEAD_STEPS):
    """Return the loss that a Head with this cap and these steps makes of x under a weight."""
    hp = replace(RECORDS["demo"], model_dim=16, vocab_size=128, logit_softcap=cap)
    head = Head(hp)
    head.steps = steps
    return HeadLoss.apply(x, weight, targets, head, (cap,), 1 / len(x), scales)


def case(tokens: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = CastedLinear(WIDTH, VOCAB)
    head.weight.data = torch.randn(VOCAB, WIDTH, generator=generator) * 3  # far into the cap
    return x, head, torch.randint(0, VOCAB, (tokens,), generator=generator)


def in_float64(x, weight, targets, cap):
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = reference.softcapped_loss(x64 @ w64.T, targets, cap)
    loss.backward()
    return loss.item(), x64.grad, w64.grad


def relative_error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("tokens, cap", [(1, 5.0), (255, 15.0), (256, 30.0), (600, 38.0)])
def test_chunked_loss_and_its_summed_gradients_equal_the_unchunked_ones(tokens, cap):
    """Tokens are fewer, as many and more than a chunk's 256."""
    x, head, targets = case(tokens)
    value, grad_x, grad_w = in_float64(x, head.weight, targets, cap)
    with torch.no_grad():
        loss = loss_of(x.detach(), head.weight, targets, cap)
    assert loss.item() == pytest.approx(value, rel=1e-6) and head.weight.grad is None
    for count in (1, 2):
        loss = loss_of(x, head.weight, targets, cap)
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert relative_error(x.grad, count * grad_x) < 2e-5
        assert relative_error(head.weight.grad, count * grad_w) < 2e-5


def test_bfloat16_input_as_on_a_gpu():
    x, head, targets = case(300, torch.bfloat16)
    loss = loss_of(x, head.weight, targets, 15.0)
    loss.backward()
    weight = head.weight.detach().bfloat16()
    value, grad_x, grad_w = in_float64(x, weight, targets, 15.0)
    assert loss.item() == pytest.approx(value, rel=2e-3)
    assert x.grad.dtype == torch.bfloat16 and head.weight.grad.dtype == torch.float32
    assert relative_error(x.grad, grad_x) < 1e-2
    assert relative_error(head.weight.grad, grad_w) < 1e-2


@pytest.mark.parametrize("can", [True, False])
def test_a_cpu_that_can_trains_the_head_in_bfloat16_and_validates_in_float32(
    can, tiny, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: can)
    x, weights, targets = case(300)
    found = []
    for on in (False, True):
        head = Head(replace(tiny, model_dim=WIDTH, vocab_size=VOCAB, bfloat16_head=on))
        head.weight.data[:VOCAB], head.weight.data[VOCAB:] = weights.weight.data, 0.0
        validation = head.loss(x.detach(), targets).item()
        here = x.detach().clone().requires_grad_()
        loss = head.loss(here, targets)
        loss.backward()
        found.append((loss.item(), here.grad, gradient_buffer(head.weight), validation))
    exact, rounded = found
    assert rounded[3] == exact[3] == exact[0]
    errors = [relative_error(b, a) for a, b in zip(exact[1:3], rounded[1:3], strict=True)]
    assert (rounded[0] != exact[0]) == can
    assert rounded[0] == pytest.approx(exact[0], rel=2e-3)
    assert all(1e-4 < error < 1e-2 if can else error == 0 for error in errors), errors


def test_compiled_loss_equals_float64():
    """Compiled code makes two passes over the logits. The backend "eager" executes what
    torch.compile captured."""
    (x, head, targets), cap = case(32), 30.0
    steps = tuple(torch.compile(step, backend="eager", dynamic=False) for step in HEAD_STEPS)
    loss = loss_of(x, head.weight, targets, cap, steps=steps)
    loss.backward()
    value, grad_x, grad_w = in_float64(x, head.weight, targets, cap)
    assert loss.item() == pytest.approx(value, rel=2e-7)
    assert relative_error(x.grad, grad_x) < 1e-6
    assert relative_error(head.weight.grad, grad_w) < 1e-6


def test_compiled_mlp_equals_float64():
    """Compiled, ReLU squared keeps its result alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = (20, 16), (64, 16), (16, 64)
    inputs = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = torch.randn(20, 16, generator=generator)
    torch.compile(relu2_mlp.plain, backend="aot_eager")(*inputs).backward(grad)
    x, w_in, w_out = exact
    ((x @ w_in.T).clamp(min=0).pow(2) @ w_out.T).backward(grad.double())
    for found, expected in zip(inputs, exact, strict=True):
        assert relative_error(found.grad, expected.grad) < 1e-6


def test_a_scaled_loss_is_refused_because_its_gradient_is_made_in_the_forward_pass():
    x, head, targets = case(8)
    with pytest.raises(RuntimeError, match="scale gradients after"):
        (loss_of(x, head.weight, targets, 15.0) / 8).backward()


class NewShapes(TorchDispatchMode):
    """Notes the shapes of all tensors with storage of their own that operations make."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in given}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.shapes.append(tuple(t.shape))
        return result

    def __init__(self):
        super().__init__()
        self.shapes = []


def test_a_micro_batch_makes_no_dense_gradient_and_no_logits_of_a_whole_sequence(tiny):
    """Not even for a moment, from the second micro-batch on."""
    hp = replace(tiny, vocab_size=640, head_dim=32)
    model = GPT(hp)
    tokens = torch.randint(0, 640, (385,))
    inputs, targets = tokens[:-1].int(), tokens[1:]
    model(inputs, targets, 256).backward()  # makes the buffers, once
    with NewShapes() as watch:
        model(inputs, targets, 256).backward()
    assert (640, hp.model_dim) not in watch.shapes
    assert (640, hp.num_heads * hp.head_dim) not in watch.shapes  # of value tables
    logits = [shape for shape in watch.shapes if shape[-1:] == (640,)]
    chunk_len = model.lm_head.chunk_len(torch.device("cpu"))
    assert logits and max(shape[0] for shape in logits) == chunk_len < 384

    plain = torch.nn.Embedding(640, hp.model_dim)
    with NewShapes() as watch:  # what the watch would have seen
        plain(inputs).sum().backward()
    assert (640, hp.model_dim) in watch.shapes


def test_adam_makes_nothing_of_a_tables_size_but_its_moments_once(tiny):
    """On one rank, whose share of a table is the table."""
    hp = replace(tiny, vocab_size=640, batch_seqs=1)
    model = GPT(hp)
    tokens = torch.randint(0, 640, (129,))
    optimizers = Optimizers(model, hp)
    for step in range(3):
        model(tokens[:-1].int(), tokens[1:], 128).backward()
        with NewShapes() as watch:
            optimizers.step(moment(step, hp))
        made = Counter(shape for shape in watch.shapes if shape[:1] >= (640,))
        moments = {(640, 32): 5 * 2}  # embedding, head, three of values
        assert made == (moments if step == 0 else {}), step
        assert not gradient_buffer(model.embed.weight).any()


def test_lookup_sums_gradients_of_equal_tokens_in_place():
    table = torch.nn.Embedding(20, 6)
    tokens = torch.randint(0, 5, (100,), dtype=torch.int32)
    weights = torch.randn(100, 6)
    for _ in range(2):
        (lookup(table, tokens) * weights).sum().backward()
    expected = torch.nn.Embedding.from_pretrained(table.weight.detach().double(), freeze=False)
    (2 * (expected(tokens) * weights).sum()).backward()
    torch.testing.assert_close(
        table.weight.grad.double(), expected.weight.grad, rtol=1e-5, atol=1e-5
    )


def test_bfloat16_table_sums_its_gradient_in_float32():
    """1000 equal tokens of gradient 1/1024: a bfloat16 sum would stop growing at 0.25."""
    table = torch.nn.Embedding(4, 8).bfloat16()
    rows = lookup(table, torch.ones(1000, dtype=torch.int32))
    (rows.float() / 1024).sum().backward()
    assert table.weight.grad32.dtype == torch.float32
    torch.testing.assert_close(table.weight.grad32[1], torch.full((8,), 1000 / 1024))
