"""tools/compare.py: its statistics by simulation, and whole comparisons whose runs are made up."""

import math
import random
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import compare
import result
import significance
from logfile import RULE, Run, read_log
from runs import error_of
from train_gpt import HERE

FORK = (HERE / "tests" / "small_fork.py").read_text()


@pytest.mark.parametrize(
    ("alpha", "most", "known"), [(0.05, 5, False), (0.01, 20, False), (0.01, 20, True)]
)
def test_without_a_difference_the_test_errs_as_rarely_as_alpha_says(alpha, most, known):
    numbers = np.random.default_rng(most).standard_normal((4000, most))
    limits = significance.thresholds(alpha, most, known)
    assert limits == pytest.approx(limits[-1] * np.arange(4, most + 1) / most)
    hits = significance.p_values(numbers, known=1.0 if known else None) < limits
    error = math.sqrt(alpha * (1 - alpha) / 4000)
    assert alpha / 2 < hits.any(1).mean() <= alpha + 2 * error
    if (most, known) == (20, False):  # the power for a difference of one deviation, by --help
        hits = significance.p_values(numbers + 1) < limits
        pairs = np.where(hits.any(1), hits.argmax(1) + 4, 20)
        assert hits.any(1).mean() == pytest.approx(0.85, abs=0.02)
        assert pairs.mean() == pytest.approx(14.2, abs=0.3)


def test_each_question_errs_as_rarely_whichever_ends_the_comparison():
    """The loss ends it. The other answers are read then; one is half of the loss."""
    alpha, most, count = 0.05, 12, 4000
    numbers = np.random.default_rng(0).standard_normal((3, count, most))
    numbers[2] += numbers[0]
    limits = significance.thresholds(alpha, most)
    hits = significance.p_values(numbers) < limits  # (questions, comparisons, looks)
    ends = np.where(hits[0].any(1), hits[0].argmax(1), most - 4)
    at_end = hits[:, np.arange(count), ends]
    error = math.sqrt(alpha * (1 - alpha) / count)
    assert alpha / 2 < at_end[0].mean() < alpha + 2 * error
    assert at_end.mean(1).max() < alpha + 2 * error


class Fork:
    """A fork whose runs are made up: with e times the steps, the loss is lower by 0.1."""

    noise = 1.0

    def __init__(self, path: Path, tool):
        self.path, self.tool, self.made = path, tool, []
        path.write_text(FORK)

    def train(self, path, flags, label, group) -> dict:
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        run_id, steps, speed = given["--run_id"], int(given["--num_iterations"]), "--speed"
        self.made.append(run_id.removeprefix("it_"))
        if given.get(speed) == "13":
            return {"exit": 1, "status": "failed", "reason": "first line\nout of luck"}
        if given.get(speed) == "14":
            return {"exit": 130}  # as by Ctrl-C
        chance, changed = random.Random(run_id), given.get("--muon_lr") == "0.06"
        time = 1 + 0.01 * changed + 0.004 * self.noise * chance.gauss(0, 1)
        times = f"train_time:{1e5 * steps / 128 * time:.0f}ms step_avg:1.00ms"
        loss = 3.3 + 0.002 * changed + 0.002 * self.noise * chance.gauss(0, 1)
        loss -= 0.1 * math.log(steps / 128)
        settings = "\n".join(f"{name[2:]}: {value}" for name, value in given.items())
        lines = "record demo\n" + "kernel relu2_mlp is off: edited\n" * changed
        lines += f"step:0/{steps} val_loss:10.82580 train_time:0ms step_avg:0.00ms\n"
        lines += f"step:{steps}/{steps} val_loss:{loss:.5f} {times}\n"
        Path("logs").mkdir(exist_ok=True)
        parts = path.read_text(), "torch 2.13.0", settings, lines
        Path(f"logs/{run_id}.txt").write_text(f"\n{RULE}\n".join(parts))
        return {"exit": 0}

    def compare(self, b: str, *flags) -> tuple[int, str, str]:
        """Compare the fork with its flags b; return status, the last answers and stderr."""
        words = [self.path, "--run_id", "it", "--compare", "", f"its_own.py {b}", *flags]
        if "--seconds" not in flags:
            words += ["--num_iterations", 128]
        status, out, err = self.tool(compare.main, words)
        return status, f"\n{out}".split("\nafter ")[-1].rstrip(), err

    def calls(self) -> list[str]:
        """Return the runs since the last call."""
        made, self.made = self.made, []
        return made


@pytest.fixture
def fork(tmp_path, monkeypatch, tool) -> Fork:
    fork = Fork(tmp_path / "its_own.py", tool)
    monkeypatch.setattr(compare.launch, "train", fork.train)
    return fork


