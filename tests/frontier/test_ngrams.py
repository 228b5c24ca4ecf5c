"""The n-gram table of forks/train_gpt_2026_08.py: its hashes, its Adam, ranks, pieces of
checkpoints."""

import contextlib
import functools
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate
import ngram_table
import runs
import train_gpt
from frontier import reference_2026 as exact
from frontier import small_runs
from frontier.small_runs import AUGUST
from ngram_table import NgramTable, find_pieces, ngram_hashes, remove_pieces
from train_gpt import UserError
from train_gpt_2026_08 import RECORDS, Moment, Run

main = functools.partial(train_gpt.main, run=Run)

RECORD = RECORDS["2026-08-30_ANVIL2"]
# By the published program: for each token its bigram's and its trigram's row, and those of signs.
PUBLISHED = [
    [42301439, 13084038, 9813067, 29691328, 15501879, 38325375],
    [84602879, 84602879, 57263489, 60103764, 55372036, 75077344],
    [0, 5205, 5075, 177, 4735, 3392],
    [0, 0, 7379, 6742, 513, 6253],
]


def test_hashes_are_the_published_ones():
    tokens = torch.tensor([50256, 11, 262, 1917, 50256, 464]).int()
    rows, signs = ngram_hashes(tokens, RECORD.ngram_rows, 8192)
    assert [*rows.tolist(), *signs.tolist()] == PUBLISHED


@pytest.mark.parametrize("rows", [1234, 84602880])
def test_hashes_of_many_tokens_equal_those_of_whole_numbers(rows):
    tokens = torch.randint(50257, (10**4,), generator=torch.Generator().manual_seed(0))
    found, signs = ngram_hashes(tokens.int(), rows, 8192)
    x, half = tokens.tolist(), rows // 2
    assert found[:, 0].tolist() == [half - 1, rows - 1] and signs[:, 0].tolist() == [0, 0]
    for i in range(2, len(x)):
        a, b, c = x[i], x[i - 1], x[i - 2]
        bigram = (exact.int32(36313 * a) ^ exact.int32(27191 * b)) % (half - 1)
        mixed = exact.int32(17351 * a) ^ exact.int32(60961 * b) ^ exact.int32(45259 * c)
        assert found[:, i].tolist() == [bigram, half + mixed % (half - 1)]
        mixed = [48271 * a ^ 30011 * b, 58699 * a ^ 39779 * b ^ 26801 * c]
        assert signs[:, i].tolist() == [number & 8191 for number in mixed]


def small_table(rows: int = 12, batch_seqs: int = 8) -> NgramTable:
    hp = replace(RECORD, model_dim=4, ngram_rows=rows, ngram_slow_from=8, batch_seqs=batch_seqs)
    table = NgramTable(hp)
    table.share(0, 1, torch.device("cpu"), torch.float64)
    return table


def train_table(table: NgramTable, now: Moment, ids: torch.Tensor, grads: torch.Tensor) -> None:
    """Make a step in which the rows of ids (n,) have these gradients (n, C)."""
    table.look_up(ids).backward(grads)
    table.collect()
    if now.ngrams:
        table.learn(now)


def test_updates_equal_those_of_a_dense_adam():
    """Which lets each row's moment decay at each update, across the change of the cadence. Some
    rows are read twice by a step, some by none, some with a gradient of zero."""
    table, generator = small_table(batch_seqs=3), torch.Generator().manual_seed(0)
    table.rows[:12] = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    rows, second = table.rows[:12].clone(), torch.zeros(12, dtype=torch.float64)
    total, updates = torch.zeros(12, 4, dtype=torch.float64), 0
    for step in range(24):
        now = Moment(step, table.hp)
        ids = torch.randint(9, (7,), generator=generator)
        grads = torch.randn(7, 4, generator=generator, dtype=torch.float64) * (ids[:, None] != 4)
        train_table(table, now, ids, grads)
        for i, grad in zip(ids.tolist(), grads, strict=True):
            total[i] += grad / 3
        if step not in (1, 3, 5, 7, 11, 15, 19, 23):
            continue
        updates += 1
        beta, decay = (0.95, 0.025) if step < 8 else (0.9025, 0.05)
        lr = 0.56 * now.lr
        second = beta * second + (1 - beta) * total.square().mean(1)
        change = lr * (1 - beta**updates) ** 0.5 * total / (second.sqrt()[:, None] + 1e-10)
        rows = rows - change - lr**2 * decay * rows * (change * rows > 0)
        total.zero_()
        assert (table.rows[:12] - rows).norm() < 1e-12 * rows.norm()
    assert not table.rows[12].any() and updates == 8
    assert torch.equal(table.learned_at[9:12], torch.zeros(3, dtype=torch.int32))


