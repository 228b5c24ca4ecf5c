"""tools/compare.py: its statistics by simulation, and whole comparisons whose runs are made up."""

import fcntl
import json
import math
import re
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace

import compare
import leaderboard
import numpy as np
import pytest
from compare import Comparison, Side
from scipy import stats

MADE_UP = """# Trains nothing; with e times the steps its loss is lower by SLOPE.
import math, os, random, signal, sys
from pathlib import Path

with open("calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
source = Path(sys.argv[1]).read_text()
flags = {name[2:]: value for name, value in zip(sys.argv[2::2], sys.argv[3::2])}
run_id, steps, trick = flags["run_id"], int(flags["num_iterations"]), flags.get("trick")
noise, changed = random.Random(run_id), flags.get("muon_lr") == "0.06"
if trick == "fails":
    sys.exit("first line\\nout of luck")
if trick == "is_interrupted":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
ms = 1e5 * steps / 128 * (1 + 0.01 * changed + 0.004 * NOISE * noise.gauss(0, 1))
loss = 3.3 + 0.002 * changed - SLOPE * math.log(steps / 128) + 0.002 * NOISE * noise.gauss(0, 1)
settings = "\\n".join(f"{k}: {v}" for k, v in flags.items())
lines = f"record demo\\nstep:0/{steps} val_loss:10.8258 train_time:0ms step_avg:0.00ms\\n"
lines += f"step:{steps}/{steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:1.00ms\\n"
Path("logs").mkdir(exist_ok=True)
parts = source, "torch 2.13.0", settings, lines
Path("logs", run_id + ".txt").write_text(("\\n" + 100 * "=" + "\\n").join(parts))
"""


