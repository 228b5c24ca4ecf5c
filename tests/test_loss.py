"""The chunked head and loss of both scripts against float64, and gradients summed in place."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
import train_gpt
import train_gpt_2026
from functions_2026 import next_targets
from reference import relative_error

WIDTH, VOCAB = 48, 1024
SHIFTED = (23.0, 5.0, 7.5)  # of records since September 2025: 23 sigmoid((logit + 5) / 7.5)
SUMMED = {"logit_sigmoid": SHIFTED, "loss_sum": True}


def case(script, tokens: int, dtype=torch.float32, **settings):
    """Return an input, a head whose logits reach far into the cap, and targets."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    sizes = {"model_dim": WIDTH, "vocab_size": VOCAB, "fp8": False}
    head = script.Head(script.Hyperparameters(**sizes, **settings))
    head.weight.data = torch.randn(VOCAB, WIDTH, generator=generator) * 3
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[-1] = 0
    return x, head, targets


def objective(x, weight, targets, settings, shares) -> tuple:
    """Return, in float64, the mean loss of the next token, and the gradients of the sum over tokens
    of each target's loss, times its share. Targets beyond the end are none."""
    x64, w64 = (t.detach().to(x.dtype).double().requires_grad_() for t in (x, weight))
    cap = settings.get("logit_sigmoid", settings.get("logit_softcap"))
    chances = torch.log_softmax(reference.soft_capped(x64 @ w64.T, cap), dim=1)
    total = 0.0
    for k, share in enumerate(shares):
        total -= share * chances[: len(targets) - k].gather(1, targets[k:, None]).sum()
    total.backward()
    mean = -chances[range(len(targets)), targets].mean().item()
    return mean, x64.grad, w64.grad


def loss_of(head, x, targets, shares: tuple[float, ...]) -> torch.Tensor:
    if shares == (1.0,):
        return head.loss(x, targets)
    return head.shares_loss(x, next_targets(targets, len(shares)), shares)


CASES = [
    (train_gpt, 1, {"logit_softcap": 5.0}, (1.0,)),
    (train_gpt, 256, {"logit_softcap": 30.0}, (1.0,)),
    (train_gpt, 600, {"logit_softcap": 38.0}, (1.0,)),
    (train_gpt_2026, 600, {"logit_softcap": 15.0}, (1.0,)),
    (train_gpt_2026, 600, {"logit_sigmoid": SHIFTED}, (1.0,)),
    (train_gpt_2026, 600, SUMMED, (1.0, 0.5, 0.25)),
    (train_gpt_2026, 600, SUMMED, (1.0, 0.5, 0.0)),
]


@pytest.mark.parametrize(("script", "tokens", "settings", "shares"), CASES)
def test_chunked_loss_and_its_summed_gradients_equal_float64(script, tokens, settings, shares):
    """Tokens are fewer, as many and more than a chunk's 256. The value is the mean loss of the next
    token alone; gradients are those of a weighted sum, or of its mean over tokens."""
    x, head, targets = case(script, tokens, **settings)
    with torch.no_grad():
        unlearned = head.loss(x.detach(), targets).item()
    assert head.weight.grad is None
    value, grad_x, grad_w = objective(x, head.weight, targets, settings, shares)
    assert unlearned == pytest.approx(value, rel=1e-6)
    divisor = 1 if "loss_sum" in settings else tokens
    for count in (1, 2):
        loss = loss_of(head, x, targets, shares)
        loss.backward()
        assert loss.item() == pytest.approx(value, rel=1e-6)
        assert relative_error(x.grad, count * grad_x / divisor) < 2e-5
        assert relative_error(head.weight.grad, count * grad_w / divisor) < 2e-5


def test_bfloat16_input_as_on_a_gpu():
    settings = {"logit_softcap": 15.0}
    x, head, targets = case(train_gpt, 300, torch.bfloat16, **settings)
    loss = head.loss(x, targets)
    loss.backward()
    value, grad_x, grad_w = objective(x, head.weight, targets, settings, (1.0,))
    assert loss.item() == pytest.approx(value, rel=2e-3)
    assert x.grad.dtype == torch.bfloat16 and head.weight.grad.dtype == torch.float32
    assert relative_error(x.grad, grad_x / 300) < 1e-2
    assert relative_error(head.weight.grad, grad_w / 300) < 1e-2


