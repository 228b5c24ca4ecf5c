"""tools/ablate.py: the flags of each technique, the statistics, and tables of made-up runs."""

import math
import random
import re
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

import ablate
import script
import train_gpt
from compare import Side
from techniques import TECHNIQUES, flags_without
from train_gpt import HERE, UserError

FORK = "forks/train_gpt_2026.py"
Frontier = script.load(HERE / FORK)
OF_2026 = [name for name in Frontier.records if name.startswith("2026")]
Newest = script.load(HERE / "forks/train_gpt_2026_07.py")
RECORDS = [(run, name) for run in (Frontier, Newest) for name in run.records if name[:4] == "2026"]
# These had begun with zeros before, or are off at 0.
NOT_DEFAULT = "value tables from small numbers", "mudd by token", "gates and factors by token"


def without(technique, record: str, run=Frontier) -> tuple:
    """Return the settings of a record, and those without a technique."""
    hp = run.records[record]
    flags = ["--record", record, *flags_without(technique, hp)]
    return hp, train_gpt.parse_args(flags, run)[0]


def kind(word: str) -> str:
    """Return the letters at the beginning of a word, such as `targets` or `v`."""
    return re.match("[a-z]*", word)[0]


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_flags_turn_a_technique_off_and_nothing_else(technique):
    """A setting gets the value of 2025-01-26, which is the default. From a table, such as the
    layers, all words of one kind are removed."""
    turned_off = set()
    for run, record in RECORDS:
        hp, off = without(technique, record, run)
        plain = type(hp)()
        assert not flags_without(technique, off)
        changed = {f.name for f in fields(hp) if getattr(hp, f.name) != getattr(off, f.name)}
        turned_off |= changed
        for name in changed:
            old, new = getattr(hp, name), getattr(off, name)
            if technique.name == "stages of the batch":  # the next test is about it
                continue
            if isinstance(old, str) and name not in ("window_rule", "fp8_mlp"):
                words, kept = (re.split("[+,]", rows) for rows in (old, new))
                (removed,) = {kind(word) for word in words if word not in kept}
                assert kept == [word for word in words if kind(word) != removed]
            else:
                assert new == (0 if technique.name in NOT_DEFAULT else getattr(plain, name))
    assert turned_off == technique.off.keys()


@pytest.mark.parametrize("record", OF_2026)
def test_one_stage_has_as_many_tokens_and_the_last_window(record):
    """Its length is rounded to whole sequences."""
    technique = next(t for t in TECHNIQUES if t.name == "stages of the batch")
    hp, off = without(technique, record)
    moments, ours = ([Frontier.moment(s, x) for s in range(hp.num_iterations)] for x in (hp, off))
    lengths = {now.seq_len for now in ours}
    assert abs(lengths.pop() - np.mean([now.seq_len for now in moments])) <= hp.seq_len / 2
    assert not lengths and {now.window for now in ours} == {moments[-1].window}


