"""--seconds: how many steps fit, from the times of a few, and what else changes with them."""

import re
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import launch
import result
import script
from runs import SCRIPT, val_losses
from train_gpt import HERE, UserError

PATH, FORK = Path(SCRIPT), HERE / "forks" / "train_gpt_2026.py"
CASES = [(PATH, "2025-01-26"), (FORK, "2026-01-04"), (FORK, "2026-03-06")]


@pytest.mark.parametrize(("path", "record"), CASES)
def test_the_mean_time_is_that_of_all_steps(path, record, monkeypatch):
    """If the time of a step grows with its length, its targets and, linearly, its window. One round
    is noisy: the median ignores it. Stages that are no whole ninths of a run cost up to 3 %."""
    hp, _ = script.parse(path, ["--record", record])
    moments = [script.load(path).Moment(step, hp) for step in range(hp.num_iterations + 1)]
    made, ms = Counter(), []
    every = getattr(hp, "adam_every", 1)

    def ms_of(now) -> float:
        targets = getattr(now, "targets", "1")
        return now.seq_len / 4096 * (1 + len(targets)) + now.window / 100

    def step(step: int) -> torch.Tensor:
        made[step] += 1
        run.batches[step] = None
        ms.append(ms_of(moments[step]) * (100 if made[step] == 5 else 1))
        return torch.zeros(1, 1)

    run = SimpleNamespace(moments=moments, every=every, step=step, batches={}, device="cpu")
    monkeypatch.setattr(bench, "clock", lambda device: sum(ms) / 1e3)
    found = bench.time_schedule(run, budget=1e9)
    assert found == pytest.approx(sum(map(ms_of, moments[:-1])) / hp.num_iterations, rel=0.03)
    assert len(made) == bench.PARTS


@pytest.mark.parametrize(("ranks", "rank"), [(None, 0), ("1", 0), ("2", 1)])
def test_a_rank_alone_in_the_environment_does_not_count(ranks, rank, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    if ranks:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert runpy.run_path(bench.__file__)["RANK"] == rank


def test_lengths_in_steps_are_scaled_but_not_flags_that_were_given(capsys):
    """2026-03-06 has 1490 steps. Its momentum rises in 300 of them and falls in the last 50."""
    flags = ["--record", "2026-03", "--device", "cpu", "--epochs", "1"]
    more = launch.flags_for(FORK, flags, 149, "it")
    assert more[2:] == ["--momentum_warmup_steps", "30", "--momentum_cooldown_steps", "5"]
    assert capsys.readouterr().out.startswith("it: --num_iterations 149 ")
    more = launch.flags_for(FORK, [*flags, "--momentum_warmup_steps=7"], 149, "it")
    assert more == ["--num_iterations", "149", "--momentum_cooldown_steps", "5"]
    assert launch.flags_for(FORK, flags[:4], 149, "it")[-2:] == ["--epochs", "0"]
    more = launch.flags_for(
        HERE / "forks/train_gpt_2026_08.py", ["--record", "2026-08-30"], 597, "it"
    )
    assert more[-6:-2] == ["--anvil_from", "256", "--ngram_slow_from", "168"]


def test_steps_follow_from_the_time_of_one(monkeypatch, capsys):
    monkeypatch.setattr(launch, "ms_per_step", lambda *_: 50.0)
    assert launch.steps_in(6.3, PATH, ["--seed", "4"]) == 126  # 6300 / 50
    assert capsys.readouterr().out == "--seconds 6.3: 126 steps of about 50 ms; "
    assert launch.steps_in(0.001, PATH, []) == 1
    for wanted, flags, message in (
        (6.3, ["--num_iterations=3"], "leave it or --num_iterations out"),
        (6.3, ["--resume", "on"], "leave it or --resume out"),
        (0.0, [], "finite number above 0"),
    ):
        with pytest.raises(UserError, match=message):
            launch.steps_in(wanted, PATH, flags)


def test_two_ranks_of_a_fork_time_their_steps_and_train_for_as_long(flags, monkeypatch, capfd):
    """They are processes of the real torchrun."""
    monkeypatch.setenv("NPROC", "2")
    place = flags.index("--num_iterations")
    flags = [f"{HERE}/tests/small_fork.py", *flags[:place], *flags[place + 2 :]]
    with pytest.raises(SystemExit, match="^0$"):
        launch.main([*flags, "--seconds", "1", "--val_loss_every", "0"])
    out = capfd.readouterr().out
    steps, ms = map(int, re.search(r"1: (\d+) steps of about (\d+) ms", out).groups())
    assert round(1000 / (ms + 0.5)) <= steps <= round(1000 / (ms - 0.5))
    assert list(val_losses(out)) == [steps]
    (found,) = result.noted()
    assert found["machine"] == "2 x CPU" and found["steps"] == steps
