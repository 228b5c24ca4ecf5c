"""tools/compare.py: its statistics by simulation, and comparisons of a project that makes up its
runs from flags and seed."""

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
from runs import error_of
from scipy import optimize, stats

from train_gpt import HERE

MADE_UP = """# Trains nothing; with e times the steps its loss is lower by SLOPE.
import math, os, random, signal, sys
from pathlib import Path

with open("calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
source = Path(sys.argv[1]).read_text()
flags = {name[2:]: value for name, value in zip(sys.argv[2::2], sys.argv[3::2])}
run_id, steps, rate = flags["run_id"], int(flags["num_iterations"]), flags.get("muon_lr", "0.05")
noise, changed = random.Random(run_id), rate == "0.06"
if rate == "0.09":
    sys.exit("first line\\nout of luck")
if rate == "0.10":
    sys.exit(130)
if rate == "0.11":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
if rate == "0.12":
    os.kill(os.getppid(), signal.SIGINT)
if rate == "0.13":
    print("a warning of", run_id, file=sys.stderr)
ms = 1e5 * steps / 128 * (1 + 0.01 * changed + 0.004 * NOISE * noise.gauss(0, 1))
loss = 3.3 + 0.002 * changed - SLOPE * math.log(steps / 128) + 0.002 * NOISE * noise.gauss(0, 1)
settings = "\\n".join(f"{k}: {v}" for k, v in (flags | {"muon_lr": rate}).items())
lines = f"record demo\\nstep:0/{steps} val_loss:10.8258 train_time:0ms step_avg:0.00ms\\n"
if rate != "0.08":
    lines += f"step:{steps}/{steps} val_loss:{loss:.4f} train_time:{ms:.0f}ms step_avg:1.00ms\\n"
parts = source, "torch 2.13.0", settings, lines
Path("logs").mkdir(exist_ok=True)
Path("logs", run_id + ".txt").write_text(("\\n" + 100 * "=" + "\\n").join(parts))
"""
ABOUT = " ".join(compare.__doc__.split())


