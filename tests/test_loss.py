"""The chunked head and loss against float64, and gradients that are summed in place."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import reference
import torch
from reference import relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train_gpt import GPT, Head, Moment, Optimizers

WIDTH, VOCAB = 48, 1024


@pytest.fixture
def case(tiny):
    """Return make(tokens, ...): an input, a head whose logits reach far into the cap, targets."""

    def make(tokens: int, dtype=torch.float32, **settings):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
        head = Head(replace(tiny, model_dim=WIDTH, vocab_size=VOCAB, **settings))
        head.weight.data = torch.randn(VOCAB, WIDTH, generator=generator) * 3
        return x, head, torch.randint(0, VOCAB, (tokens,), generator=generator)

    return make


def in_float64(x, head, targets, dtype=torch.float32):
    """Return the loss and the gradients of the input and of the weight, in dtype at first."""
    x64, w64 = (t.detach().to(dtype).double().requires_grad_() for t in (x, head.weight))
    loss = reference.softcapped_loss(x64 @ w64.T, targets, head.softcap)
    loss.backward()
    return loss.item(), x64.grad, w64.grad


@pytest.mark.parametrize("tokens, cap", [(1, 5.0), (255, 15.0), (256, 30.0), (600, 38.0)])
def test_chunked_loss_and_its_summed_gradients_equal_the_unchunked_ones(tokens, cap, case):
    """Tokens are fewer, as many and more than a chunk's 256."""
    x, head, targets = case(tokens, logit_softcap=cap)
    value, grad_x, grad_w = in_float64(x, head, targets)
    with torch.no_grad():
        loss = head.loss(x.detach(), targets)
    assert loss.item() == pytest.approx(value, rel=1e-6) and head.weight.grad is None
    for count in (1, 2):
        loss = head.loss(x, targets)
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert relative_error(x.grad, count * grad_x) < 2e-5
        assert relative_error(head.weight.grad, count * grad_w) < 2e-5


def test_bfloat16_input_as_on_a_gpu(case):
    x, head, targets = case(300, torch.bfloat16)
    loss = head.loss(x, targets)
    loss.backward()
    value, grad_x, grad_w = in_float64(x, head, targets, torch.bfloat16)
    assert loss.item() == pytest.approx(value, rel=2e-3)
    assert x.grad.dtype == torch.bfloat16 and head.weight.grad.dtype == torch.float32
    assert relative_error(x.grad, grad_x) < 1e-2
    assert relative_error(head.weight.grad, grad_w) < 1e-2


def test_a_scaled_loss_is_refused_because_its_gradient_is_made_in_the_forward_pass(case):
    x, head, targets = case(8)
    with pytest.raises(RuntimeError, match="call backward.. on the loss itself"):
        (head.loss(x, targets) / 8).backward()


class NewShapes(TorchDispatchMode):
    """Notes the shapes of all tensors with storage of their own that operations make."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in self.dense((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for t in self.dense(result):
            if t.untyped_storage().data_ptr() not in known:
                self.shapes.append(tuple(t.shape))
        return result

    def dense(self, values) -> list[torch.Tensor]:
        """Return the tensors that have storage. A sparse one has two tensors that have it."""
        tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
        return [t for t in tensors if not t.is_sparse]

    def __init__(self):
        super().__init__()
        self.shapes = []


def test_a_micro_batch_makes_no_dense_gradient_and_no_logits_of_a_whole_sequence(tiny):
    """Not even for a moment."""
    hp = replace(tiny, vocab_size=640, head_dim=32)
    model = GPT(hp)
    Optimizers(model, hp)
    tokens = torch.randint(0, 640, (385,))
    inputs, targets = tokens[:-1].int(), tokens[1:]
    now = Moment(0, hp)
    with NewShapes() as watch:
        model(inputs, targets, now).backward()
    assert (640, hp.model_dim) not in watch.shapes
    assert (640, hp.num_heads * hp.head_dim) not in watch.shapes  # of value tables
    logits = [shape for shape in watch.shapes if shape[-1:] == (640,)]
    chunk_len = model.lm_head.chunk_len(torch.device("cpu"))
    assert logits and max(shape[0] for shape in logits) == chunk_len < 384


def test_adam_makes_nothing_of_a_tables_size_but_its_moments_once(tiny):
    """On one rank, whose share of a table is the table."""
    hp = replace(tiny, vocab_size=640, batch_seqs=1)
    model = GPT(hp)
    tokens = torch.randint(0, 640, (129,))
    optimizers = Optimizers(model, hp)
    for step in range(3):
        model(tokens[:-1].int(), tokens[1:], Moment(step, hp)).backward()
        with NewShapes() as watch:
            optimizers.step(Moment(step, hp))
        made = Counter(math.prod(shape) for shape in watch.shapes if math.prod(shape) >= 640 * 32)
        moments = {640 * 32: 2 * 2, 3 * 640 * 32: 2}  # of embedding and head; of three for values
        assert made == (moments if step == 0 else {}), step
        assert not model.embed.weight.grad.any()


def test_bfloat16_table_sums_its_gradient_in_float32(tiny):
    """1000 equal tokens of gradient 1/1024: a bfloat16 sum would stop growing at 0.25."""
    model = GPT(tiny)
    model.embed.bfloat16()
    Optimizers(model, tiny)
    rows = model.embed(torch.ones(1000, dtype=torch.int32))
    (rows.float() / 1024).sum().backward()
    torch.testing.assert_close(model.embed.weight.grad[1], torch.full((32,), 1000 / 1024))