@pytest.fixture(autouse=True)
def interrupts():
    """Restore Python's handler of interrupts, which a comparison replaces."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


# ---- Statistics


def ps(numbers: np.ndarray) -> np.ndarray:
    """Return, by scipy, p after 2, 3, ... numbers of each row."""
    looks = range(2, numbers.shape[-1] + 1)
    return np.array([stats.ttest_1samp(numbers[..., :n], 0, axis=-1).pvalue for n in looks]).T


def test_p_values_and_intervals_are_those_of_scipy():
    numbers = np.random.default_rng(0).normal(0.3, 2, (4, 9))
    np.testing.assert_allclose(compare.p_values(numbers), ps(numbers), rtol=1e-9)
    low, high = stats.ttest_1samp(numbers[0], 0).confidence_interval(0.95)
    assert compare.half_width([*numbers[0]]) == pytest.approx((high - low) / 2)


@pytest.mark.parametrize(
    ("alpha", "most", "known"), [(0.05, 5, None), (0.01, 20, None), (0.01, 20, 1.0)]
)
def test_without_a_difference_the_test_errs_as_rarely_as_alpha_says(alpha, most, known):
    numbers = np.random.default_rng(most).standard_normal((4000, most))
    limits = compare.thresholds(alpha, most, known=known)
    assert limits[:2].tolist() == [0, 0]  # no look after two or three pairs
    assert limits[2:] == pytest.approx(limits[-1] * np.arange(4, most + 1) / most)
    hits = compare.p_values(numbers, known=known) < limits
    error = math.sqrt(alpha * (1 - alpha) / 4000)
    assert alpha / 2 < hits.any(1).mean() <= alpha + 2 * error


def test_the_power_is_that_of_the_help():
    """For a difference of one deviation: 85 %, after 14.2 pairs on average."""
    numbers = np.random.default_rng(1).standard_normal((4000, 20)) + 1
    hits = compare.p_values(numbers) < compare.thresholds(0.01, 20)
    assert hits.any(1).mean() == pytest.approx(0.85, abs=0.02)
    pairs = np.where(hits.any(1), hits.argmax(1) + 2, 20)
    assert pairs.mean() == pytest.approx(14.2, abs=0.3)


@pytest.mark.parametrize(
    ("judge", "worth", "digits"), [("loss", None, 5), ("together", 0.3, 5), ("loss", None, 4)]
)
def test_equal_differences_of_losses_have_at_least_the_error_of_their_rounding(
    judge, worth, digits
):
    """An error of rounding is uniform: with four digits its variance is 1e-8 / 12."""
    unit = 0.1**digits
    a, b = (SimpleNamespace(loss=x, seconds=1.0, digits=digits) for x in (3.28, 3.28 + unit))
    found = Comparison(judge, 0.01, 20, worth=worth, pairs=[(a, b)] * 4)
    t = unit / math.sqrt(2 * unit**2 / 12 / 4)
    assert found.p == pytest.approx(2 * stats.t.sf(t, 3), rel=1e-6) and not found.significant


def test_worth_of_time_is_the_slope_of_loss_over_the_logarithm_of_steps():
    short, long = (
        SimpleNamespace(steps=steps, loss=5 - 0.3 * math.log(steps)) for steps in (1000, 1250)
    )
    assert compare.worth_of_time(short, long) == pytest.approx(0.3)
    found = compare.longer(Side("A", ("--muon_lr", "0.06")), 1490)
    assert found == Side("A_longer", ("--muon_lr", "0.06", "--num_iterations", "1862"))


# ---- Whole comparisons


@pytest.fixture
def fork(tmp_path, monkeypatch, capfd) -> SimpleNamespace:
    """Return a project whose script is at `path` and whose runs are made up by `write`.

    `compare(b, *flags)` compares the script with its flags b; it returns status, lines and stderr.
    `calls()` returns the runs since its last call.
    """
    monkeypatch.chdir(tmp_path)
    launch = tmp_path / "fork" / "tools" / "launch.py"
    launch.parent.mkdir(parents=True)
    path = tmp_path / "fork" / "made_up.py"
    path.write_text("# Its runs are made up.\n")

    def write(noise: float = 1.0, slope: float = 0.1) -> None:
        launch.write_text(MADE_UP.replace("NOISE", str(noise)).replace("SLOPE", str(slope)))

    def call(b: str, *flags) -> tuple[int, list[str], str]:
        words = f"{path} --num_iterations 128 --run_id it --compare".split()
        status = 0
        try:
            compare.main([*words, "", f"fork/made_up.py {b}", *map(str, flags)])
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        return status, out.splitlines(), err

    def calls() -> list[str]:
        path = Path("calls.txt")
        made = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split("--run_id ")[1].removeprefix("it_").split()[0] for line in made]

    write()
    return SimpleNamespace(write=write, compare=call, calls=calls, path=path)


def in_turn(seeds: range) -> list[str]:
    """Return the names of runs in turn: A B, B A, A B, ..."""
    sides = ("ABBA" * len(seeds))[: 2 * len(seeds)]
    return [f"{side}_seed{seeds[i // 2]}" for i, side in enumerate(sides)]


def last_step(name: str) -> tuple[float, float]:
    """Return loss and seconds of a log."""
    text = Path(f"logs/it_{name}.txt").read_text()
    loss, ms = re.findall(r"val_loss:(\S+) train_time:(\d+)ms", text)[-1]
    return float(loss), int(ms) / 1000


def differences(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Return, from the logs, B's loss minus A's, and the logarithm of the times' ratio."""
    pairs = [[last_step(f"{side}_seed{seed}") for side in "AB"] for seed in seeds]
    a, b = np.array(pairs).transpose(1, 2, 0)
    return b[0] - a[0], np.log(b[1] / a[1])


def interval(numbers: np.ndarray) -> tuple[float, float]:
    """Return, by scipy, the mean and half of its 95 % interval."""
    low, high = stats.ttest_1samp(numbers, 0).confidence_interval(0.95)
    return (low + high) / 2, (high - low) / 2