def test_the_compiled_update_writes_nothing_in_place():
    """Else Inductor may keep a copy of the whole table in locked host memory."""
    table = small_table()
    state = table.rows, table.second, table.learned_at
    before = [tensor._version for tensor in state]
    rates = [torch.tensor(rate) for rate in (0.1, 0.1, 0.9, 0.8)]
    sums = torch.ones(2, 4, dtype=torch.float64)
    ngram_table.ngram_adam(*state, torch.tensor([0, 3]), sums, 8, torch.tensor(1), *rates)
    assert [tensor._version for tensor in state] == before


def test_all_rows_of_a_short_sequence_may_be_asked_of_one_rank():
    """Chance is not even in so few."""
    table = small_table()
    table.parts = 8
    assert table.room(2 * 128) == 256 < table.room(2 * 49152) < 2 * 49152


def test_a_rank_takes_the_mean_over_the_sequences_of_all():
    """The first of two ranks has the same second moments as one rank: rates hide a scale."""
    whole, half = small_table(batch_seqs=2), small_table(batch_seqs=2)
    half.share(0, 2, torch.device("cpu"), torch.float64)
    grads = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for table in (whole, half):
        table.waiting = [(torch.tensor([0, 3, 3, 5]), grads)]
        table.learn(Moment(1, table.hp))
    assert half.second[3] > 0 and torch.equal(half.second[:6], whole.second[:6])
    assert torch.equal(half.rows[:6], whole.rows[:6])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the outcome of a small run on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        run = runs.Program([*small_runs.language(folder), *AUGUST.split()], 2, main)
        assert run.end() == [0, 0], run.text("err")
    return runs.outcome(folder, run=Run)


def test_a_model_says_how_many_numbers_its_pieces_have(tmp_path):
    """Beside its weights, in float32. Files also have a row's second moment and its last step."""
    model = Run.GPT(replace(RECORDS["demo"], ngram_rows=3002))
    for rank in range(2):
        model.ngrams.rows = None
        model.share_ngrams(rank, 2)
        model.ngrams.save(tmp_path / "it.pt")
    size = sum(piece.stat().st_size for piece in tmp_path.iterdir())
    assert 4 * model.numbers_in_pieces == 4 * 3002 * 128 == pytest.approx(size, rel=0.04)
    assert Run.GPT(replace(RECORDS["demo"], ngram_rows=0)).numbers_in_pieces == 0


def killed(words: list[str]) -> None:
    """Run main, which is killed while it saves the second checkpoint's piece."""
    saved, save = [], torch.save

    def save_some(*arguments):
        saved.append(1)
        if len(saved) == 5:  # of each checkpoint: what waits, a chunk, and the checkpoint
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments)

    torch.save = save_some
    main(words)


def test_a_kill_while_the_table_is_saved_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    words = [*small_runs.language(tmp_path), *AUGUST.split()]
    monkeypatch.chdir(tmp_path)
    run = runs.Program(words, 0, killed)
    assert run.end() == [-signal.SIGKILL]
    names = sorted(path.name for path in (tmp_path / "logs/it").iterdir())
    kept = ["state_step000002.pt", "state_step000002.pt.0of1"]
    assert names == [*kept, "state_step000004.pt.0of1.tmp"]
    out = runs.console_of([*words, "--resume", "on", "--keep", "2"], tmp_path, main)
    assert "resumed at step 2" in out
    names = sorted(path.name for path in (tmp_path / "logs/it").iterdir())
    kept = [f"state_step00000{step}.pt" for step in (6, 8)]
    assert names == sorted([*kept, *(f"{name}.0of1" for name in kept)])


def saving_slowly(words: list[str]) -> None:
    """Run main, where rank 0 is late to remove what was left, and rank 1 to save its piece."""

    def remove(path):
        time.sleep(0.6)
        assert not list(path.parent.glob(f"{path.name}.*")), "a rank did not wait"
        print("removes", flush=True)

    def save(self, path, save=NgramTable.save):
        time.sleep(0.3 * self.rank)
        assert not path.exists(), "rank 0 did not wait"
        save(self, path)

    ngram_table.remove_pieces = remove
    NgramTable.save = save
    runs.wait_at_most(0.6)
    main(words)


