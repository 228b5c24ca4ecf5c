"""tools/compare.py: its statistics by simulation, and whole comparisons whose runs are made up."""

import fcntl
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import compare
from train_gpt import HERE

FORK = (HERE / "tests" / "small_fork.py").read_text()
MADE_UP = """# In place of launch.py: with e times the steps the loss is lower by SLOPE.
import math, random, sys
from pathlib import Path

with open("calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
source = Path(sys.argv[1]).read_text()
flags = {name[2:]: value for name, value in zip(sys.argv[2::2], sys.argv[3::2])}
run_id, steps, speed = flags["run_id"], int(flags["num_iterations"]), flags.get("speed")
noise, changed = random.Random(run_id), flags.get("muon_lr") == "0.06"
if speed == "13":
    sys.exit("first line\\nout of luck")
if speed == "14":
    sys.exit(130)
ms = 1e5 * steps / 128 * (1 + 0.01 * changed + 0.004 * NOISE * noise.gauss(0, 1))
loss = 3.3 + 0.002 * changed - SLOPE * math.log(steps / 128) + 0.002 * NOISE * noise.gauss(0, 1)
settings = "\\n".join(f"{k}: {v}" for k, v in flags.items())
lines = f"record demo\\nstep:0/{steps} val_loss:10.82580 train_time:0ms step_avg:0.00ms\\n"
lines += f"step:{steps}/{steps} val_loss:{loss:.5f} train_time:{ms:.0f}ms step_avg:1.00ms\\n"
Path("logs").mkdir(exist_ok=True)
parts = source, "torch 2.13.0", settings, lines
Path("logs", run_id + ".txt").write_text(("\\n" + 100 * "=" + "\\n").join(parts))
"""
FAILS, IS_INTERRUPTED = "--speed 13", "--speed 14"


@pytest.mark.parametrize(
    ("alpha", "most", "known"), [(0.05, 5, False), (0.01, 20, False), (0.01, 20, True)]
)
def test_without_a_difference_the_test_errs_as_rarely_as_alpha_says(alpha, most, known):
    numbers = np.random.default_rng(most).standard_normal((4000, most))
    limits = compare.thresholds(alpha, most, known)
    assert limits == pytest.approx(limits[-1] * np.arange(4, most + 1) / most)
    hits = compare.p_values(numbers, known=1.0 if known else None) < limits
    error = math.sqrt(alpha * (1 - alpha) / 4000)
    assert alpha / 2 < hits.any(1).mean() <= alpha + 2 * error
    if (most, known) == (20, False):  # the power for a difference of one deviation, by --help
        hits = compare.p_values(numbers + 1) < limits
        pairs = np.where(hits.any(1), hits.argmax(1) + 4, 20)
        assert hits.any(1).mean() == pytest.approx(0.85, abs=0.02)
        assert pairs.mean() == pytest.approx(14.2, abs=0.3)


# ---- Whole comparisons


@pytest.fixture
def fork(tmp_path, monkeypatch, capfd) -> SimpleNamespace:
    """Return a fork at `path` whose runs are made up by `write`.

    `compare(b, *flags)` compares the fork with its flags b; it returns status, the last verdict
    and stderr. `calls()` returns the runs since its last call.
    """
    monkeypatch.chdir(tmp_path)
    path, launch = tmp_path / "its_own.py", tmp_path / "launch.py"
    path.write_text(FORK)

    def train(path, flags, quiet) -> int:
        command = [sys.executable, launch, path, *flags]
        return subprocess.run(command, stdout=subprocess.DEVNULL).returncode

    monkeypatch.setattr(compare.launch, "train", train)

    def write(noise: float = 1.0, slope: float = 0.1) -> None:
        launch.write_text(MADE_UP.replace("NOISE", str(noise)).replace("SLOPE", str(slope)))

    def call(b: str, *flags) -> tuple[int, str, str]:
        words, status = [path, "--run_id", "it", "--compare", "", f"its_own.py {b}", *flags], 0
        if not {"--seconds", "--num_iterations"} & set(flags):
            words += ["--num_iterations", 128]
        try:
            compare.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        return status, "".join(re.findall("^B is .*", out, re.M)[-1:]), err

    def calls() -> list[str]:
        calls = Path("calls.txt")
        made = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return [line.split("--run_id ")[1].removeprefix("it_").split()[0] for line in made]

    write()
    return SimpleNamespace(write=write, compare=call, calls=calls, path=path)


def in_turn(seeds: range) -> list[str]:
    """Return the names of runs in turn: A B, B A, A B, ..."""
    sides = ("ABBA" * len(seeds))[: 2 * len(seeds)]
    return [f"{side}_seed{seeds[i // 2]}" for i, side in enumerate(sides)]