@pytest.mark.parametrize(("rows", "seeds", "left_out"), [(12, 3, [1, 8]), (2, 4, [])])
def test_intervals_and_verdicts_are_right_as_often_as_they_say(rows, seeds, left_out):
    """Intervals in 95 %. Of techniques that do nothing, 1 % has p < 0.01. Runs have a deviation of
    1 around technique and seed, also those of the record."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 3, rows)
    inside = wrong = 0
    for _ in range(2000):
        records = rng.normal(0, 1, (-(-rows // ablate.BLOCK), seeds))
        nothing = rng.normal(0, 1, (rows, seeds)) - records.repeat(ablate.BLOCK, 0)[:rows]
        nothing[left_out] = math.nan
        means, half, _ = ablate.effects(nothing + true[:, None])
        inside += abs(means[-1] - true[-1]) <= half
        wrong += ablate.effects(nothing)[2][-1] < 0.01
    for count, share in ((inside, 0.95), (wrong, 0.01)):
        assert abs(count / 2000 - share) <= 2.5 * math.sqrt(share * (1 - share) / 2000)


# ---- Whole ablations

NAMED = f"--ablate {FORK} --record {OF_2026[-1]} --run_id it"


@pytest.fixture
def ablation(tmp_path, monkeypatch, capsys):
    """Return ablation(words), whose runs are made up, and fail if (side, seed) is in `fails`. It
    returns status, output, the error and the runs in order, by side and seed."""

    def call(words, changed_seed=-1, fails=()) -> tuple[int, str, str, dict]:
        made = {}

        def run(side: Side, name: str, seed: int, bar) -> SimpleNamespace:
            if (side.name, seed) in fails:
                raise UserError(f"the run of {side.name} failed")
            noise = random.Random(f"{side.name} {seed}")
            steps = 1862 if side.name.endswith("_longer") else 1490
            harm = 0 if side.name.startswith("record") else 0.01 * (len(side.name) - 15)
            loss = 3.3 + harm + noise.gauss(0, 0.002) - 0.2 * math.log(steps / 1490)
            found = SimpleNamespace(loss=loss, steps=steps, seconds=80 + noise.gauss(0, 0.1))
            found.path, found.group = side.log(name, seed), seed == changed_seed
            assert made.setdefault((side.name, seed), found) is found
            return found

        status = 0
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Side, "run", run)
        try:
            ablate.main(words.split())
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out, err, made

    return call


def test_the_table_is_that_of_the_runs(ablation):
    """A technique whose run fails is left out from then on."""
    fails = {("smear", 4), ("paired_heads", 5)}
    status, out, err, made = ablation(f"{NAMED} --seed 4", fails=fails)
    assert (status, err) == (0, "")
    of_first = [side for side, seed in made if seed == 4]
    places = [i for i, side in enumerate(of_first) if re.fullmatch(r"record_\d", side)]
    assert of_first.pop(1) == "record_longer" and places[:3] == [0, 9, 18]  # no smear
    worth = (made["record_0", 4].loss - made["record_longer", 4].loss) / math.log(1862 / 1490)

    known = {re.sub(r"\W+", "_", technique.name): technique.name for technique in TECHNIQUES}
    values = {}
    for (side, seed), run in made.items():
        if re.fullmatch(r"record_\d", side):
            own = run
        elif side in known:
            time = math.log(run.seconds / own.seconds)
            values.setdefault(known[side], {})[seed] = run.loss - own.loss, time
    first, second, third = (text.split("\n\n")[0] for text in out.split("seeds:\n\n")[1:])
    assert "±" not in first and "paired heads" in first and "paired heads" not in second
    shown = [re.split("  +", line) for line in third.splitlines()[1:]]
    assert {name for name, *_ in shown} == values.keys() - {"paired heads"} and len(shown) > 25
    together = []
    for name, loss, time, to_equal_loss, _, verdict, _ in shown:
        change, by = np.mean([values[name][seed] for seed in (4, 5, 6)], axis=0)
        together.append(by + change / worth)
        assert loss.startswith(f"{change:+.4f} ± ")
        assert time.startswith(f"{100 * math.expm1(by):+.1f} % ± ")
        assert to_equal_loss.startswith(f"{100 * math.expm1(together[-1]):+.1f} % ± ")
        size = len(name) - 15
        assert abs(size) < 2 or verdict == ("helps" if size > 0 else "hurts")
    assert together == sorted(together, reverse=True)


def test_an_ablation_continues_only_with_the_same_source(ablation):
    """The verdict is on the number that is judged: without smear, the loss is lower, but times
    differ by chance alone."""
    for words, count, verdict in (
        ("--runs 3 --only VaLue,smear --judge loss", 5, "hurts"),
        ("--runs 4 --only value,smear --judge time", 5, "not significant"),
    ):
        status, out, _, made = ablation(f"{NAMED} {words}")
        assert status == 0 and len({side for side, _ in made if "record" not in side}) == count
        assert ("record_longer", 0) not in made
        assert re.search(f"smear .*  {verdict} ", out.split(" seeds:")[-1])
    status, _, err, _ = ablation(f"{NAMED} --only value --runs 4", changed_seed=2)
    assert status == 1 and "differ in source" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"--ablate {FORK} --only normoun", "has 0 such techniques, two are needed: "),
        ("--ablate", "has 1 such techniques, "),
        (f"--ablate {FORK} --runs 0", "--runs 0: "),
    ],
)
def test_bad_flags_start_nothing(words, reason, ablation):
    status, _, err, made = ablation(words)
    assert (status, made) == (1, {}) and err.count("\n") == 1 and reason in err


OLDER = {technique.name for technique in TECHNIQUES if technique.record < "2026-04"}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("train_gpt.py", {"value embeddings"}),
        (f"{FORK} --record 2025-08", {"attention gate", "whole documents", "value embeddings"}),
        (f"{FORK} --record 2026-03", OLDER - {"wider q, k and v at first"}),
    ],
)
def test_the_list_is_that_of_the_script_s_record(words, names, ablation):
    status, out, _, made = ablation(f"--ablate {words} --list")
    assert (status, made) == (0, {})
    rows = [re.split("  +", line) for line in out.splitlines()[1:]]
    assert {row[0] for row in rows} == names
    path, flags = script.take_script(words.split())
    for *_, off in rows:
        known = train_gpt.parse_args(flags, script.load(path))
        assert train_gpt.parse_args([*flags, *off.split()], script.load(path)) != known
