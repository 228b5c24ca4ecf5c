"""forks/train_gpt_2026_08.py: candidates against a plain reading of the published rule, the loss
among them against float64, and whole runs."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

import runs
import train_gpt
import train_gpt_2026_08 as script
from frontier import small_runs, test_newest, test_runs
from reference import relative_error
from sampled_softmax import choose_candidates
from train_gpt import UserError
from train_gpt_2026_08 import RECORDS, Moment, Run

CPU = torch.device("cpu")
RECORD = RECORDS["2026-08-30_ANVIL2"]
SIZES = test_newest.SIZES | {"bigram_rows": 0, "ngram_rows": 1234}
main = functools.partial(train_gpt.main, run=Run)


def chosen_by_rule(targets: list[int], offset: int, count: int, vocab_size: int) -> tuple:
    """Walk along the sweep, token by token."""
    members = set(targets)
    needed = count - len(members)
    if not needed:
        return sorted(members), offset
    looked_at = min(vocab_size, int(1.7 * needed) + 256)
    window = [20011 * (offset + i) % vocab_size for i in range(looked_at)]
    others = [token for token in window if token not in members]
    if len(others) < needed:
        rest = [token for token in range(vocab_size) if token not in members]
        others = rest[:: max(1, len(rest) // needed)]
    return sorted([*members, *others[:needed]]), (offset + looked_at) % vocab_size


def some_targets(kind: str, vocab_size: int, count: int, generator) -> torch.Tensor:
    """Return targets of a kind: fewer different ones than candidates, as many, or those that the
    sweep meets first."""
    if kind == "few":
        return torch.randint(vocab_size, (count // 2,), generator=generator)
    if kind == "all":
        return torch.randperm(vocab_size, generator=generator)[:count]
    return 20011 * torch.arange(count - 20) % vocab_size


@pytest.mark.parametrize("kind", ["few", "all", "first of the sweep"])
@pytest.mark.parametrize(("vocab_size", "count"), [(1024, 720), (50304, 10240), (512, 496)])
def test_candidates_are_those_of_a_walk_along_the_sweep(kind, vocab_size, count):
    generator, offset, expected_offset = torch.Generator().manual_seed(0), torch.tensor(7), 7
    for _ in range(5):
        targets = some_targets(kind, vocab_size, count, generator)
        expected = chosen_by_rule(targets.tolist(), expected_offset, count, vocab_size)
        found, offset = choose_candidates(targets, offset, count, vocab_size)
        expected, expected_offset = expected
        assert (found.tolist(), offset.item()) == (expected, expected_offset)


# By the published program: targets, offset, count and vocabulary; then candidates, and the offset.
SMALL = [3, 7, 500, 511, 522, 533, 544, 555]
PUBLISHED = [
    (([3, 500, 3, 7], 500, 8, 1000), (SMALL, 764)),
    (([3, 500, 3, 7], 764, 8, 1000), ([3, 7, 404, 415, 426, 437, 448, 500], 28)),
]
SUMS = {0: (17655, 257517542), 17655: (35310, 257576821), 35310: (2661, 257510615)}


def test_candidates_are_the_published_ones():
    for (targets, offset, *sizes), (expected, after) in PUBLISHED:
        found = choose_candidates(torch.tensor(targets), torch.tensor(offset), *sizes)
        assert [part.tolist() for part in found] == [expected, after]
    for offset, expected in SUMS.items():
        targets = torch.tensor([11, 262, 464, 3290, 294])
        found, after = choose_candidates(targets, torch.tensor(offset), 10240, 50304)
        assert (after.item(), found.sum().item()) == expected
    with torch.device("meta"):
        head = script.Head(replace(RECORD, model_dim=8, batch_seqs=8))
    assert head.first_offsets(8).tolist() == [50304 * rank // 8 for rank in range(8)]


def test_a_sequence_with_more_different_targets_than_candidates_is_refused():
    """Before the run, which names the step. A warm-up's made-up tokens are not refused."""
    hp = replace(
        RECORDS["demo"], seq_len=256, batch_seqs=2, align_to_documents=False, vocab_size=1024
    )
    hp = replace(hp, stages="length=1+window=128+candidates=128", extension_frac=0)
    moments = [Moment(step, hp) for step in range(3)]
    tokens = np.arange(2000) % 100
    assert len(list(script.plan([tokens], hp, moments))) == 3
    tokens[600:900] = np.arange(300)  # in the first sequence of step 1
    with pytest.raises(UserError, match="different targets in a sequence of step 1, but 128"):
        list(script.plan([tokens], hp, moments))
    found, offset = choose_candidates(torch.arange(17), torch.tensor(3), 16, 512)
    assert (found.tolist(), offset.item()) == ([*range(16)], 3)
    head = script.Head(replace(hp, model_dim=8, vocab_size=512, fp8=False))
    head.loss(
        torch.randn(17, 8, requires_grad=True), torch.arange(17), (1, 0.5), 0.0, 16
    ).backward()