def test_a_comparison_ends_when_the_difference_is_significant(fork):
    status, lines, err = fork.compare("--muon_lr 0.06", "--seed", 3)
    assert (status, err) == (0, "")
    pairs = sum(line.startswith("A seed ") for line in lines)
    seeds, made = range(3, 3 + pairs), fork.calls()
    assert made.pop(2) == "A_longer_seed3" and made == in_turn(seeds)

    losses, times = differences(seeds)
    assert "\nstep:160/160 val_loss" in Path("logs/it_A_longer_seed3.txt").read_text()
    worth = (last_step("A_seed3")[0] - last_step("A_longer_seed3")[0]) / math.log(160 / 128)
    together = times + losses / worth
    limits = compare.thresholds(0.01, 20)[: pairs - 1]
    significant = ps(together) < limits
    assert 5 <= pairs < 20 and significant.tolist() == [False] * (pairs - 2) + [True]

    (slower, slower_by), (higher, higher_by) = interval(times), interval(losses)
    more, more_by = interval(together)
    ratio, of_both = math.exp(slower), math.exp(more)
    assert lines[-2] == (
        f"B is {100 * (ratio - 1):.1f} % ± {100 * ratio * slower_by:.1f} % slower than A; "
        f"its loss is {higher:.4f} ± {higher_by:.4f} higher; to A's loss it takes "
        f"{100 * (of_both - 1):.1f} % ± {100 * of_both * more_by:.1f} % more time, and at equal "
        f"time its loss is {worth * more:.4f} ± {worth * more_by:.4f} higher; the difference is "
        f"significant after {pairs} of at most 20 pairs (p = {ps(together)[-1]:.2e}, "
        f"the limit is {limits[-1]:.2g})"
    )
    assert f"one step more or less of 128 is worth {worth / 128:.2g} of A's loss" in lines


@pytest.mark.parametrize(("judge", "noise"), [("together", 0), ("loss", 1)])
def test_what_is_equal_is_run_to_the_end_and_not_significant(judge, noise, fork):
    fork.write(noise)
    status, lines, _ = fork.compare("", "--runs", 4, "--judge", judge)
    longer = ["A_longer_seed0"] * (judge == "together")
    expected = in_turn(range(4))
    assert (status, fork.calls()) == (0, expected[:2] + longer + expected[2:])
    assert "the difference is not significant after 4 of at most 4 pairs (p = " in lines[-2]
    assert ("to A's loss it takes" in lines[-2]) == (judge == "together")
    p = ps(differences(range(4))[0])[-1] if noise else 1
    assert f"p = {p:.3f}," in lines[-2]


def test_a_known_deviation_gives_the_interval_and_the_test_of_the_loss(fork):
    flags = "--runs", 4, "--judge", "loss", "--deviation", 0.0013
    status, lines, err = fork.compare("--muon_lr 0.06", *flags)
    assert (status, err) == (0, "")
    losses, _ = differences(range(4))
    sem = 0.0013 * math.sqrt(2 / 4)
    p = math.erfc(abs(losses.mean()) / sem / math.sqrt(2))
    assert f"loss is {abs(losses.mean()):.4f} ± {1.96 * sem:.4f} " in lines[-2]
    limit = compare.thresholds(0.01, 4, known=1.0)[-1]
    assert f"(p = {leaderboard.show_p(p)}, the limit is {limit:.2g})" in lines[-2]