@pytest.fixture(autouse=True)
def interrupts():
    """Give Python its handler of interrupts back: a comparison leaves them to its runs."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def settled_at(numbers: np.ndarray, alpha: float, most: int) -> np.ndarray:
    """Return after how many pairs the test settles a difference in numbers (..., most); 0 where it
    does not."""
    hits = compare.p_values(numbers) < compare.thresholds(alpha, most)
    return np.where(hits.any(-1), hits.argmax(-1) + 2, 0)


def bound(share: float, times: int) -> float:
    """Return what a share of so many trials stays below, but for one time in 40."""
    return share + 2 * math.sqrt(share * (1 - share) / times)


# ---- Statistics


def test_p_values_are_those_of_scipy_after_each_number():
    numbers = np.random.default_rng(0).normal(0.3, 2, (4, 3, 9))
    found = compare.p_values(numbers)
    for n in range(2, 10):
        expected = stats.ttest_1samp(numbers[..., :n], 0, axis=-1).pvalue
        np.testing.assert_allclose(found[..., n - 2], expected, rtol=1e-9)
    low, high = stats.ttest_1samp(numbers[0, 0], 0).confidence_interval(0.95)
    assert compare.half_width([*numbers[0, 0]]) == pytest.approx((high - low) / 2)


def test_equal_numbers_settle_all_or_nothing():
    assert compare.p_values([0, 0, 0]).tolist() == [1, 1]
    assert compare.p_values([0.1, 0.1, 0.1]).tolist() == [0, 0]
    assert compare.p_values([[-7, -7], [0, 0]]).tolist() == [[0], [1]]
    then = compare.p_values([0.1, 0.1, 0.1, 0.3])  # what is equal at first only
    assert then[:2].tolist() == [0, 0]
    assert then[2] == pytest.approx(stats.ttest_1samp([0.1, 0.1, 0.1, 0.3], 0).pvalue)


def test_p_of_a_known_deviation_is_that_of_the_normal_distribution():
    numbers = np.random.default_rng(0).normal(1, 2, (3, 6))
    found = compare.p_values(numbers, known=2.0)
    for n in range(2, 7):
        z = np.abs(numbers[:, :n].sum(1)) / (2 * math.sqrt(n))
        expected = [math.erfc(value / math.sqrt(2)) for value in z]
        np.testing.assert_allclose(found[:, n - 2], expected, rtol=1e-9)
    assert compare.half_width([1.0, 5.0, 2.0, 2.0], known=2.0) == pytest.approx(1.96, abs=1e-3)


def test_with_a_known_deviation_no_difference_is_settled_as_rarely_as_alpha_says():
    numbers = 0.3 * np.random.default_rng(3).standard_normal((4000, 20))
    hits = compare.p_values(numbers, known=0.3) < compare.thresholds(0.01, 20, known=1.0)
    assert 0.01 / 3 < hits.any(1).mean() <= bound(0.01, 4000)
    larger = numbers + 0.3
    found = compare.p_values(larger, known=0.3) < compare.thresholds(0.01, 20, known=1.0)
    assert found.any(1).mean() > (settled_at(larger, 0.01, 20) > 0).mean()


@pytest.mark.parametrize("most", [5, 12, 20])
@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_no_difference_is_settled_as_rarely_as_alpha_says(alpha, most):
    """And not much more rarely. Each row is settled where the first p by scipy is low enough."""
    numbers = 1e-3 * np.random.default_rng(most).standard_normal((2000, most))
    at = settled_at(numbers, alpha, most)
    assert alpha / 3 < (at > 0).mean() <= bound(alpha, 2000)
    needed = compare.thresholds(alpha, most)
    assert needed[:2].tolist() == [0, 0]  # no look after two or three pairs
    assert needed[2:] == pytest.approx(needed[-1] * np.arange(4, most + 1) / most)
    low = (ps(numbers) < needed).tolist()
    assert at.tolist() == [row.index(True) + 2 if True in row else 0 for row in low]


def ps(numbers: np.ndarray) -> np.ndarray:
    """Return, by scipy, p after 2, 3, ... numbers of each row."""
    looks = range(2, numbers.shape[1] + 1)
    return np.array([stats.ttest_1samp(numbers[:, :n], 0, axis=1).pvalue for n in looks]).T


def test_a_look_at_alpha_after_each_pair_would_settle_too_much():
    """As often as the text of the program says."""
    numbers = np.random.default_rng(1).standard_normal((20000, 20))
    naive = (compare.p_values(numbers) < 0.01).any(1)
    assert naive[:2000].mean() > bound(0.01, 2000)
    stated = float(re.search(r"0\.01 after each of 20 pairs would do so with (0\.\d\d)", ABOUT)[1])
    assert abs(naive.mean() - stated) < 0.005 + bound(stated, 20000) - stated


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_a_difference_takes_fewer_pairs_than_a_test_of_one_look(alpha):
    """Of equal alpha and power, where the difference is one deviation of a pair's number."""
    at = settled_at(np.random.default_rng(2).normal(1, 1, (4000, 20)), alpha, 20)
    power, pairs = (at > 0).mean(), np.where(at > 0, at, 20).mean()

    def lacking(n: float) -> float:
        return power - stats.nct.sf(stats.t.isf(alpha / 2, n - 1), n - 1, math.sqrt(n))

    assert 0.8 < power < 0.99 and pairs < 0.95 * optimize.brentq(lacking, 2, 60)


