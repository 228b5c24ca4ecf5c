"""Bad input ends a program within 30 seconds, alone and under torchrun, on a quiet machine."""

import time

import pytest
from runs import RUNS, SCRIPT, run
from test_errors import CHECKPOINTS, FLAGS, RUNNING, SHARDS, folder  # noqa: F401

ALONE = [*FLAGS[:1], *FLAGS[4:5], *FLAGS[7:8], *SHARDS, *CHECKPOINTS, *RUNNING]
RANKS = [FLAGS[0], FLAGS[7], SHARDS[0], SHARDS[2], SHARDS[-4], CHECKPOINTS[2], *RUNNING]
RANKS += [("--batch_seqs 3", 1, "2 ranks cannot share 3 sequences: use a divisor")]


def ended(words: list[str], ranks: int, cwd, script=SCRIPT):
    """Status, and the lines of train_gpt.py's own on standard error."""
    began = time.monotonic()
    done = run(words, ranks, script, cwd=cwd)
    assert time.monotonic() - began < 30
    assert f'File "{script}"' not in done.stderr  # torchrun's report has none
    return done.returncode, [x for x in done.stderr.splitlines() if x.startswith("train_gpt.py:")]


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(("words", "status", "message"), ALONE)
def test_bad_input(words, status, message, ranks, folder):  # noqa: F811
    if ranks and (words, status, message) not in RANKS:
        pytest.skip("tried alone")
    path, flags = folder
    found, lines = ended([*flags, *words.split()], ranks, path)
    assert found == (1 if ranks else status)  # of torchrun, 1
    assert len(lines) == 1 and message in lines[0]


def test_a_rank_that_is_killed(folder):  # noqa: F811
    path, flags = folder
    words = ["test_errors:killed", *flags, "--num_iterations", "100000"]
    status, lines = ended(words, 2, path, script=RUNS)
    assert status == 1
    # torchrun may stop rank 0 before it has noticed and said so.
    assert len(lines) <= 1 and all("another rank has stopped" in line for line in lines)
