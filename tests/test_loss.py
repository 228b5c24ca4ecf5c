"""The chunked head and loss against one unchunked float64 expression; gradients summed in place."""

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
    CastedLinear,
    Head,
    HeadLoss,
    Optimizers,
    ValueEmbeds,
    cautious_adam_,
    gradient_buffer,
    lookup,
    loss_chunk_len,
    moment,
    relu2_mlp,
)

WIDTH, VOCAB = 48, 1000


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


SHIFTED = (23.0, 5.0, 7.5)  # of records since September 2025: 23 sigmoid((logit + 5) / 7.5)


@pytest.mark.parametrize("cap", [5.0, 15.0, 30.0, 38.0, SHIFTED])
@pytest.mark.parametrize("tokens", [1, 255, 256, 600])  # below, at and over a chunk's 256
def test_chunked_loss_equals_the_unchunked_one(tokens, cap):
    x, head, targets = case(tokens)
    loss = HeadLoss.apply(x, head.weight, targets, cap)
    loss.backward()
    value, grad_x, grad_w = in_float64(x, head.weight, targets, cap)
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert relative_error(x.grad, grad_x) < 2e-5
    assert relative_error(head.weight.grad, grad_w) < 2e-5


def test_bfloat16_input_as_on_a_gpu():
    x, head, targets = case(300, torch.bfloat16)
    loss = HeadLoss.apply(x, head.weight, targets, 15.0)
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


@pytest.mark.parametrize("cap", [15.0, SHIFTED])
def test_compiled_loss_equals_float64(cap):
    """Compiled code has another form of it: two passes over the logits. Here PyTorch executes what
    torch.compile captured."""
    x, head, targets = case(32)
    steps = [torch.compile(step, backend="eager", dynamic=False) for step in HEAD_STEPS]
    loss = HeadLoss.apply(x, head.weight, targets, cap, None, steps)
    loss.backward()
    value, grad_x, grad_w = in_float64(x, head.weight, targets, cap)
    assert loss.item() == pytest.approx(value, rel=2e-7)
    assert relative_error(x.grad, grad_x) < 1e-6
    assert relative_error(head.weight.grad, grad_w) < 1e-6


def objective_in_float64(x, weight, targets, cap, shares):
    """The sum over tokens of each target's loss, times its share; none lies beyond the end."""
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    capped, total = reference.soft_capped(x64 @ w64.T, cap), 0.0
    for t in range(len(targets)):
        for k, share in enumerate(shares):
            if t + k < len(targets):
                total -= share * torch.log_softmax(capped[t], 0)[targets[t + k]]
    total.backward()
    return x64.grad, w64.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shares", [(1.0,), (1.0, 0.4), (1.0, 0.5, 0.25)])
def test_several_targets_have_the_gradients_of_a_weighted_sum(shares, compiled):
    """Over three chunks of tokens; the value is the mean loss of the next token alone."""
    x, head, targets = case(600)
    steps = HEAD_STEPS
    if compiled:  # by PyTorch itself, row by row as on a CPU
        steps = [torch.compile(step, backend="eager", dynamic=False) for step in HEAD_STEPS]
        x, targets = x.detach()[:32].requires_grad_(), targets[:32]
    several = torch.tensor(shares) if len(shares) > 1 else None
    loss = HeadLoss.apply(x, head.weight, targets, SHIFTED, None, steps, several, True)
    loss.backward()
    assert loss.item() == pytest.approx(in_float64(x, head.weight, targets, SHIFTED)[0], rel=1e-6)
    grad_x, grad_w = objective_in_float64(x, head.weight, targets, SHIFTED, shares)
    assert relative_error(x.grad, grad_x) < 2e-5
    assert relative_error(head.weight.grad, grad_w) < 2e-5


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


def test_gradients_of_micro_batches_add_up():
    x, head, targets = case(300)
    HeadLoss.apply(x, head.weight, targets, 15.0).backward()
    once = head.weight.grad.clone()
    for _ in range(2):
        HeadLoss.apply(x, head.weight, targets, 15.0).backward()
    torch.testing.assert_close(head.weight.grad, 3 * once)


def test_without_gradients_nothing_is_added():
    x, head, targets = case(300)
    with torch.no_grad():
        loss = HeadLoss.apply(x.detach(), head.weight, targets, 15.0)
    assert head.weight.grad is None
    assert loss.item() == pytest.approx(in_float64(x, head.weight, targets, 15.0)[0], rel=1e-6)


def test_a_scaled_loss_is_refused_because_its_gradient_is_made_in_the_forward_pass():
    x, head, targets = case(8)
    with pytest.raises(RuntimeError, match="scale gradients after"):
        (HeadLoss.apply(x, head.weight, targets, 15.0) / 8).backward()