def test_before_the_fourth_pair_there_is_no_look():
    """However large the difference is, or if all pairs have one number."""
    for numbers in ([5.0, 5.0, 5.0, 5.0], [5.0, 5.1, 5.0, 5.1]):
        assert settled_at(np.array([numbers + [5.0] * 4]), 0.01, 8).tolist() == [4]
    runs = [(SimpleNamespace(loss=0, seconds=1.0), SimpleNamespace(loss=0, seconds=9.0))] * 4
    found = [Comparison("time", 0.01, 8, pairs=runs[:n]) for n in (1, 2, 3, 4)]
    assert [one.settled for one in found] == [False, False, False, True]
    for n, one in enumerate(found[:3], 1):
        text = f"{n} of at most 8 pairs: how B compares with A is said from pair 4 on"
        assert one.sentence() == text and math.isnan(one.p)


def test_earlier_looks_would_settle_huge_differences_only():
    """As the comment at FEWEST says: those that are settled every second time, in deviations."""
    numbers = np.random.default_rng(2026).standard_normal((100_000, 20))
    stated = {2: 1300, 3: 25, 4: 7}
    for first, deviations in stated.items():
        growth = np.arange(first, 21) / 20
        p = compare.p_values(numbers)[:, first - 2 :]
        limit = np.quantile((p / growth).min(1), 0.01) * first / 20
        t = stats.t.isf(limit / 2, first - 1)
        power = stats.nct.sf(t, first - 1, deviations * first**0.5)
        assert 0.4 < power < 0.6
        if first == leaderboard.FEWEST:
            assert limit == pytest.approx(compare.thresholds(0.01, 20)[2])


def test_losses_that_are_rounded_settle_no_more():
    """A log has four digits of a loss: two differences are equal more often than normal ones."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(1000):
        losses = rng.normal(3.28, 0.0007, (5, 2)).round(4)
        runs = [[SimpleNamespace(loss=x, seconds=100.0) for x in pair] for pair in losses]
        wrong += any(Comparison("loss", 0.01, 5, pairs=runs[:n]).settled for n in range(2, 6))
    assert wrong / 1000 <= bound(0.01, 1000)


def test_worth_of_time_is_the_slope_of_loss_over_the_logarithm_of_steps():
    def run(steps: int, loss: float) -> SimpleNamespace:
        return SimpleNamespace(path=f"logs/{steps}.txt", steps=steps, loss=loss)

    short, long = (run(steps, 5 - 0.3 * math.log(steps)) for steps in (1000, 1250))
    assert compare.worth_of_time(short, long) == pytest.approx(0.3)
    assert compare.worth_of_time(short, run(1250, short.loss)) == 0
    assert compare.worth_of_time(short, run(1250, short.loss + 0.1)) < 0


@pytest.mark.parametrize(("steps", "more"), [(1, 2), (2, 3), (5, 6), (8, 10), (1490, 1862)])
def test_the_longer_run_has_a_quarter_more_steps_or_one(steps, more):
    found = compare.longer(Side("A", ("--muon_lr", "0.06")), steps)
    assert found == Side("A_longer", ("--muon_lr", "0.06", "--num_iterations", str(more)))


# ---- Whole comparisons


@pytest.fixture
def fork(tmp_path, monkeypatch, capfd) -> SimpleNamespace:
    """Return a project of made-up runs, whose script is at `path`. `write(noise, slope)` makes it
    anew. `compare(b, *flags, a="")` compares its flags a and b; it returns status, lines printed,
    and what is on stderr, that of runs, too. Of these lines, `pace` keeps those on the number of
    runs and on their time. `calls()` returns the runs that were made since it was last asked."""
    monkeypatch.chdir(tmp_path)
    launch = tmp_path / "fork" / "tools" / "launch.py"
    launch.parent.mkdir(parents=True)
    path = tmp_path / "fork" / "made_up.py"
    path.write_text("# Its runs are made up.\n")

    def write(noise: float = 1.0, slope: float = 0.1) -> None:
        launch.write_text(MADE_UP.replace("NOISE", str(noise)).replace("SLOPE", str(slope)))

    def call(b: str, *flags, a: str = "") -> tuple[int, list[str], str]:
        sides = f"{path} {a}", f"fork/made_up.py {b}"
        status, shared = 0, ["--num_iterations", "128", "--run_id", "it"]
        try:
            compare.main(["--compare", *sides, *shared, *map(str, flags)])
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        lines = out.splitlines()
        found.pace[:] = [line for line in lines if line.startswith(("at most", "all "))]
        return status, [line for line in lines if line not in found.pace], err

    def calls() -> list[str]:
        path = Path("calls.txt")
        made = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split("--run_id ")[1].removeprefix("it_") for line in made]

    write()
    found = SimpleNamespace(write=write, compare=call, calls=calls, path=path, pace=[])
    return found


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
    """Return, of the logs, B's loss minus A's, and the logarithm of the times' ratio."""
    pairs = [[last_step(f"{side}_seed{seed}") for side in "AB"] for seed in seeds]
    a, b = np.array(pairs).transpose(1, 2, 0)
    return b[0] - a[0], np.log(b[1] / a[1])


