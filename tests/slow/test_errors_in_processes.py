"""Bad input and a kill end real processes and torchruns with one line."""

import pytest
from runs import RUNS, SCRIPT, run
from test_errors import CHECKPOINTS, FLAGS, RUNNING, SHARDS, folder  # noqa: F401

ALONE = [FLAGS[0], SHARDS[0], CHECKPOINTS[2], *RUNNING]
RANKS = [FLAGS[0], SHARDS[1], CHECKPOINTS[2], *RUNNING]
RANKS += [("--batch_seqs 3", "2 ranks cannot share 3 sequences: start a number")]


def ended(words: list[str], ranks: int, script=SCRIPT, **options) -> tuple[int, list[str]]:
    """Return the status, and the lines of train_gpt.py's own on standard error."""
    done = run(words, ranks, script, **options)
    assert f'File "{script}"' not in done.stderr  # torchrun's report has none
    return done.returncode, [x for x in done.stderr.splitlines() if x.startswith("train_gpt.py:")]


@pytest.mark.parametrize(
    ("ranks", "words", "message"), [*((0, *row) for row in ALONE), *((2, *row) for row in RANKS)]
)
def test_bad_input(ranks, words, message, folder):  # noqa: F811
    path, flags = folder
    status, lines = ended([*flags, *words.split()], ranks, cwd=path)
    assert status == 1 and len(lines) == 1 and message in lines[0]


def test_a_rank_that_is_killed(flags):
    words = ["test_errors:killed", *flags, "--num_iterations", "9"]
    status, lines = ended(words, 2, script=RUNS)
    assert status == 1
    # torchrun may stop rank 0 before it has noticed and said so.
    assert len(lines) <= 1 and all("another rank has stopped" in line for line in lines)