def test_a_scaled_loss_has_scaled_gradients_though_its_forward_pass_makes_them():
    x, head, targets = case(train_gpt, 600)
    grads = [
        torch.autograd.grad(head.loss(x, targets) / divisor, [x, head.weight]) for divisor in (1, 8)
    ]
    for whole, eighth in zip(*grads, strict=True):
        assert whole.any() and torch.equal(whole / 8, eighth)


def test_every_tensor_that_requires_a_gradient_gets_it():
    """Also leaves outside of the head that chunk_loss reads, here over three chunks: one in all of
    them, and one in the last."""
    gain, late = torch.ones(WIDTH, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)

    class Own(train_gpt.Head):
        def logits(self, x):
            x = gain * x
            return super().logits(x + late if len(x) == 88 else x)

    x, head, targets = case(train_gpt, 600)
    head.__class__ = Own
    tensors = [x, head.weight, gain, late]
    parts = [head.chunk_loss(x[i : i + 256], targets[i : i + 256], 1 / 600) for i in (0, 256, 512)]
    whole = torch.autograd.grad(sum(parts), tensors)
    chunked = torch.autograd.grad(head.loss(x, targets), tensors)
    for found, expected in zip(chunked, whole, strict=True):
        assert expected.any() and relative_error(found, expected) < 1e-5


def test_the_head_alone_may_learn_and_all_but_the_head(tiny, randomize):
    model, tokens = randomize(train_gpt.GPT(tiny)), torch.arange(tiny.seq_len)
    batch = tokens.int(), tokens, train_gpt.Moment(0, tiny)
    model(*batch).backward()
    expected = {name: p.grad.to_dense() for name, p in model.named_parameters()}
    for learns in ("lm_head.weight", "embed.weight"):
        model.requires_grad_(False)
        model.get_parameter(learns).requires_grad_()
        model.zero_grad()
        model(*batch).backward()
        found = [name for name, p in model.named_parameters() if p.grad is not None]
        grad = model.get_parameter(learns).grad.to_dense()
        assert found == [learns] and relative_error(grad, expected[learns]) < 1e-6


# -----------------------------------------------------------------------------
# What is made of a table's size


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


def with_bigrams(tiny, **changed):
    """Return settings of the fork, with another table, and three targets a token at first."""
    own = {"layers": train_gpt_2026.LAYERS_2025_SKIPS, "stages": "targets=1/.5/.25,targets=1"}
    return train_gpt_2026.Hyperparameters(**vars(tiny) | own | changed, bigram_rows=777)


@pytest.mark.parametrize("script", [train_gpt, train_gpt_2026])
def test_a_micro_batch_makes_no_dense_gradient_of_a_table_and_no_logits_of_a_sequence(script, tiny):
    """Not even for a moment. The head's gradient, which is dense, is made once for each chunk."""
    hp = replace(tiny, vocab_size=640, head_dim=32)
    hp = hp if script is train_gpt else with_bigrams(hp)
    model, tokens = script.GPT(hp), torch.randint(0, 640, (385,))
    script.Optimizers(model, hp)
    with NewShapes() as watch:
        loss = model(tokens[:-1].int(), tokens[1:], script.Moment(0, hp))
        loss.backward()
    assert watch.shapes.count((640, hp.model_dim)) == 2
    assert not {(777, hp.model_dim), (640, hp.num_heads * hp.head_dim)} & set(watch.shapes)
    logits = [shape for shape in watch.shapes if shape[-1:] == (640,)]
    assert logits and max(shape[0] for shape in logits) == 256 < 384


@pytest.mark.parametrize("script", [train_gpt, train_gpt_2026])
def test_adam_makes_nothing_of_a_tables_size_but_its_moments_once(script, tiny):
    """On one rank, whose share of a table is the table."""
    hp = replace(tiny, vocab_size=640, batch_seqs=1)
    hp = hp if script is train_gpt else with_bigrams(hp, adam_rule="torch")
    model, tokens = script.GPT(hp), torch.randint(0, 640, (129,))
    optimizers = script.Optimizers(model, hp)
    for step in range(3):
        now = script.Moment(step, hp)
        model(tokens[:-1].int(), tokens[1:], now).backward()
        with NewShapes() as watch:
            optimizers.step(now)
        made = Counter(math.prod(shape) for shape in watch.shapes if math.prod(shape) >= 640 * 32)
        # Of embedding and head; of three tables of values, and in the fork of bigrams with them.
        moments = {640 * 32: 2 * 2, (3 * 640 + 777 * (script is train_gpt_2026)) * 32: 2}
        assert made == (moments if step == 0 else {}), step
        assert model.embed.weight.grad is None