def interval(numbers: np.ndarray) -> tuple[float, float]:
    """Return, by scipy, the mean and half of its 95 % interval."""
    low, high = stats.ttest_1samp(numbers, 0).confidence_interval(0.95)
    return (low + high) / 2, (high - low) / 2


def test_a_comparison_ends_where_the_test_settles_it_and_says_so(fork):
    status, lines, err = fork.compare("--muon_lr 0.06", "--seed", 3)
    assert (status, err) == (0, "")
    said = "logs are logs/it_*.txt, tools/watch.py draws the newest; after a stop, --run_id it"
    assert lines[0] == f"{said} goes on"
    pairs = sum(line.startswith("A seed ") for line in lines)
    seeds, made = range(3, 3 + pairs), fork.calls()
    assert made.pop(2) == "A_longer_seed3" and made == in_turn(seeds)

    losses, times = differences(seeds)
    assert "\nstep:160/160 val_loss" in Path("logs/it_A_longer_seed3.txt").read_text()
    worth = (last_step("A_seed3")[0] - last_step("A_longer_seed3")[0]) / math.log(160 / 128)
    together = times + losses / worth
    needed = compare.thresholds(0.01, 20)[: pairs - 1]
    settled = ps(together[None])[0] < needed
    assert 5 <= pairs < 20 and settled.tolist() == [False] * (pairs - 2) + [True]

    (slower, slower_by), (higher, higher_by) = interval(times), interval(losses)
    more, more_by = interval(together)
    ratio, of_both = math.exp(slower), math.exp(more)
    assert lines[-2] == (
        f"B is {100 * (ratio - 1):.1f} % ± {100 * ratio * slower_by:.1f} % slower than A; "
        f"its loss is {higher:.4f} ± {higher_by:.4f} higher; to A's loss it takes "
        f"{100 * (of_both - 1):.1f} % ± {100 * of_both * more_by:.1f} % more time, and at equal "
        f"time its loss is {worth * more:.4f} ± {worth * more_by:.4f} higher; that is settled "
        f"after {pairs} of at most 20 pairs (p = {ps(together[None])[0, -1]:.2e}, "
        f"below {needed[-1]:.2g} is)"
    )
    assert f"one step more or less of 128 is worth {worth / 128:.2g} of A's loss" in lines
    loss, seconds = last_step("B_seed4")
    assert f"B seed 4: loss {loss:.4f} in {seconds:.1f} s" in lines
    assert sum(" time, and at equal time " in line for line in lines) == pairs - 3
    few = [
        f"{n} of at most 20 pairs: how B compares with A is said from pair 4 on" for n in (1, 2, 3)
    ]
    assert [line for line in lines if " of at most " in line][:3] == few