def test_pieces_are_saved_after_old_ones_are_removed_and_before_the_checkpoint(
    tmp_path, monkeypatch
):
    words = [*small_runs.language(tmp_path), *AUGUST.split(), "--save_every", "4"]
    monkeypatch.chdir(tmp_path)
    run = runs.Program(words, 2, saving_slowly)
    assert run.end() == [0, 0], run.text("err") + run.text("err", 1)
    assert run.text("out").count("removes") == 2


def test_tools_read_the_pieces(whole, tmp_path, monkeypatch, capsys):
    runs.begin_from(whole, 8, tmp_path)
    monkeypatch.chdir(tmp_path)
    evaluate.main([small_runs.checkpoint(8)])
    loss = float(re.search(r"val_loss:([\d.]+)", capsys.readouterr().out)[1])
    assert loss == pytest.approx(whole.rows[-1]["val_loss"], abs=2e-5)
    (tmp_path / f"{small_runs.checkpoint(8)}.1of2").unlink()
    status, err = runs.error_of([small_runs.checkpoint(8)], capsys, evaluate.main)
    assert status == 1 and "lacks state_step000008.pt.1of2" in err


NAME = "state_step000002.pt"
# Files beside the checkpoint, and which of them are read, in this order.
READ = {
    "0of2 1of2 0of1.tmp 0of3 2of3 3of3 note x0of1": "0of2 1of2",
    " ".join(f"{i}of12" for i in reversed(range(12))): " ".join(f"{i}of12" for i in range(12)),
}
# Files beside the checkpoint, the oldest first, and what the error says.
REFUSED = {
    "3of4 0of4 0of8": f"lacks {NAME}.1of4 {NAME}.2of4: copy all pieces",
    "0of1.tmp": f"copy the pieces {NAME}.0ofN, {NAME}.1ofN ... of N ranks, too",
    "0of2 1of2 0of1": f"{NAME}.*of1 and {NAME}.*of2: remove the older pieces, {NAME}.*of2",
}


def make_beside(path: Path, files: str) -> None:
    """Make a checkpoint and such files beside it, each a second older than the next."""
    path.parent.mkdir()
    path.touch()
    for age, ending in enumerate(reversed(files.split())):
        file = path.with_name(f"{path.name}.{ending}")
        file.touch()
        os.utime(file, (10**9 - age, 10**9 - age))


@pytest.mark.parametrize("files", READ)
def test_the_one_complete_set_of_pieces_is_read(files, tmp_path):
    path = tmp_path / "of [2] * ?" / NAME
    make_beside(path, files)
    assert find_pieces(path) == [path.with_name(f"{NAME}.{end}") for end in READ[files].split()]


@pytest.mark.parametrize("files", REFUSED)
def test_pieces_that_are_missing_or_too_many_are_named_in_one_line(files, tmp_path):
    path = tmp_path / "of [2] * ?" / NAME
    make_beside(path, files)
    with pytest.raises(UserError, match=re.escape(REFUSED[files])) as error:
        find_pieces(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_a_save_begins_without_what_an_earlier_one_left(tmp_path):
    """Of the same checkpoint. Those of others stay."""
    path = tmp_path / "[2]" / NAME
    make_beside(path, "0of1 0of2 1of2 3of8 note")
    (path.parent / "state_step000004.pt.0of2").touch()
    remove_pieces(path)
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == [f"{NAME}.note", "state_step000004.pt.0of2"]


def test_a_full_disk_ends_with_one_line_and_leaves_no_piece(tmp_path):
    table = small_table()
    table.rows.fill_(1.0)
    (tmp_path / "state_step000002.pt.0of1").mkdir()  # a piece cannot be renamed to it
    with pytest.raises(UserError, match="could not save .*state_step000002.pt.0of1"):
        table.save(tmp_path / "state_step000002.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["state_step000002.pt.0of1"]


def test_a_table_of_other_rows_is_refused(tmp_path):
    """Its hashes would find the rows of other n-grams."""
    small_table().save(tmp_path / "state_step000002.pt")
    with pytest.raises(UserError, match="12 rows, or a few less, not of --ngram_rows 16"):
        small_table(rows=16).load(tmp_path / "state_step000002.pt", weights_only=True)


def test_a_damaged_piece_is_refused(tmp_path):
    table, path = small_table(), tmp_path / "state_step000002.pt"
    table.rows[:12] = 1.0
    table.save(path)
    piece = tmp_path / "state_step000002.pt.0of1"
    content = bytearray(piece.read_bytes())
    content[content.rindex(b"\xf0\x3f")] ^= 1  # of a 1.0 in float64
    piece.write_bytes(content)
    with pytest.raises(UserError, match="0of1 is not an intact piece"):
        table.load(path, weights_only=False)