def in_turn(seeds: range) -> list[str]:
    """Return the names of runs in turn: A B, B A, A B, ..."""
    sides = ("ABBA" * len(seeds))[: 2 * len(seeds)]
    return [f"{side}_seed{seeds[i // 2]}" for i, side in enumerate(sides)]


def run_of(side: str, seed: int) -> Run:
    return read_log(Path(f"logs/it_{side}_seed{seed}.txt"))


def differences(seeds: range) -> tuple[np.ndarray, np.ndarray]:
    """Return, from the logs, B's loss minus A's, and the logarithm of the times' ratio."""
    pairs = [(run_of("A", seed), run_of("B", seed)) for seed in seeds]
    times = np.log([b.seconds / a.seconds for a, b in pairs])
    return np.array([b.loss - a.loss for a, b in pairs]), times


@pytest.mark.parametrize("judge", ["loss", "time", "sooner"])
def test_a_comparison_ends_when_its_judge_has_an_answer(judge, fork):
    status, answers, err = fork.compare("--muon_lr 0.06", "--seed", 3, "--judge", judge)
    assert (status, err) == (0, "")
    made = fork.calls()
    pairs = len(made) // 2
    seeds = range(3, 3 + pairs)
    assert made.pop(2) == "A_longer_seed3" and made == in_turn(seeds)

    losses, times = differences(seeds)
    assert run_of("A_longer", 3).steps == 160
    worth = (run_of("A", 3).loss - run_of("A_longer", 3).loss) / math.log(160 / 128)
    numbers = {"loss": losses, "time": times, "sooner": times + losses / worth}
    limits = significance.thresholds(0.01, 20)[: pairs - 3]
    ps = [stats.ttest_1samp(numbers[judge][:n], 0).pvalue for n in range(4, pairs + 1)]
    assert [*(ps < limits)] == [False] * (pairs - 4) + [True]

    (line,) = [line for line in result.noted() if line["kind"] == "comparison"]
    for question, values in numbers.items():
        low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        mean, half = (low + high) / 2, (high - low) / 2
        if question != "loss":
            mean, half = 100 * math.expm1(mean), 100 * math.exp(mean) * half
        found, p = line[question], stats.ttest_1samp(values, 0).pvalue
        assert [found["mean"], found["half"], found["p"]] == pytest.approx([mean, half, p])
        word = "higher" if question == "loss" else "longer"
        assert found["answer"] == (word if p < limits[-1] else "open")
    sentence = answers.rsplit("\n  ", 1)[1]
    answer = {"loss": "B's loss is higher", "time": "a step of B is slower"}
    assert answer.get(judge, "B reaches A's loss later") in sentence
    assert sentence.endswith("; B ran without the kernel relu2_mlp (edited)")
    assert (line["verdict"], line["pairs"], line["judge"]) == (sentence, pairs, judge)


def test_each_look_has_its_own_limit(fork, monkeypatch):
    """Of made-up limits, only the second can be met: after five pairs."""
    limits = np.array([0.0, 1.0] + [0.0] * 15)
    monkeypatch.setattr(significance, "thresholds", lambda *_: limits)
    assert fork.compare("--muon_lr 0.06", "--seed", 3)[0] == 0
    made = fork.calls()
    assert made.pop(2) == "A_longer_seed3" and made == in_turn(range(3, 8))


def test_a_change_that_does_nothing_ends_the_comparison_and_is_named(fork):
    fork.noise = 0.0
    status, answers, _ = fork.compare("")
    expected = in_turn(range(4))
    assert (status, fork.calls()) == (0, expected[:2] + ["A_longer_seed0"] + expected[2:])
    assert "the change does nothing to the loss, which is equal in all pairs; a step" in answers
    assert "loss: B's is 0.0000 ± 0.0000 different" in answers


def test_what_has_ended_is_read_again_by_its_own_plan(fork):
    _, answers, _ = fork.compare("", "--runs", 5)
    fork.calls()
    assert fork.compare("", "--runs", 5)[1] == answers
    for flag in ("--runs", 7), ("--judge", "time"):
        status, _, err = fork.compare("", "--runs", 5, *flag)
        assert status == 1 and "choose another --run_id" in err
    assert fork.calls() == []