@pytest.mark.parametrize("judge", ["together", "loss", "time"])
@pytest.mark.parametrize("noise", [1, 0])
def test_what_is_equal_is_run_to_the_end_and_not_settled(judge, noise, fork):
    fork.write(noise)
    status, lines, _ = fork.compare("", "--runs", 4, "--judge", judge)
    longer = ["A_longer_seed0"] * (judge == "together")
    expected = in_turn(range(4))
    assert (status, fork.calls()) == (0, expected[:2] + longer + expected[2:])
    losses, times = differences(range(4))
    numbers = {"loss": losses, "time": times}.get(judge)
    assert ("to A's loss it takes" in lines[-2]) == (judge == "together")
    assert "; that is not settled after 4 of at most 4 pairs (p = " in lines[-2]
    if noise == 0:
        assert "B is 0.0 % ± 0.0 % different than A; its loss is 0.0000 ± 0.0000 diff" in lines[-2]
        assert "p = 1.000," in lines[-2]
    elif numbers is not None:
        assert f"p = {ps(numbers[None])[0, -1]:.3f}," in lines[-2]


def test_a_name_goes_on_with_the_runs_that_are_whole(fork):
    """After a stop before the fifth pair, and where a log has lost its end."""
    _, lines, _ = fork.compare("", "--runs", 5)
    fork.calls()
    log = Path("logs/it_B_seed1.txt")
    whole, metrics, checkpoints = log.read_text(), log.with_suffix(".jsonl"), log.with_suffix("")
    log.write_text(whole[: whole.index("step:128/128")])
    metrics.write_text("of the run that was cut")
    checkpoints.mkdir()
    Path(checkpoints, "state_step000064.pt").write_text("of the run that was cut")
    others = Path("logs/it_A_seed1")
    others.mkdir()
    for side in "AB":
        Path(f"logs/it_{side}_seed4.txt").unlink()
    assert fork.compare("", "--runs", 5) == (0, lines, "")
    assert fork.calls() == ["B_seed1", "A_seed4", "B_seed4"]
    assert log.read_text() == whole and not metrics.exists()
    assert not checkpoints.exists() and others.exists()
    assert fork.compare("", "--runs", 5) == (0, lines, "") and fork.calls() == []


PLAN = {"judge": "together", "alpha": 0.01, "runs": 4, "seed": 0, "deviation": None}


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("runs", "--runs 5"),
        ("alpha", "--runs 4 --alpha 0.02"),
        ("judge", "--runs 4 --judge time"),
        ("seed", "--runs 4 --seed 2"),
        ("A", "--runs 4 --muon_lr 0.05"),
    ],
)
def test_a_plan_may_not_change_once_there_are_runs(key, changed, fork):
    fork.compare("", "--runs", 4)
    fork.calls()
    plan = Path("logs/it.json").read_text()
    known = json.loads(plan)
    side = [str(fork.path), "--num_iterations", "128"]
    gain = last_step("A_seed0")[0] - last_step("A_longer_seed0")[0]
    notes = {
        "worth": pytest.approx(gain / math.log(160 / 128)),
        "run_seconds": known["run_seconds"],
    }
    assert known == PLAN | {"A": side, "B": side} | notes
    status, lines, err = fork.compare("", *changed.split())
    assert (status, lines, fork.calls()) == (1, [], [])
    expected = f"logs/it.json: {key} was {known[key]}: choose another --run_id"
    assert err == f"run.sh: error: {expected}\n" and Path("logs/it.json").read_text() == plan


def test_a_known_deviation_is_of_the_plan_and_gives_the_interval_and_p(fork):
    words = "--runs", 4, "--judge", "loss", "--deviation", 0.0013
    status, lines, err = fork.compare("--muon_lr 0.06", *words)
    assert (status, err) == (0, "")
    losses = [[last_step(f"{side}_seed{seed}")[0] for seed in range(4)] for side in "AB"]
    difference = sum(losses[1]) / 4 - sum(losses[0]) / 4
    sem = 0.0013 * math.sqrt(2 / 4)
    p = math.erfc(abs(difference) / sem / math.sqrt(2))
    assert f"loss is {abs(difference):.4f} ± {1.96 * sem:.4f} " in lines[-2]
    assert f"p = {leaderboard.show_p(p)}," in lines[-2]
    other = *words[:-1], 0.002
    status, _, err = fork.compare("--muon_lr 0.06", *other)
    assert status == 1 and "deviation was 0.0013: choose another --run_id" in err


