"""--seconds: how many steps fit, from the times of a few, and what else changes with them."""

import argparse
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import script
import seconds
import start
import timing
from runs import SCRIPT, run, val_losses
from train_gpt import HERE, UserError

PATH, FORK = Path(SCRIPT), HERE / "forks" / "train_gpt_2026.py"
CASES = [(PATH, "2024-11-24"), (PATH, "2025-01-26"), (FORK, "2025-08-23"), (FORK, "2026-03-06")]


@pytest.mark.parametrize(("path", "record"), CASES)
def test_the_mean_time_is_that_of_all_steps(path, record, monkeypatch):
    """If the time of a step grows with its length, its targets and, linearly, its window. One round
    is noisy: the median ignores it."""
    hp, _ = script.parse(path, ["--record", record])
    moments = [script.load(path).moment(step, hp) for step in range(hp.num_iterations + 1)]
    made, ms = Counter(), []
    every = timing.cycle_of(moments)
    assert every == getattr(hp, "adam_every", 1)

    def ms_of(now) -> float:
        targets = getattr(now, "targets", "1")
        return 100 + now.seq_len / 4096 * (1 + len(targets)) + now.window / 100

    def step(step: int) -> torch.Tensor:
        made[step] += 1
        ms.append(ms_of(moments[step]) * (3 if made[step] == 5 else 1))
        return torch.zeros(1, 1)

    run = SimpleNamespace(moments=moments, every=every, step=step, device=torch.device("cpu"))
    monkeypatch.setattr(timing, "clock", lambda device: sum(ms) / 1e3)
    found = timing.time_schedule(run, budget=1e9)
    assert found == pytest.approx(sum(map(ms_of, moments[:-1])) / hp.num_iterations, rel=0.005)
    assert all((count - 2) % every == 0 for count in made.values())  # two are not timed
    assert len(made) <= 3 * len({now.graph_key for now in moments[:-1:every]})


def test_lengths_in_steps_are_scaled_but_not_flags_that_were_given():
    """2026-03-06 has 1490 steps. Its momentum rises in 300 of them and falls in the last 50."""
    flags = ["--record", "2026-03", "--device", "cpu", "--epochs", "1"]
    more = seconds.flags_for(FORK, flags, 149)
    assert more[2:] == ["--momentum_warmup_steps", "30", "--momentum_cooldown_steps", "5"]
    more = seconds.flags_for(FORK, [*flags, "--momentum_warmup_steps=7"], 149)
    assert more == ["--num_iterations", "149", "--momentum_cooldown_steps", "5"]


def test_data_is_read_as_often_as_the_steps_need(flags):
    """The shard has 30000 tokens: 29 batches of 1024 and the last target. With a quarter more
    steps, 24 steps need more."""
    place = flags.index("--epochs")
    flags = flags[:place] + flags[place + 2 :]
    for steps, most, is_short in ((29, 0, False), (30, 0, True), (24, 30, True)):
        more = seconds.flags_for(PATH, flags, steps, most)
        assert more[4:] == ["--epochs", "0"] * is_short
    assert "--epochs" not in seconds.flags_for(PATH, [*flags, "--epochs", "1"], 30)


def test_a_time_is_remembered_until_something_changes_or_it_is_forgotten(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "its_own.py"
    copy.write_text((HERE / "tests" / "small_fork.py").read_text())
    times = iter([50.0, 60.0, 70.0, 80.0, 90.0])
    monkeypatch.setattr(seconds, "ms_per_step", lambda *_: next(times))

    def steps(*words, time_again=False) -> int:
        args = argparse.Namespace(seconds=6.3, time_again=time_again)
        flags = seconds.with_steps(copy, ["--epochs", "0", "--device", "cpu", *words], args)
        assert f"--seconds 6.3: {flags[-3]} steps of about " in capsys.readouterr().out
        return int(flags[-3])

    assert steps() == steps() == steps("--seed", "4") == 126  # 6300 / 50
    assert steps("--val_seq_len", "256") == 105
    assert steps(time_again=True) == steps() == 90
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert steps() == 79
    copy.write_text(copy.read_text() + "# changed\n")
    assert steps() == 70
    with pytest.raises(UserError, match="leave one of them out"):
        steps("--num_iterations", "3")


def test_two_ranks_time_their_steps_and_train_for_as_long(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    place = flags.index("--num_iterations")
    flags = flags[:place] + flags[place + 2 :]
    done = run([*flags, "--seconds", "1", "--val_loss_every", "0"], script=start.__file__)
    (ms,) = json.loads(Path("logs/times.json").read_text()).values()
    assert list(val_losses(done.stdout)) == [round(1000 / ms)]
    (found,) = map(json.loads, Path("logs/results.jsonl").read_text().splitlines())
    assert found["machine"] == "2 x CPU" and found["steps"] == round(1000 / ms)
    ramp = round(300 * found["steps"] / 128)
    assert f"--momentum_warmup_steps {ramp} " in f"{found['flags']} "