def last_step(side: str, seed: int) -> tuple[float, float]:
    """Return loss and milliseconds of a log."""
    text = Path(f"logs/it_{side}_seed{seed}.txt").read_text()
    loss, ms = re.findall(r"val_loss:(\S+) train_time:(\d+)ms", text)[-1]
    return float(loss), int(ms)


def differences(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Return, from the logs, B's loss minus A's, and the logarithm of the times' ratio."""
    a, b = (np.array([last_step(side, seed) for seed in seeds]).T for side in "AB")
    return b[0] - a[0], np.log(b[1] / a[1])


def test_a_comparison_ends_when_the_difference_is_significant(fork):
    status, verdict, err = fork.compare("--muon_lr 0.06", "--seed", 3)
    assert (status, err) == (0, "")
    made = fork.calls()
    pairs = len(made) // 2
    seeds = range(3, 3 + pairs)
    assert made.pop(2) == "A_longer_seed3" and made == in_turn(seeds)

    losses, times = differences(seeds)
    assert "\nstep:160/160 val_loss" in Path("logs/it_A_longer_seed3.txt").read_text()
    worth = (last_step("A", 3)[0] - last_step("A_longer", 3)[0]) / math.log(160 / 128)
    together = times + losses / worth
    limits = compare.thresholds(0.01, 20)[: pairs - 3]
    ps = [stats.ttest_1samp(together[:n], 0).pvalue for n in range(4, pairs + 1)]
    assert 5 <= pairs < 20 and [*(ps < limits)] == [False] * (pairs - 4) + [True]

    for word in ("slower than A", "higher; to A's loss", "more time", "difference is significant"):
        assert word in verdict
    numbers = []
    for values, form in ((times, "%"), (losses, ""), (together, "%"), (worth * together, "")):
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        mean, half = (low + high) / 2, (high - low) / 2
        if form:
            numbers += [f"{100 * math.expm1(mean):.1f}", f"{100 * math.exp(mean) * half:.1f}"]
        else:
            numbers += [f"{mean:.4f}", f"{half:.4f}"]
    numbers += [f"{pairs}", "20", f"{ps[-1]:.2e}", f"{limits[-1]:.2g}"]
    assert re.findall(r"\d[-.\de]*", verdict) == numbers


def test_what_is_equal_is_run_to_the_end_and_not_significant(fork):
    fork.write(noise=0)
    status, verdict, _ = fork.compare("", "--runs", 4)
    expected = in_turn(range(4))
    assert (status, fork.calls()) == (0, expected[:2] + ["A_longer_seed0"] + expected[2:])
    assert "not significant after 4 of at most 4 pairs (p = 1.000," in verdict


def test_a_known_deviation_gives_the_interval_and_the_test_of_the_loss(fork):
    flags = "--runs", 4, "--judge", "loss", "--deviation", 0.0013
    status, verdict, err = fork.compare("--muon_lr 0.06", *flags)
    assert (status, err) == (0, "") and fork.calls() == in_turn(range(4))
    losses, _ = differences(range(4))
    sem = 0.0013 * math.sqrt(2 / 4)
    p = math.erfc(abs(losses.mean()) / sem / math.sqrt(2))
    assert f"loss is {abs(losses.mean()):.4f} ± {1.96 * sem:.4f} " in verdict
    assert float(re.search("p = (.*?),", verdict)[1]) == pytest.approx(p, rel=0.01)


def test_a_comparison_continues_with_the_finished_runs(fork):
    """After a stop before the fifth pair, and if the end of a log is missing. While a process
    writes that log, it is not touched."""
    _, verdict, _ = fork.compare("", "--runs", 5)
    fork.calls()
    log = Path("logs/it_B_seed1.txt")
    text = log.read_text()
    log.write_text(text[: text.index("step:128/128")])
    for side in "AB":
        Path(f"logs/it_{side}_seed4.txt").unlink()
    with log.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, _, err = fork.compare("", "--runs", 5)
        assert status == 1 and f"another process is writing {log}" in err and fork.calls() == []
    for made in (["B_seed1", "A_seed4", "B_seed4"], []):
        assert fork.compare("", "--runs", 5)[:2] == (0, verdict) and fork.calls() == made
    assert log.read_text() == text


def test_plan_and_source_may_not_change(fork):
    fork.compare("", "--runs", 4)
    fork.calls()
    plan = json.loads(Path("logs/it.json").read_text())
    for key, b, flags in (("runs", "", "--runs 5"), ("B", "--muon_lr 0.06", "--runs 4")):
        status, _, err = fork.compare(b, *flags.split())
        assert status == 1 and f"{key} was {plan[key]}: choose another --run_id\n" in err
    assert fork.calls() == [] and json.loads(Path("logs/it.json").read_text()) == plan
    Path("logs/it_B_seed2.txt").unlink()
    fork.path.write_text(f"{FORK}# changed\n")
    status, _, err = fork.compare("", "--runs", 4)
    assert status == 1 and "logs/it_B_seed0.txt and logs/it_B_seed2.txt differ in source" in err


@pytest.mark.parametrize(
    ("b", "slope", "status", "message"),
    [
        (FAILS, 0.1, 1, "it_B_seed0 failed (status 1)"),
        (IS_INTERRUPTED, 0.1, 130, ""),
        ("", -0.1, 1, "worth of time cannot be measured"),
    ],
)
def test_a_comparison_ends_with_a_run_that_fails_or_is_stopped_or_has_no_worth(
    b, slope, status, message, fork
):
    fork.write(slope=slope)
    found, _, err = fork.compare(b)
    assert found == status and message in err and fork.calls()[:2] == ["A_seed0", "B_seed0"]


@pytest.mark.parametrize("words", ["'' '' --runs 3", "'--seq_len 5' ''", "'--seed 4' ''", "''"])
def test_bad_flags_start_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare.Side, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(SystemExit) as stop:
        compare.main(["--compare", *shlex.split(words)])
    assert stop.value.code == 1 and capsys.readouterr().err.count("\n") == 1
    assert not Path("logs").exists()


# ---- Equal time, kept baselines, lost kernels


def timed(monkeypatch, of_a: list[float], of_b: list[float]) -> list:
    """Let these be the measured times of a step; return a list of the sides that were timed."""
    times, calls = {"A": iter(of_a), "B": iter(of_b)}, []

    def ms_per_step(path: Path, flags: list[str], budget: float) -> float:
        calls.append("B" if "--adam_eps" in flags else "A")
        return next(times[calls[-1]])

    monkeypatch.setattr(compare.seconds, "ms_per_step", ms_per_step)
    return calls


def steps_made() -> list[str]:
    """Return the last steps in the logs of A's and B's first run."""
    texts = [Path(f"logs/it_{side}_seed0.txt").read_text() for side in "AB"]
    return [re.findall(r"step:(\d+)/", text)[-1] for text in texts]


@pytest.mark.parametrize(
    ("of_a", "of_b", "steps"),
    [
        ([50, 51, 49, 50, 50, 50], [45, 45, 45, 45, 45, 45], ["400", "444"]),
        ([50, 51, 49, 50, 50, 50], [65, 66, 65, 64, 65, 65], ["400", "308"]),
        ([50, 50, 50, 50, 50, 50], [49, 51, 50, 50, 51, 50], ["399", "399"]),  # the mean is 50.1
        ([50, 58, 49, 50, 46, 46], [45, 45, 45, 55, 45, 44], ["417", "417"]),  # t is 1.5
    ],
)
def test_sides_have_unequal_numbers_of_steps_only_if_their_times_differ(
    of_a, of_b, steps, fork, monkeypatch
):
    calls = timed(monkeypatch, of_a, of_b)
    for _ in range(2):  # a comparison that continues has the same numbers
        status, _, err = fork.compare("--adam_eps 1e-9", "--seconds", 20, "--runs", 4)
        assert (status, err) == (0, "") and steps_made() == steps
        assert "".join(calls) == "ABBAABBAABBA"
    assert json.loads(Path("logs/it.json").read_text())["steps"] == [int(n) for n in steps]


def test_a_kept_baseline_is_compared_without_its_runs(fork, monkeypatch):
    monkeypatch.setattr(compare.torch, "__version__", "2.13.0")  # as in the made-up logs
    fork.compare("", "--runs", 6, "--judge", "loss")
    fork.calls()
    flags = "--judge", "loss", "--baseline", "it", "--run_id", "next"
    assert fork.compare("--muon_lr 0.06", *flags, "--runs", 3)[0] == 1  # fewer than four
    status, verdict, err = fork.compare("--muon_lr 0.06", *flags)
    assert (status, err) == (0, "") and set(fork.calls()) <= {f"next_B_seed{i}" for i in range(6)}
    assert "of at most 6 pairs" in verdict and "are those of it, so A and B were not" in verdict
    monkeypatch.setattr(compare.torch, "__version__", "2.99")
    fork.path.write_text(f"{FORK}# changed\n")
    status, _, err = fork.compare("--muon_lr 0.06", *flags, "--num_iterations", 64)
    changed = "--num_iterations, its_own.py, torch (it was 2.13.0); compare without --baseline"
    assert status == 1 and f"since logs/it_A_seed0.txt, these have changed: {changed}" in err
    assert fork.calls() == []


def test_kernels_that_a_run_lost_are_named_with_the_reason():
    a, b = (SimpleNamespace(kernels_off=off) for off in ({"x": "old"}, {"x": "old", "y": "new"}))
    text = "A ran without the kernel x (old); B ran without the kernel x (old); "
    assert compare.losses_of_kernels(a, b) == f"{text}B ran without the kernel y (new); "