@pytest.mark.parametrize("flags", ["--deviation 0.001", "--judge loss --deviation 0"])
def test_a_known_deviation_is_one_of_losses(flags, capsys):
    status, err = error_of(["--compare", "", "", *flags.split()], capsys, compare.main)
    assert status == 2 and "--deviation wants a finite number above 0, and --judge loss" in err


def test_the_same_plan_in_other_words_goes_on(fork):
    _, lines, _ = fork.compare("", "--runs", 4)
    fork.calls()
    words = "--runs=4", "--alpha", "1e-2", "--judge", "together"
    assert fork.compare("", *words) == (0, lines, "") and fork.calls() == []


def test_a_fork_may_have_flags_of_its_own(fork):
    status, _, err = fork.compare("--trick 2", "--runs", 4, a="--trick 1")
    assert (status, err) == (0, "")
    assert fork.calls()[:5] == ["A_seed0", "B_seed0", "A_longer_seed0", "B_seed1", "A_seed1"]


def test_runs_of_other_source_or_flags_are_not_taken_for_these(fork):
    fork.compare("", "--runs", 5)
    fork.calls()
    status, _, err = fork.compare("--muon_lr 0.06", "--runs", 5)
    assert (status, fork.calls()) == (1, []) and "logs/it.json: B was [" in err
    for side in "AB":
        Path(f"logs/it_{side}_seed2.txt").unlink()
    fork.path.write_text(f"{fork.path.read_text()}# changed\n")
    status, _, err = fork.compare("", "--runs", 5)
    assert status == 1 and err.count("\n") == 1
    assert "logs/it_A_seed0.txt and logs/it_A_seed2.txt differ in source" in err


NO_WORTH = (
    "run.sh: error: what time is worth cannot be measured here: logs/it_A_longer_*.txt has more "
    "steps, and no lower loss; go on with these runs by --run_id it --judge loss\n"
)


@pytest.mark.parametrize("judge", ["loss", "time"])
@pytest.mark.parametrize("slope", [0, -0.1])
def test_where_time_has_no_worth_the_judge_may_change_once(slope, judge, fork):
    """The runs that were made are used again. Until the judge changes, the error stays."""
    fork.write(0, slope)
    flags = "--runs", 4
    for made in (["A_seed0", "B_seed0", "A_longer_seed0"], []):
        status, lines, err = fork.compare("", *flags)
        assert (status, err, fork.calls()) == (1, NO_WORTH, made)
        assert not any("of at most" in line for line in lines)
    other = 2 if judge == "loss" else 3
    status, _, err = fork.compare("", *flags, "--judge", judge, "--seed", other)
    assert status == 1 and "seed was 0: choose another --run_id" in err  # all else may not
    status, lines, err = fork.compare("", *flags, "--judge", judge)
    assert (status, err, fork.calls()) == (0, "", in_turn(range(4))[2:])
    assert "that is not settled after 4 of at most 4 pairs" in lines[-2]
    plan = json.loads(Path("logs/it.json").read_text())
    assert plan["judge"] == judge and "worth" not in plan
    for again in {"together", "loss", "time"} - {judge}:
        status, _, err = fork.compare("", *flags, "--judge", again)
        assert status == 1 and f"judge was {judge}: choose another --run_id" in err