class NewShapes(TorchDispatchMode):
    """The shapes of all tensors with storage of their own that operations make, and the operations'
    names."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in given}
        result = function(*args, **(kwargs or {}))
        self.names.append(function.overloadpacket.__name__)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.shapes.append(tuple(t.shape))
        return result

    def __init__(self):
        super().__init__()
        self.shapes, self.names = [], []


def test_a_micro_batch_makes_no_dense_gradient_and_no_logits_of_a_whole_sequence(tiny):
    """Not even for a moment: watched at the dispatcher, from the second micro-batch on."""
    hp = replace(tiny, vocab_size=640, bigram_rows=777)
    model, tokens = GPT(hp), torch.randint(0, 640, (385,))
    inputs, targets = tokens[:-1].int(), tokens[1:]
    model(inputs, targets, 256).backward()  # makes the buffers, once
    with NewShapes() as watch:
        model(inputs, targets, 256).backward()
    assert len(model.value_embeds["embed"]) == 3  # in memory they are one table
    tables = {(rows, hp.model_dim) for rows in (640, 777)}
    tables |= {(rows, hp.num_heads * hp.head_dim) for rows in (640, 3 * 640)}
    assert not tables & set(watch.shapes)
    logits = [shape for shape in watch.shapes if shape[-1:] == (640,)]
    assert logits and max(shape[0] for shape in logits) == loss_chunk_len(torch.device("cpu")) < 384

    plain = torch.nn.Embedding(640, hp.model_dim)
    with NewShapes() as watch:  # what the watch would have seen
        plain(inputs).sum().backward()
    assert (640, hp.model_dim) in watch.shapes


@pytest.mark.parametrize("rule", ["torch", "cautious"])
def test_adam_makes_nothing_of_a_tables_size_but_its_moments_once(rule, tiny):
    """On one rank. The cautious rule itself, which makes some until it is compiled, is left out;
    its tables are bfloat16 here, as on a GPU."""
    hp = replace(tiny, vocab_size=640, bigram_rows=777, batch_seqs=1, adam_rule=rule)
    model, tokens = GPT(hp), torch.randint(0, 640, (129,))
    if rule == "cautious":
        for table in (model.embed, model.value_embeds, model.bigram_embed):
            table.bfloat16()
        model.compile_ = lambda step: (lambda *_: None) if step is cautious_adam_ else step
    optimizers = Optimizers(model, hp)
    for step in range(3):
        model(tokens[:-1].int(), tokens[1:], 128).backward()
        with NewShapes() as watch:
            optimizers.step(moment(step, hp))
        made = Counter(shape for shape in watch.shapes if shape[:1] >= (640,))
        moments = {(640, 32): 5 * 2, (777, 32): 2}  # embedding, head, three of values; bigrams
        assert made == (moments if step == 0 else {}), step
        assert not gradient_buffer(model.bigram_embed.weight).any()


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


@pytest.fixture
def tables() -> ValueEmbeds:
    """Three, of 20 rows."""
    found = ValueEmbeds({name: torch.nn.Embedding(20, 6) for name in "013"})
    found.join()
    return found


def test_value_tables_are_read_at_once_and_have_the_gradients_of_separate_ones(tables):
    """One lookup and one sum, of however many. The third table's rows are not used once."""
    tokens = torch.randint(0, 9, (50,), dtype=torch.int32)
    plain = {
        name: torch.nn.Embedding.from_pretrained(table.weight.detach().double(), freeze=False)
        for name, table in tables.items()
    }
    for used in ("013", "01"):
        weights = {name: torch.randn(50, 6) for name in used}
        with NewShapes() as watch:
            found = tables(tokens)
            sum((found[name] * w).sum() for name, w in weights.items()).backward()
        names = Counter(watch.names)
        assert names["embedding"] == names["index_add_"] == 1, names
        expected = {name: table(tokens) for name, table in plain.items()}
        sum((expected[name] * w).sum() for name, w in weights.items()).backward()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name].double(), rows) for name, rows in expected.items())
    for name, table in plain.items():
        torch.testing.assert_close(
            tables[name].weight.grad.double(), table.weight.grad, rtol=1e-5, atol=1e-5
        )


def in_one_place(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether the parts lie one behind the other, and are the whole."""
    places = [whole.data_ptr() + i * whole.nbytes // len(parts) for i in range(len(parts))]
    return [part.data_ptr() for part in parts] == places and torch.equal(whole, torch.cat(parts))


def test_value_tables_stay_joined_whatever_becomes_of_them(tables):
    """In another dtype, with other weights, changed one by one: a lookup sees it."""
    tokens, others = torch.arange(20), {key: torch.rand(20, 6) for key in tables.state_dict()}
    parts = [table.weight for table in tables.values()]
    changes = {
        "dtype": lambda: torch.nn.ModuleDict({"embed": tables}).bfloat16(),  # as a part of a model
        "weights": lambda: tables.load_state_dict(others),
        "back": tables.float,
        "device": lambda: tables.to("cpu"),
        "one": lambda: parts[1].data.fill_(7.0),
        "copied": lambda: parts[2].data.copy_(torch.rand(20, 6)),
    }
    for name, change in changes.items():
        change()
        assert tables.weight.dtype == (
            torch.bfloat16 if name in ("dtype", "weights") else torch.float32
        )
        assert in_one_place(tables.weight, [part.detach() for part in parts]), name
        rows = tables(tokens)
        assert all(torch.equal(rows[key], table.weight) for key, table in tables.items()), name
    assert torch.equal(parts[0].detach(), others["0.weight"].bfloat16().float())


@pytest.mark.parametrize("asked", ["a part", "the whole", "neither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_value_tables_are_parts_of_one_in_float32(dtype, asked, tables):
    tables.to(dtype)
    parts = [table.weight for table in tables.values()]
    if asked != "neither":
        gradient_buffer(parts[1] if asked == "a part" else tables.weight)
    tokens = torch.tensor([3, 3, 5], dtype=torch.int32)
    sum((k + 1) * rows.float().sum() for k, rows in enumerate(tables(tokens).values())).backward()
    buffers = [gradient_buffer(part) for part in parts]
    assert in_one_place(gradient_buffer(tables.weight), buffers)
    name = "grad" if dtype == torch.float32 else "grad32"
    for k, (part, buffer) in enumerate(zip(parts, buffers, strict=True), 1):
        expected = torch.zeros(20, 6)
        expected[3], expected[5] = 2 * k, k
        assert buffer is getattr(part, name) and torch.equal(buffer, expected)
