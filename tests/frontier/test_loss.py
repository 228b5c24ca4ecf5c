"""The loss of several targets in a sigmoid's form, against one unchunked float64 expression."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import reference
import torch
import train_gpt_2026
from reference import relative_error
from test_loss import NewShapes  # of train_gpt.py
from torch._dynamo.backends.debugging import eager
from torch._dynamo.utils import counters
from train_gpt_2026 import GPT, Head, Hyperparameters, Moment, Optimizers

import train_gpt

WIDTH, VOCAB = 48, 1024
SHIFTED = (23.0, 5.0, 7.5)  # of records since September 2025: 23 sigmoid((logit + 5) / 7.5)
FORMS = [{"logit_softcap": 15.0}, {"logit_sigmoid": SHIFTED}]


def cap_of(form: dict) -> float | tuple:
    """Return a form as reference.py has it."""
    return form.get("logit_sigmoid", form.get("logit_softcap"))


def case(tokens: int, **settings) -> tuple[torch.Tensor, Head, torch.Tensor]:
    """Return an input, a head whose logits reach far into the cap, and targets."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    head = Head(Hyperparameters(model_dim=WIDTH, vocab_size=VOCAB, **settings))
    head.weight.data = torch.randn(VOCAB, WIDTH, generator=generator) * 3
    targets = torch.randint(0, VOCAB, (tokens,), generator=generator)
    targets[-1] = 0
    return x, head, targets


def objective(x, weight, targets, cap, shares) -> tuple:
    """Return, in float64, the mean loss of the next token, and the gradients of the sum over tokens
    of each target's loss, times its share. Targets beyond the end are none."""
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    chances = torch.log_softmax(reference.soft_capped(x64 @ w64.T, cap), dim=1)
    total = 0.0
    for k, share in enumerate(shares):
        total -= share * chances[: len(targets) - k].gather(1, targets[k:, None]).sum()
    total.backward()
    mean = -chances[range(len(targets)), targets].mean().item()
    return mean, x64.grad, w64.grad


SUMMED = {"logit_sigmoid": SHIFTED, "loss_sum": True}
CASES = [((1.0,), tokens, form) for tokens in (1, 32, 256, 600) for form in FORMS]
for shares in [(1.0,), (1.0, 0.4), (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)]:
    CASES += [(shares, 32, SUMMED), (shares, 600, SUMMED)]


@pytest.mark.parametrize(("shares", "tokens", "form"), CASES)
def test_loss_and_gradients_equal_float64(shares, tokens, form):
    """The value is the mean loss of the next token alone; gradients are those of a weighted sum, or
    of its mean over tokens. A chunk has 256 tokens."""
    x, head, targets = case(tokens, **form)
    loss = head.loss(x, targets, shares)
    loss.backward()
    value, grad_x, grad_w = objective(x, head.weight, targets, cap_of(form), shares)
    count = 1 if "loss_sum" in form else len(x)
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert relative_error(x.grad, grad_x / count) < 2e-5
    assert relative_error(head.weight.grad, grad_w / count) < 2e-5


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 0.5, 0.25)])
def test_compiled_loss_equals_float64(shares, compile_with, monkeypatch):
    """As captured for a compiler, of 32 tokens."""
    compile_with(eager)
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    x, head, targets = case(32, **SUMMED)
    loss = head.loss(x, targets, shares)
    loss.backward()
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    value, grad_x, grad_w = objective(x, head.weight, targets, SHIFTED, shares)
    assert loss.item() == pytest.approx(value, rel=2e-7)
    assert relative_error(x.grad, grad_x) < 1e-6
    assert relative_error(head.weight.grad, grad_w) < 1e-6


@pytest.mark.parametrize("form", FORMS, ids=["tanh", "sigmoid"])
def test_logits_are_soft_capped_and_give_the_loss(form):
    x, head, targets = case(256, **form)
    with torch.no_grad():
        logits, loss = head.logits(x), head.loss(x.detach(), targets)
        raw = x.double() @ head.weight.double().T
    assert logits.shape == (256, VOCAB) and logits.dtype == torch.float32
    constant = form.get("logit_softcap", 0.0)  # softmax does not see it
    expected = reference.soft_capped(raw, cap_of(form))
    torch.testing.assert_close(logits.double() - constant, expected, rtol=0, atol=2e-5)
    of_logits = torch.nn.functional.cross_entropy(expected, targets).item()
    assert loss.item() == pytest.approx(of_logits, abs=1e-5)


# -----------------------------------------------------------------------------
# What is made of a table's size


def test_a_micro_batch_makes_no_dense_gradient_and_no_logits_of_a_whole_sequence(bare, with_window):
    """Not even for a moment: watched at the dispatcher, from the second micro-batch on; also of
    bigrams, and where a token has three targets."""
    hp = replace(bare, vocab_size=640, head_dim=32, bigram_rows=777)
    model, tokens = GPT(hp), torch.randint(0, 640, (385,))
    now = with_window(256, hp, targets=(1.0, 0.5, 0.25))
    inputs, targets = tokens[:-1].int(), tokens[1:]
    Optimizers(model, hp)
    with NewShapes() as watch:
        model(inputs, targets, now).backward()
    assert len(model.value_embeds["embed"]) == 3
    tables = {(rows, hp.model_dim) for rows in (640, 777)} | {(640, hp.num_heads * hp.head_dim)}
    assert not tables & set(watch.shapes)
    logits = [shape for shape in watch.shapes if shape[-1:] == (640,)]
    assert logits and max(shape[0] for shape in logits) == 256 < len(inputs)


@pytest.mark.parametrize("rule", ["torch", "cautious"])
def test_adam_makes_nothing_of_a_tables_size_but_its_moments_once(
    rule, bare, with_window, monkeypatch
):
    """On one rank. The cautious rule itself, which makes some until it is compiled, is left out;
    its tables are bfloat16 here, as on a GPU."""
    hp = replace(bare, vocab_size=640, bigram_rows=777, batch_seqs=1, adam_rule=rule)
    model, tokens = GPT(hp), torch.randint(0, 640, (129,))
    if rule == "cautious":
        for table in model.tables():
            table.bfloat16()
        monkeypatch.setattr(train_gpt_2026, "cautious_adam_", lambda *_: None)
    optimizers = Optimizers(model, hp)
    for step in range(3):
        model(tokens[:-1].int(), tokens[1:], with_window(128, hp)).backward()
        with NewShapes() as watch:
            optimizers.step(Moment(step, hp))
        sizes = [math.prod(shape) for shape in watch.shapes]
        made = Counter(size for size in sizes if size >= 640 * 32)
        moments = {640 * 32: 2 * 2, (3 * 640 + 777) * 32: 2}  # embedding and head; all values
        assert made == (moments if step == 0 else {}), step
        assert not model.bigram_embed.weight.grad.any()