def test_a_worth_that_was_measured_later_fixes_the_judge(fork):
    """Where the longer run was made again, and is lower."""
    fork.write(0, 0)
    assert fork.compare("", "--runs", 4)[2] == NO_WORTH
    fork.write(0, 0.1)
    Path("logs/it_A_longer_seed0.txt").unlink()
    assert fork.compare("", "--runs", 4)[0] == 0
    for slope in (0.1, 0):  # and even where it is made a third time, and is not lower
        fork.write(0, slope)
        Path("logs/it_A_longer_seed0.txt").unlink()
        fork.compare("", "--runs", 4)
        status, _, err = fork.compare("", "--runs", 4, "--judge", "loss")
        assert status == 1 and "judge was together: choose another --run_id" in err


def test_the_number_of_runs_and_their_time_are_said(fork, monkeypatch):
    """Each run takes 42 s of a clock that is made up; so does one that is made later."""
    clock = [0.0]
    run = Side.run

    def slow(*words):
        clock[0] += 42
        return run(*words)

    monkeypatch.setattr(Side, "run", slow)
    monkeypatch.setattr(compare.time, "monotonic", lambda: clock[0])
    fork.write(0)
    fork.compare("", "--runs", 6)
    first = "at most 6 pairs and a longer run: 13 runs"
    assert fork.pace[0] == first
    assert fork.pace[1] == "all 12 others: about 8 minutes, by the first run"
    assert not any("others" in line for line in fork.pace[2:])
    for side in ("A_seed5", "B_seed5"):
        Path(f"logs/it_{side}.txt").unlink()
    fork.compare("", "--runs", 6)
    assert fork.pace[0] == f"{first}, 2 of them to make, in about 84 seconds"
    fork.compare("", "--runs", 6)
    assert fork.pace == [f"{first}, 0 of them to make"]


def test_without_a_longer_run_there_are_two_runs_a_pair(fork):
    fork.compare("", "--runs", 4, "--judge", "loss")
    assert fork.pace[0] == "at most 4 pairs: 8 runs"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 seconds"),
        (99, "99 seconds"),
        (101, "2 minutes"),
        (2999, "50 minutes"),
        (6001, "1.7 hours"),
        (36000, "10.0 hours"),
    ],
)
def test_times_are_said_in_words(seconds, words):
    assert compare.duration(seconds) == words


@pytest.mark.parametrize(
    ("flags", "of_run", "reason"),
    [
        ("--muon_lr 0.09", "first line\nout of luck\n", "failed (status 1): see above"),
        ("--muon_lr 0.08", "", "is truncated"),
    ],
)
def test_a_run_that_fails_ends_it_with_a_line_that_names_the_run(flags, of_run, reason, fork):
    status, _, err = fork.compare(flags)
    assert status == 1 and err.startswith(f"{of_run}run.sh: error: ")
    last = err.removeprefix(of_run)
    assert last.count("\n") == 1 and "it_B_seed0" in last and reason in last
    assert fork.calls() == ["A_seed0", "B_seed0"]


def test_stderr_of_runs_passes_through(fork):
    status, _, err = fork.compare("--muon_lr 0.13", "--runs", 4)
    assert (status, err) == (0, "".join(f"a warning of it_B_seed{n}\n" for n in range(4)))


@pytest.mark.parametrize("rate", ["0.10", "0.11"])
def test_an_interrupted_run_ends_it_and_is_made_again_later(rate, fork):
    """Of a run that ends with status 130, and of one that ends by SIGINT."""
    status, lines, err = fork.compare(f"--muon_lr {rate}")
    assert (status, err) == (130, "\nrun.sh: interrupted\n")
    assert len(lines) == 2 and lines[1].startswith("A seed 0: loss ")
    assert fork.calls() == ["A_seed0", "B_seed0"]
    assert fork.compare(f"--muon_lr {rate}") == (130, lines, err) and fork.calls() == ["B_seed0"]


def test_an_interrupt_is_left_to_the_run(fork):
    """Which sends it to the comparison here, and ends as if it had not come."""
    status, lines, err = fork.compare("--muon_lr 0.12", "--runs", 4)
    assert (status, err) == (0, "") and "after 4 of at most 4 pairs" in lines[-2]