def test_a_comparison_continues_with_the_finished_runs(fork):
    """After a stop before the fifth pair, and if the end of a log is missing. While a process
    writes that log, it is not touched."""
    _, (*_, last, _), _ = fork.compare("", "--runs", 5)
    fork.calls()
    log = Path("logs/it_B_seed1.txt")
    text, metrics, checkpoints = log.read_text(), log.with_suffix(".jsonl"), log.with_suffix("")
    log.write_text(text[: text.index("step:128/128")])
    metrics.write_text("of the run that was cut")
    checkpoints.mkdir()
    Path(checkpoints, "state_step000064.pt").write_text("of the run that was cut")
    for side in "AB":
        Path(f"logs/it_{side}_seed4.txt").unlink()
    with log.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, _, err = fork.compare("", "--runs", 5)
        assert status == 1 and f"another process is writing {log}" in err
        assert metrics.exists() and fork.calls() == []
    status, lines, _ = fork.compare("", "--runs", 5)
    assert fork.calls() == ["B_seed1", "A_seed4", "B_seed4"]
    assert (status, lines[-2]) == (0, last)
    assert log.read_text() == text and not metrics.exists() and not checkpoints.exists()
    status, lines, _ = fork.compare("", "--runs", 5)
    assert (status, lines[-2], fork.calls()) == (0, last, [])


def test_the_plan_may_not_change(fork):
    fork.compare("", "--runs", 4)
    fork.calls()
    plan = json.loads(Path("logs/it.json").read_text())
    for key, b, flags in (("runs", "", "--runs 5"), ("B", "--muon_lr 0.06", "--runs 4")):
        status, lines, err = fork.compare(b, *flags.split())
        assert (status, lines, fork.calls()) == (1, [], [])
        assert f"logs/it.json: {key} was {plan[key]}: choose another --run_id\n" in err
        assert json.loads(Path("logs/it.json").read_text()) == plan


def test_runs_of_another_source_are_not_mixed(fork):
    fork.compare("", "--runs", 4)
    Path("logs/it_B_seed2.txt").unlink()
    fork.path.write_text(f"{fork.path.read_text()}# changed\n")
    status, _, err = fork.compare("", "--runs", 4)
    assert status == 1 and err.count("\n") == 1
    assert "logs/it_B_seed0.txt and logs/it_B_seed2.txt differ in source" in err


def test_without_a_worth_of_time_the_judge_may_change_once(fork):
    """The finished runs are used again."""
    fork.write(0, slope=-0.1)
    for made in (["A_seed0", "B_seed0", "A_longer_seed0"], []):
        status, lines, err = fork.compare("", "--runs", 4)
        assert (status, fork.calls()) == (1, made)
        assert "the worth of time cannot be measured" in err and "--run_id it --judge loss\n" in err
    status, lines, err = fork.compare("", "--runs", 4, "--judge", "loss")
    assert (status, err, fork.calls()) == (0, "", in_turn(range(4))[2:])
    assert "not significant after 4 of at most 4 pairs" in lines[-2]
    status, _, err = fork.compare("", "--runs", 4, "--judge", "time")
    assert status == 1 and "judge was loss: choose another --run_id" in err


def test_a_run_that_fails_is_named(fork):
    status, _, err = fork.compare("--trick fails")
    of_run = "first line\nout of luck\n"
    assert status == 1 and err.startswith(f"{of_run}run.sh: error: ")
    last = err.removeprefix(of_run)
    assert last.count("\n") == 1 and "it_B_seed0" in last and "failed (status 1)" in last
    assert fork.calls() == ["A_seed0", "B_seed0"]


def test_an_interrupted_run_ends_the_comparison_and_is_made_again_later(fork):
    status, _, err = fork.compare("--trick is_interrupted")
    assert (status, err) == (130, "")
    assert fork.calls() == ["A_seed0", "B_seed0"]
    assert fork.compare("--trick is_interrupted")[0] == 130 and fork.calls() == ["B_seed0"]


# ---- Flags


@pytest.mark.parametrize(
    "words",
    [
        "'' '' --runs 3",
        "'' '--no_such 1'",
        "'--seq_len 5' ''",
        "'' 'forks/no_fork.py --muon_lr 0.06'",
        "'--seed 4' ''",
        "''",
    ],
)
def test_bad_flags_start_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Side, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(SystemExit) as stop:
        compare.main(["--compare", *shlex.split(words)])
    assert stop.value.code == 1 and capsys.readouterr().err.count("\n") == 1
    assert not Path("logs").exists()
