"""tools/ablate.py: the flags of each technique, the statistics, and tables of made-up runs."""

import math
import random
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import ablate
import numpy as np
import pytest
import script
import techniques
from ablate import Effects
from compare import Side
from scipy import stats
from techniques import TECHNIQUES

import train_gpt
from train_gpt import HERE, UserError

FORK = "forks/train_gpt_2026.py"
Frontier = script.load(HERE / FORK)
frontier = sys.modules[Frontier.__module__]
RECORDS = Frontier.records
OF_2026 = [name for name in RECORDS if name.startswith("2026")]
NEWEST = OF_2026[-1]
REMOVED = {  # the words that are removed from the rows of a setting which is a table
    "whole documents": "cap=.*",
    "backout": "backout",
    "skip connection": r"x\d",
    "late attention reads earlier": r"in\d",
    "value embeddings": r"v\d",
    "several targets a token": "targets=.*",
    "cautious decay of Adam's": "decay=.*",
    "betas by group": "beta[12]=.*",
    "shorter documents, higher last rate": "cap=.*",
}


@pytest.fixture(autouse=True)
def interrupts():
    """Restore Python's handler of interrupts, which an ablation replaces."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def flags_without(technique, hp) -> list[str]:
    """Return the flags that turn a technique off."""
    return techniques.flags_without(technique, hp, Frontier)


def settings_of(words: list[str]):
    """Return the frontier's settings by flags."""
    return train_gpt.parse_args(words, Frontier)[0]


# ---- Techniques


ALONE = [technique for technique in TECHNIQUES if technique.off]  # may be turned off alone


@pytest.mark.parametrize("technique", ALONE, ids=lambda technique: technique.name)
def test_flags_turn_a_technique_off_and_nothing_else(technique):
    """What they change gets the value of 2025-01-26, which is the default."""
    plain = frontier.Hyperparameters()
    turned_off = {"run_id"}
    for record in OF_2026:
        hp = RECORDS[record]
        flags = flags_without(technique, hp)
        if not flags:
            continue
        off = settings_of(["--record", record, *flags])
        assert not flags_without(technique, off)
        changed = {f.name for f in fields(hp) if getattr(hp, f.name) != getattr(off, f.name)}
        turned_off |= changed
        for name in changed - {"stages" if technique.name == "stages of the batch" else ""}:
            value = getattr(off, name)
            if name in ("layers", "stages", "adam_groups"):
                words = re.split("[+,]", getattr(hp, name))
                kept = [w for w in words if not re.fullmatch(REMOVED[technique.name], w)]
                assert re.split("[+,]", value) == kept and len(kept) < len(words)
                assert value.count(",") == getattr(hp, name).count(",")
            else:  # value tables began with zeros before they began with small numbers
                before = {"value tables from small numbers": 0}
                assert value == before.get(technique.name, getattr(plain, name))
    assert turned_off == technique.off.keys() | {"run_id"}


@pytest.mark.parametrize("record", OF_2026)
def test_one_stage_has_as_many_tokens_and_the_last_window(record):
    """Its length is rounded to whole sequences."""
    flags = ["--record", record]
    hp = settings_of(flags)
    technique = next(t for t in TECHNIQUES if t.name == "stages of the batch")
    off = settings_of([*flags, *flags_without(technique, hp)])
    assert len(frontier.stage_table(off.stages)) == 1

    def of_steps(settings, name: str) -> list:
        return [getattr(Frontier.moment(s, settings), name) for s in range(hp.num_iterations)]

    lengths = of_steps(off, "seq_len")
    assert len(set(lengths)) == 1
    assert abs(lengths[0] - np.mean(of_steps(hp, "seq_len"))) <= hp.seq_len / 2
    assert set(of_steps(off, "window")) == {of_steps(hp, "window")[-1]}


# ---- Statistics: runs have a deviation of 1 around technique and seed