@pytest.mark.parametrize(
    "words",
    [
        "'' '' --runs 3",
        "'' '' --runs 201",
        "'' '' --runs many",
        "'' '' --alpha 2",
        "'' '' --alpha 0",
        "'' '' --alpha 0.0009",
        "'' '' --alpha 0.51",
        "'' '' --alpha nan",
        "'' '' --seed many",
        "'' '' --judge luck",
        "'' '' --no_such 1",
        "'' '' --resume auto",
        "'' '--no_such 1'",
        "'--seq_len 5' ''",
        "'' '--resume auto'",
        "'' 'no_fork --muon_lr 0.06'",
        "'' 'no_fork.py --muon_lr 0.06'",
        "'' '~/no_fork.py --muon_lr 0.06'",
        "'' 'forks/no_fork.py --muon_lr 0.06'",
        "'' 'forks/train_gpt_2026.py --no_such 1'",
        "'' '' --seed -1",
        "'' '--muon_lr \"0.06'",
        "'--seed 4' ''",
        "'' '--muon_lr 0.06 --seed=4'",
        "'--run_id=name' ''",
        "'' '--run_id name'",
        "''",
    ],
)
def test_bad_flags_start_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Side, "run", lambda *_: pytest.fail("a run was started"))
    Path("no_fork").mkdir()
    with pytest.raises(SystemExit) as stop:
        compare.main(["--compare", *shlex.split(words)])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--muon_lr '0.06", "B is --muon_lr '0.06: No closing quotation"),
        ("--seed 4", "--seed is for A and B: leave it out of '--seed 4'"),
        ("--run_id=x", "--run_id is for A and B: leave it out of '--run_id=x'"),
        ("train_gpt.py --seed 4", "--seed is for A and B: leave it out of 'train_gpt.py --seed 4'"),
    ],
)
def test_what_is_wrong_with_a_side_is_said(text, reason):
    with pytest.raises(compare.UserError) as error:
        Side.of("B", text, [])
    assert str(error.value) == f"--compare: {reason}"


def test_a_side_is_a_script_whose_path_may_begin_with_a_tilde_and_flags_with_quotes(
    fork, monkeypatch
):
    """Without a script, it is the one of both."""
    monkeypatch.setenv("HOME", str(fork.path.parent.parent))
    common = ["--num_iterations", "128"]
    found = Side.of("B", "~/fork/made_up.py --train_files 'a b/*.bin'", common)
    flags = ("--num_iterations", "128", "--train_files", "a b/*.bin")
    assert found == Side("B", flags, fork.path)
    assert Side.of("A", "", []) == Side("A", (), HERE / "train_gpt.py")
    assert Side.of("A", "", [], own=fork.path) == Side("A", (), fork.path)


def test_a_script_is_started_by_its_own_project_if_it_has_one(fork, tmp_path):
    """Also one of its forks; others by this project."""
    project = fork.path.parent
    own = project / "tools" / "launch.py"
    assert Side("A", (), project / "x.py").launcher == own
    assert Side("A", (), project / "forks" / "x.py").launcher == own
    for path in (HERE / "train_gpt.py", HERE / "forks" / "train_gpt_2026.py", tmp_path / "x.py"):
        assert Side("A", (), path).launcher == HERE / "tools" / "launch.py"


@pytest.mark.parametrize("words", ["--help", "-h", "'' '' --help"])
def test_help_is_printed(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        compare.main(["--compare", *shlex.split(words)])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "") and compare.__doc__.strip() in out
    assert all(flag in out for flag in ("--runs", "--judge", "--alpha", "--run_id"))


def test_names_of_two_comparisons_of_a_second_differ():
    names = [compare.parser_of("").parse_args([]).run_id for _ in range(2)]
    form = r"20\d\d-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{6}"
    assert names[0] != names[1] and all(re.fullmatch(form, name) for name in names)