def by_hand(head, x, columns: torch.Tensor, shares: tuple, chosen: list[int]) -> torch.Tensor:
    """Return the loss among the chosen tokens, a token and a target at a time, in float64."""
    a, b, c = 23.0, 5.0, 7.5
    logits = a * torch.sigmoid((x @ head.weight.double()[chosen].T + b) / c)
    total = 0.0
    for row, targets in zip(logits, columns.tolist(), strict=True):
        for target, share in zip(targets, shares, strict=True):
            if target in chosen:
                total = total + share * (row.logsumexp(0) - row[chosen.index(target)])
    return total


@pytest.mark.parametrize(("shares", "prefix"), [((1.0,), 0.0), ((1, 0.5), 0.0), ((1, 0.5), 0.25)])
def test_loss_and_gradients_equal_float64_among_the_candidates(shares, prefix):
    """Of two sequences, whose gradients add up; and a second sweep begins behind the first."""
    head = script.Head(replace(RECORD, model_dim=32, vocab_size=512, batch_seqs=2, fp8=False))
    head.double().weight.data.normal_(std=0.2)
    before = [token // 2 if token % 3 else -1 for token in range(512)]
    head.prefixes, offsets = torch.tensor(before), [0, 256]
    head.train()
    generator, expected, inputs = torch.Generator().manual_seed(1), 0.0, []
    for i in range(4):
        x = torch.randn(40, 32, generator=generator, dtype=torch.float64).requires_grad_()
        targets = torch.randint(512, (40,), generator=generator)
        chosen, offsets[i % 2] = chosen_by_rule(targets.tolist(), offsets[i % 2], 96, 512)
        words = targets.tolist()
        columns = [words[k:] + [-1] * k for k in range(len(shares))]
        columns += [[before[word] for word in words]] if prefix else []
        columns = torch.tensor(columns).T
        given = (*shares, prefix) if prefix else shares
        expected = expected + by_hand(head, x, columns, given, chosen)
        inputs.append((x, targets, chosen))
    grads = torch.autograd.grad(expected, [head.weight, *[x for x, *_ in inputs]])
    for x, targets, _ in inputs:
        head.loss(x, targets, tuple(shares), prefix, 96).backward()
    for found, grad in zip([head.weight, *[x for x, *_ in inputs]], grads, strict=True):
        assert relative_error(found.grad, grad) < 5e-7  # logits are float32
    assert head.offsets.tolist() == offsets
    others = set(range(512)).difference(*[chosen for *_, chosen in inputs])
    assert others and not head.weight.grad[sorted(others)].any()


def test_with_all_tokens_as_candidates_the_gradient_is_the_whole_one():
    hp = replace(RECORD, model_dim=32, vocab_size=512, batch_seqs=2, fp8=False)
    head = script.Head(hp).double()
    x = torch.randn(40, 32, dtype=torch.float64, requires_grad=True)
    targets, found = torch.arange(40) * 7, []
    for count in (0, 512):
        head.weight.grad = x.grad = None
        loss = head.loss(x, targets, (1.0, 0.5), 0.0, count)
        loss.backward()
        found.append((loss.detach(), x.grad, head.weight.grad.double()))
    for whole, sampled in zip(*found, strict=True):
        assert relative_error(sampled, whole) < 1e-6


def test_validation_has_the_whole_vocabulary(randomize):
    """Its loss is that of a softmax of all tokens' logits, at a moment with few candidates."""
    hp = replace(RECORDS["demo"], **SIZES, stages=small_stages(), fp8=False)
    model, now = randomize(script.GPT(hp)), Moment(0, hp)
    inputs, targets = test_newest.batch_of(hp, 0)
    assert now.candidates == 256
    model.eval()
    with torch.no_grad():
        logits = model.hidden(inputs[0], now).double() @ model.lm_head.weight.double().T
        chances = torch.log_softmax(23 * torch.sigmoid((logits + 5) / 7.5), -1)
        expected = -chances[torch.arange(len(targets[0])), targets[0]].mean().item()
    one = (inputs[:1], targets[:1])
    assert train_gpt.evaluate(model, one, now, CPU) == pytest.approx(expected, rel=1e-6)
    offsets = model.lm_head.offsets.clone()
    trained = model(inputs[0], targets[0], now).item()
    assert trained < expected - 0.1 and not torch.equal(model.lm_head.offsets, offsets)


def small_stages() -> str:
    """Return small_runs.py's stages with candidates, of 512 tokens."""
    first, second, third, fourth = small_runs.STAGES.split(",")
    counts = "+candidates=256+prefix=1", "+candidates=256+prefix=.8/.6", "+candidates=384/512"
    rows = [row + count for row, count in zip((first, second, third), counts, strict=True)]
    return ",".join([*rows, fourth])


# A small run with all techniques but one: GPT-2's tokenizer did not make the made-up language.
FLAGS = (
    f"{small_runs.WORDS} {small_runs.ROW[small_runs.D]} --record 2026-08-30 "
    f"--stages {small_stages()} --layers {script.LAYERS_DEMO} --bigram_rows 0 "
    "--bigram_signs 37 --mudd_groups 4 --fp8 off --mlp_width 112 --anvil_from 4 "
    "--attention_border 200 --canonical_mask off"
)


def test_resumed_with_as_many_ranks_or_others_it_ends_as_ever(tmp_path, monkeypatch):
    """The sweep of each sequence goes on, whichever rank it is on."""
    words, whole = [*small_runs.language(tmp_path), *FLAGS.split(), "--ngram_rows", "0"], None
    for ranks, step in (0, 0), (0, 4), (4, 2):
        (folder := tmp_path / f"{ranks}_{step}").mkdir()
        if step:
            test_runs.copied(whole, step, folder)
        monkeypatch.chdir(folder)
        run = runs.Program([*words, "--resume", "on"], ranks, main)
        assert run.end() == [0] * max(ranks, 1), run.text("err")
        found = runs.outcome(folder, run=Run)
        whole = whole or found
        (runs.assert_close if ranks else test_runs.assert_same)(found, whole, since=step or -1)
    saved = torch.load(whole.folder / small_runs.checkpoint(4), weights_only=True)
    offsets = saved["optimizers"]["sampled softmax"]["offsets"]
    assert len(offsets) == 8 and len(set(offsets.tolist())) > 4
    candidates = [row["candidates"] for row in whole.rows if "candidates" in row]
    assert candidates == [256] * 5 + [384, 512, 0]
    assert whole.rows[-1]["val_loss"] < whole.rows[0]["val_loss"] - 0.2


BAD = {
    "--stages length=1+window=128+candidates=100": "candidates must be multiples of 16",
    "--stages length=1+window=128+candidates=50400": "candidates must be multiples of 16",
    "--stages length=1+window=128": "needs candidates in --stages",
    "--stages length=1.3+window=128+candidates=96": "multiple of 128 tokens",
    "--vocab_size 50257 --tied_frac 0": "needs vocab_size a multiple of 128",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_value_ends_with_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: pytest.fail("it trains"))
    status, err = runs.error_of(["--record", "demo", *words.split()], capsys, main)
    assert status == 1 and BAD[words] in err