def tables(count: int, rows: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return made-up differences to the record, (count, rows, seeds), with a row for each technique
    and a run of the record for each block and seed; and the true difference of each row."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 3, rows)
    runs = rng.normal(0, 1, (count, rows, seeds)) + true[:, None]
    records = rng.normal(0, 1, (count, -(-rows // ablate.BLOCK), seeds))
    return runs - records.repeat(ablate.BLOCK, 1)[:, :rows], true


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out"),
    [(12, 3, [8, 9, 10]), (33, 3, [*range(8), 12, 32])],  # one of a block is left; none
)
def test_the_deviation_is_that_of_a_least_squares_fit(rows, seeds, left_out):
    """With a variable for each technique, and one for each run of the record."""
    values = tables(1, rows, seeds)[0][0]
    values[left_out, : seeds - 1] = math.nan
    blocks = np.eye(-(-rows // ablate.BLOCK)).repeat(ablate.BLOCK, 0)[:rows]
    of_techniques = np.kron(np.eye(rows), np.ones((seeds, 1)))
    design = np.hstack([of_techniques, np.kron(blocks, np.eye(seeds))])
    whole = np.delete(values, left_out, 0).ravel()
    design = np.delete(design.reshape(rows, seeds, -1), left_out, 0).reshape(whole.size, -1)
    fit, _, rank, _ = np.linalg.lstsq(design, whole, rcond=None)
    free = whole.size - rank
    expected = math.sqrt(((whole - design @ fit) ** 2).sum() / free)
    assert ablate.pooled(values) == (pytest.approx(expected), free)


@pytest.mark.parametrize(("rows", "seeds", "free"), [(1, 3, 2), (1, 4, 3), (4, 2, 3)])
def test_a_verdict_needs_three_degrees_of_freedom(rows, seeds, free):
    values = tables(1, rows, seeds)[0][0] + 1e6
    found = Effects.of(values, values, 1.0)
    assert found.free == free and (free < 3) == (seeds < ablate.fewest_seeds(rows))
    for judge in ("loss", "time", "together"):
        verdict, p = found.verdict(0, judge)
        assert (verdict == "-") == math.isnan(p) == math.isnan(found.half(judge)) == (free < 3)
        assert free < 3 or verdict == "helps"


@pytest.mark.parametrize(("rows", "seeds", "left_out"), [(12, 3, [1, 8]), (1, 4, [])])
def test_intervals_and_verdicts_are_right_as_often_as_they_say(rows, seeds, left_out):
    """Intervals in 95 %. A technique that does nothing gets a verdict in 1 %."""
    losses, true = tables(2000, rows, seeds)
    losses[:, left_out] = math.nan
    inside = wrong = 0
    for values in losses:
        found = Effects.of(values, np.zeros_like(values), 0.5)
        inside += abs(found.together[-1] - true[-1] / 0.5) <= found.half("together")
        nothing = Effects.of(values - true[:, None], np.zeros_like(values), 0.5)
        wrong += nothing.verdict(0, "together")[0] != "not significant"
    for count, share in ((inside, 0.95), (wrong, 0.01)):
        assert abs(count / 2000 - share) <= 2.5 * math.sqrt(share * (1 - share) / 2000)


def test_the_verdict_is_on_the_number_that_is_judged():
    rng = np.random.default_rng(5)
    losses, times = rng.normal(0, 0.001, (8, 3)), rng.normal(0, 0.1, (8, 3))
    losses[1] += 0.02  # much, but a tenth of the noise in the times
    times[2] -= 2
    found = Effects.of(losses, times, worth=1.0)
    for judge, *verdicts in (
        ("loss", "helps", "not significant"),
        ("time", "not significant", "hurts"),
        ("together", "not significant", "hurts"),
    ):
        assert [found.verdict(i, judge)[0] for i in (1, 2)] == verdicts


# ---- The table

SPECIAL = {"record": (1490, 0.0), "record_longer": (1862, -0.05)}  # steps, harm to the loss
NAMED = f"--ablate {FORK} --record {NEWEST} --run_id it"


@pytest.fixture
def ablation(tmp_path, monkeypatch, capsys):
    """Return ablation(words), whose runs are made up, and fail if (side, seed) is in `fails`. It
    returns status, lines, the error and the runs in order, by name, side and seed."""

    def call(words, changed_seed=-1, fails=()) -> tuple[int, list[str], str, dict]:
        made = {}

        def run(side: Side, name: str, seed: int) -> SimpleNamespace:
            if (side.name, seed) in fails:
                raise UserError(f"the run {name}_{side.name}_seed{seed} failed")
            noise = random.Random(f"{name} {side.name} {seed}")
            steps, harm = SPECIAL.get(side.name, (1490, 0.01 * (len(side.name) - 15)))
            found = SimpleNamespace(loss=3.3 + harm + noise.gauss(0, 0.002), steps=steps)
            found.seconds = 80 + noise.gauss(0, 0.1)
            found.group, found.path = seed == changed_seed, Path(f"{side.name}_{seed}.txt")
            assert made.setdefault((name, side.name, seed), found) is found
            return found

        status = 0
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Side, "run", run)
        try:
            ablate.main(words.split())
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err, made

    return call


def by_hand(made: dict, seeds: range) -> tuple[dict[str, np.ndarray], float]:
    """Return, for each technique's side, differences (seeds, 3) of the losses, the log times, and
    the log times to equal loss; nan if a run failed. Return the worth of time, too."""
    worths = [made["it_0", "record", s].loss - made["it", "record_longer", s].loss for s in seeds]
    worth, own, values = np.mean(worths) / math.log(1862 / 1490), None, {}
    for (_, side, seed), run in made.items():
        if side == "record":
            own = run  # the last one before
        elif side != "record_longer" and seed in seeds:
            loss, time = run.loss - own.loss, math.log(run.seconds / own.seconds)
            rows = values.setdefault(side, np.full((len(seeds), 3), math.nan))
            rows[seed - seeds[0]] = loss, time, time + loss / worth
    return values, worth


HAVING = {  # techniques of the newest record, by side
    re.sub(r"\W+", "_", t.name): t for t in TECHNIQUES if flags_without(t, RECORDS[NEWEST])
}


def check_table(lines: list[str], made: dict, seeds: range, count: int) -> None:
    """Compare the table after the first seeds with one by hand, without what failed until then."""
    values, worth = by_hand(made, seeds[:count])
    table = np.array([values.get(s, np.full((count, 3), math.nan)) for s in HAVING])
    halves = []
    for of in range(3):
        deviation, free = ablate.pooled(table[..., of])
        halves.append(stats.t.isf(0.025, free) * deviation * math.sqrt(2 / count))
    effects = {s: v.mean(0) for s, v in values.items() if not np.isnan(v).any()}
    order = sorted(effects, key=lambda side: -effects[side][2])

    start = lines.index(f"after {count} of {len(seeds)} seeds:") + 2
    end = lines.index("", start)
    rows = [re.split(r"  +", line) for line in lines[start + 1 : end]]
    for side, (name, *cells, p, verdict, gain) in zip(order, rows, strict=True):
        mean = effects[side]
        assert name == HAVING[side].name
        ratios = zip(np.exp(mean[1:]), halves[1:], strict=True)
        percents = [f"{100 * (x - 1):+.1f} % ± {100 * x * half:.1f}" for x, half in ratios]
        assert cells == [f"{mean[0]:+.4f} ± {halves[0]:.4f}", *percents]
        size = len(side) - 15
        if abs(size) > 1:
            assert verdict == ("helps" if size > 0 else "hurts")
        assert (float(p) < 0.01) == (verdict != "not significant")
        assert gain == ("-" if HAVING[side].gain is None else f"{HAVING[side].gain:.1f}")
    known = [side for side in order if HAVING[side].gain is not None]
    for place, of, text in ((1, 2, "time to equal loss"), (3, 0, "loss")):
        found = [HAVING[x].gain for x in known], [effects[x][of] for x in known]
        rho = stats.spearmanr(*found).statistic
        text = f"rank correlation of {text} with the gains of {len(known)} techniques: {rho:.2f}, "
        assert lines[end + place].startswith(f"{text}from ")
    assert lines[end + 5] == f"one step of 1490 is worth {worth / 1490:.2g} of the loss"


def shown_after(lines: list[str], seeds: str) -> set[str]:
    """Return the names of the techniques in the table after some seeds."""
    start = lines.index(f"after {seeds} seeds:") + 3
    return {re.split("  +", line)[0] for line in lines[start : lines.index("", start)]}


def test_rounds_and_their_tables(ablation):
    status, lines, err, made = ablation(f"{NAMED} --seed 4")
    assert (status, err) == (0, "")
    seeds = [seed for _, _, seed in made]
    assert seeds == sorted(seeds) and set(seeds) == {4, 5, 6}
    sides = [side for _, side, seed in made if seed == 4]
    assert sides.pop(1) == "record_longer"
    places = [i for i, side in enumerate(sides) if side == "record"]
    assert places == [*range(0, len(sides), 9)]  # before each eight
    assert [side for side in sides if side != "record"] == [*HAVING] and len(HAVING) > 25
    assert "±" not in "".join(lines[: lines.index("after 2 of 3 seeds:")])  # in the first table
    for count in (2, 3):
        check_table(lines, made, range(4, 7), count)


def test_a_technique_whose_run_fails_is_left_out(ablation):
    """From then on, even if a later run of it succeeds."""
    fails = {("smear", 4), ("paired_heads", 4), ("paired_heads", 5), ("YaRN", 6)}
    status, lines, err, made = ablation(f"{NAMED} --seed 4", fails=fails)
    assert (status, err) == (0, "")
    names = {technique.name for technique in HAVING.values()}
    for count, left_out in ((2, {"smear", "paired heads"}), (3, {"smear", "paired heads", "YaRN"})):
        check_table(lines, made, range(4, 7), count)
        assert names - shown_after(lines, f"{count} of 3") == left_out
    assert "left out: smear: the run it_smear_seed4 failed" in lines


def test_a_failing_run_of_the_record_ends_the_ablation(ablation):
    status, _, err, made = ablation(NAMED, fails={("record", 1)})
    assert status == 1 and err.count("\n") == 1 and "record_seed1 failed" in err
    assert {seed for _, other, seed in made if other not in SPECIAL} == {0}


def test_only_takes_techniques_by_words_of_their_names(ablation):
    _, lines, _, made = ablation(f"{NAMED} --runs 2 --only VaLue")
    assert shown_after(lines, "2 of 2") == {t.name for t in ALONE if "value" in t.name}
    assert len({side for _, side, _ in made} - {*SPECIAL}) == 4


def test_an_ablation_continues_only_with_the_same_flags(ablation):
    assert ablation(f"{NAMED} --runs 2 --only value")[0] == 0
    assert ablation(f"{NAMED} --runs 3 --only value,smear")[0] == 0
    status, lines, err, made = ablation(f"{NAMED} --only value --muon_lr 0.06")
    assert (status, lines, made) == (1, [], {})
    assert "logs/it.json: record was [" in err and err.count("\n") == 1


def test_runs_whose_source_changed_are_refused(ablation):
    status, lines, err, made = ablation(f"{NAMED} --only value --runs 4", changed_seed=2)
    assert status == 1 and "differ in source" in err and err.count("\n") == 1
    assert max(seed for *_, seed in made) == 2
    assert sum(line.startswith("after ") for line in lines) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (f"--ablate {FORK} --only normoun", 'the nearest one is "NorMuon"'),
        ("--ablate --record 2024-11-19_FlexAttention", f"run.sh --ablate {FORK}"),
        ("--ablate --resume on", "--resume is for"),
    ],
)
def test_bad_flags_start_nothing(words, reason, ablation):
    status, _, err, made = ablation(words)
    assert (status, made) == (1, {}) and err.count("\n") == 1 and re.search(reason, err)


# ---- The list


def test_the_list_has_the_flags_that_turn_a_technique_off(ablation):
    status, lines, err, made = ablation(f"--ablate {FORK} --list")
    assert (status, err, made) == (0, "", {})
    blocks = [block.split("\n") for block in "\n".join(lines).split("\n\n")[1:]]
    record = RECORDS[Frontier.default_record]
    for technique, (first, *_, last) in zip(TECHNIQUES, blocks, strict=True):
        assert first.startswith(f"{technique.name}: ")
        flags = " ".join(flags_without(technique, record))
        assert flags in last and (technique.off or "stays on" in last)


def test_settings_functions_and_tests_of_a_technique_exist():
    known = vars(frontier.Hyperparameters()).keys()
    for technique in TECHNIQUES:
        named = set(re.findall(r"--(\w+)", technique.switch))
        assert named and technique.off.keys() <= named <= known, technique.name
        for words in technique.where.split(", "):
            first, _, method = words.partition(".")
            assert hasattr(getattr(frontier, first), method or "__doc__"), technique.name
        for file in re.findall(r"test_\w+\.py", technique.test):
            assert (HERE / "tests/frontier" / file).exists()
