"""--seconds: how many steps fit, from the times of a few, and what else changes with them."""

import argparse
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import launch
import seconds
import train_gpt
import train_gpt_2026
from runs import SCRIPT, run, val_losses
from train_gpt import HERE, UserError

PATH, FORK = Path(SCRIPT), HERE / "forks" / "train_gpt_2026.py"


@pytest.mark.parametrize(
    ("run_class", "record"),
    [
        (train_gpt.Run, "2024-11-24_WindowWarmup"),
        (train_gpt.Run, "2025-01-26_BatchSize"),
        (train_gpt_2026.Run, "2025-08-23_SparseAttnGate"),
        (train_gpt_2026.Run, "2026-03-06_SimplifyHC"),
    ],
)
def test_the_mean_time_is_that_of_all_steps(run_class, record, monkeypatch):
    """If the time of a step grows with its length, its targets and, linearly, its window. One round
    is noisy: the median ignores it."""
    hp, every = run_class.records[record], getattr(run_class.records[record], "adam_every", 1)
    run = SimpleNamespace(run_class=run_class, hp=hp, every=every, device=torch.device("cpu"))
    made = Counter()

    def ms_of(step: int) -> float:
        now = run_class.moment(step, hp)
        targets = len(getattr(now, "targets", "1"))
        return 100 + now.seq_len / 4096 * (1 + targets) + now.window / 100

    def time_block(run, step: int, count: int) -> tuple[float, list]:
        assert count == 1 or count % every == 0  # with and without Adam
        made[step] += 1
        return ms_of(step) * (3 if made[step] == 5 else 1), []

    monkeypatch.setattr(seconds, "time_block", time_block)
    found = seconds.time_schedule(run, budget=1e9)
    expected = [ms_of(step) for step in range(hp.num_iterations)]
    assert found == pytest.approx(sum(expected) / len(expected), rel=0.005)
    assert len(made) <= 3 * len({run_class.moment(s, hp).graph_key for s in range(0, 1490, every)})


def test_lengths_in_steps_are_scaled_but_not_flags_that_were_given():
    """2026-03-06 has 1490 steps. Its momentum rises in 300 of them and falls in the last 50."""
    flags = ["--record", "2026-03", "--device", "cpu", "--epochs", "1"]
    more = seconds.flags_for(FORK, flags, 149)
    assert more[:2] == ["--num_iterations", "149"]
    assert more[2:] == ["--momentum_warmup_steps", "30", "--momentum_cooldown_steps", "5"]
    flags += ["--momentum_warmup_steps=7"]
    more = seconds.flags_for(FORK, flags, 149)
    assert more == ["--num_iterations", "149", "--momentum_cooldown_steps", "5"]


def test_data_is_read_as_often_as_the_steps_need(flags):
    """The shard has 30000 tokens: 29 batches of 1024 and the last target. With a quarter more
    steps, 24 steps need it twice."""
    place = flags.index("--epochs")
    flags = flags[:place] + flags[place + 2 :]
    for steps, most, epochs in ((29, 0, []), (30, 0, ["2"]), (88, 0, ["4"]), (24, 30, ["2"])):
        more = seconds.flags_for(PATH, flags, steps, most)
        assert more[4:] == (["--epochs", *epochs] if epochs else [])
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
    done = run([*flags, "--seconds", "1", "--val_loss_every", "0"], script=launch.__file__)
    losses = val_losses(done.stdout)
    (ms,) = json.loads(Path("logs/times.json").read_text()).values()
    assert list(losses) == [round(1000 / ms)]
    (found,) = map(json.loads, Path("logs/results.jsonl").read_text().splitlines())
    assert found["machine"] == "2 x CPU" and found["steps"] == round(1000 / ms)
    ramp = round(300 * found["steps"] / 128)
    assert f"--momentum_warmup_steps {ramp} " in f"{found['flags']} "