def test_a_known_deviation_gives_the_interval_and_the_test_of_the_loss(fork):
    """The time is that of a step, of which B makes more."""
    fork.noise = 9.0
    flags = "--runs", 4, "--judge", "loss", "--deviation", 0.0013
    status, verdict, err = fork.compare("--muon_lr 0.06 --num_iterations 132", *flags)
    assert (status, err) == (0, "") and len(fork.calls()) == 9
    losses, times = differences(range(4))
    percent = 100 * math.expm1(times.mean() - math.log(132 / 128))
    assert result.noted()[-1]["time"]["mean"] == pytest.approx(percent)
    assert "the times are too noisy to tell" in verdict
    sem = 0.0013 * math.sqrt(2 / 4)
    p = math.erfc(abs(losses.mean()) / sem / math.sqrt(2))
    assert f"loss: B's is {abs(losses.mean()):.4f} ± {1.96 * sem:.4f} " in verdict
    assert float(re.search("p = (.*)", verdict)[1]) == pytest.approx(p, rel=0.01)


def test_a_comparison_continues_with_the_finished_runs(fork):
    """After a stop before the fifth pair, and if the end of a log is missing, which is resumed."""
    _, verdict, _ = fork.compare("", "--runs", 5)
    fork.calls()
    log = Path("logs/it_B_seed1.txt")
    text = log.read_text()
    log.write_text(text[: text.index("step:128/128")])
    for side in "AB":
        Path(f"logs/it_{side}_seed4.txt").unlink()
    for made in (["B_seed1", "A_seed4", "B_seed4"], []):
        assert fork.compare("", "--runs", 5)[:2] == (0, verdict) and fork.calls() == made
    assert log.read_text().replace("resume: on\n", "") == text and "resume: on" in log.read_text()


def test_plan_and_source_may_not_change(fork):
    b = "--speed 13"
    assert fork.compare(b, "--runs", 4)[0] == 1
    status, _, err = fork.compare(b, "--runs", 5)
    assert status == 1 and "runs was 4: choose another --run_id\n" in err
    assert fork.compare("--muon_lr 0.06", "--runs", 4)[0] == 1
    assert len(fork.calls()) == 2
    fork.compare("", "--runs", 4, "--run_id", "next")
    Path("logs/next_B_seed2.txt").unlink()
    fork.path.write_text(f"{FORK}# changed\n")
    status, _, err = fork.compare("", "--runs", 4, "--run_id", "next")
    assert status == 1 and "logs/next_B_seed0.txt and logs/next_B_seed2.txt differ in source" in err


@pytest.mark.parametrize(
    ("b", "status", "message"),
    [
        ("--speed 13", 1, "the run it_B_seed0 failed: first line out of luck"),
        ("--speed 14", 130, ""),
    ],
)
def test_a_comparison_ends_with_a_run_that_fails_or_is_stopped(b, status, message, fork):
    found, _, err = fork.compare(b)
    assert found == status and message in err and fork.calls()[:2] == ["A_seed0", "B_seed0"]


@pytest.mark.parametrize(
    "words",
    ["'' '' --runs 3", "'--seq_len 5' ''", "'--seed=4' ''", "''", "'' '' --alpha 0"]
    + ["'' '' --deviation 0.1 --judge time"],
)
def test_bad_flags_start_nothing(words, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(compare.Side, "run", lambda *_: pytest.fail("a run was started"))
    assert error_of(["--compare", *shlex.split(words)], capsys, compare.main)[0] == 1
    assert not Path("logs").exists()


def test_both_sides_make_the_steps_that_take_a_that_long(fork, monkeypatch):
    """A step of A takes 50 ms. It is timed once, also if the comparison goes on. The longer run
    makes a step more at least."""
    times = iter([50.0])
    monkeypatch.setattr(compare.launch, "ms_per_step", lambda *_: next(times))
    assert fork.compare("--num_iterations 3", "--seconds", 0.06)[0] == 1
    assert fork.compare("", "--seconds", 0.06, "--runs", 4)[::2] == (0, "")
    assert result.noted()[-1]["seconds"] == 0.06
    assert [run_of(side, 0).steps for side in ("A", "B", "A_longer")] == [1, 1, 2]
    Path("logs/it_B_seed3.txt").unlink()
    assert fork.compare("", "--seconds", 0.06, "--runs", 4)[0] == 0
    assert run_of("B", 3).steps == 1


def test_a_torn_plan_is_named_and_its_runs_are_read(fork):
    _, answers, _ = fork.compare("", "--runs", 4)
    fork.calls()
    file = Path("logs/it.json")
    for torn in ('{"judge": "lo', "5"):
        file.write_text(torn)
        status, _, err = fork.compare("", "--runs", 4)
        assert status == 1 and "logs/it.json is not a whole plan of a comparison: remove it" in err
    file.unlink()
    assert fork.compare("", "--runs", 4)[1] == answers and fork.calls() == []
