"""tools/ablate.py: what each technique's flags change, its statistics, a table of made-up runs."""

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
TABLES = {"layers", "stages", "adam_groups"}  # settings
FIELDS = {  # of rows, where the setting of a technique is a table
    "whole documents": {"cap"},
    "backout": {"backout"},
    "skip connection": {"skip_from"},
    "late attention reads earlier": {"source"},
    "value embeddings": {"values"},
    "several targets a token": {"targets"},
    "cautious decay of Adam's": {"decay"},
    "betas by group": {"beta1", "beta2"},
    "shorter documents, higher last rate": {"cap"},
}


@pytest.fixture(autouse=True)
def interrupts():
    """Give Python its handler of interrupts back: an ablation leaves them to its runs."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def flags_without(technique, hp) -> list[str]:
    """Return the flags that turn a technique off."""
    return techniques.flags_without(technique, hp, Frontier)


def settings_of(words: list[str]):
    """Return the frontier's settings by flags."""
    return train_gpt.parse_args(words, Frontier)[0]


def settings_without(technique, record: str):
    """Return the settings that the technique's flags lead to; None if there are no flags."""
    flags = flags_without(technique, RECORDS[record])
    return settings_of(["--record", record, *flags]) if flags else None


def rows_of(hp, name: str) -> list[dict]:
    """Return the rows of a setting that is a table, with their fields."""
    if name == "adam_groups":
        known = ("lr", "beta1", "beta2", "decay")
        return [row for _, row in frontier.number_rows(hp.adam_groups, name, known)]
    if name == "layers":
        return [vars(row) for row in frontier.layer_table(hp)]
    return [vars(row) for row in frontier.stage_table(hp.stages)]


def fields_that_differ(hp, off, name: str) -> set[str]:
    """Return the fields of a setting's rows that differ; what does must be as if it had not been
    set."""
    unset = vars(frontier.Layer("long")) | vars(frontier.Stage())
    found = set()
    for a, b in zip(rows_of(hp, name), rows_of(off, name), strict=True):
        for key in a:
            if a[key] != b.get(key):
                assert b.get(key) == unset.get(key)
                found.add(key)
    return found


# ---- Techniques


ALONE = [technique for technique in TECHNIQUES if technique.off]  # may be turned off alone


@pytest.mark.parametrize("technique", ALONE, ids=lambda technique: technique.name)
def test_flags_turn_a_technique_off_and_nothing_else(technique):
    """What they change is then as in 2025-01-26, whose values are the defaults."""
    plain = Frontier.settings()
    records = [name for name in OF_2026 if settings_without(technique, name)]
    for record in records:
        hp, off = RECORDS[record], settings_without(technique, record)
        assert not flags_without(technique, off)
        changed = {f.name for f in fields(hp) if getattr(hp, f.name) != getattr(off, f.name)}
        assert changed - {"run_id"} <= technique.off.keys()
        for name in changed & TABLES:
            if technique.name != "stages of the batch":
                assert fields_that_differ(hp, off, name) == FIELDS[technique.name]
        for name in changed - TABLES:
            if technique.name == "value tables from small numbers":  # zeros came before them
                assert off.value_init == 0
            else:
                assert getattr(off, name) == getattr(plain, name)
    assert records


def test_no_technique_is_there_twice():
    for record in OF_2026:
        flags = [flags_without(technique, RECORDS[record]) for technique in TECHNIQUES]
        flags = [" ".join(words) for words in flags if words]
        assert len(set(flags)) == len(flags) > 20
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)


@pytest.mark.parametrize("record", [name for name in RECORDS if name[0] == "2"])
def test_a_record_has_no_technique_of_a_later_one(record):
    """But skip connections, which are dated by their latest form."""
    for technique in TECHNIQUES:
        if technique.name != "skip connection":
            off = flags_without(technique, RECORDS[record])
            assert not off or technique.brought <= record[:10], technique.name


@pytest.mark.parametrize("record", train_gpt.RECORDS)
def test_a_script_lacks_the_techniques_for_which_it_has_no_setting(record):
    """train_gpt.py's records have one: value embeddings, of tables."""
    hp = train_gpt.RECORDS[record]
    having = [t.name for t in TECHNIQUES if techniques.flags_without(t, hp, train_gpt.Run)]
    assert having == ([] if record.startswith("2024") else ["value embeddings"])


@pytest.mark.parametrize(
    ("words", "text", "left"),
    [
        (["x3"], "long+x3,short+x31,none+x3+v1,long+x13+x3", "long,short+x31,none+v1,long+x13"),
        ([r"x\d+"], "long+x3,short+x31+pair,none+x3", "long,short+pair,none"),
        ([r"v\d"], "long+v0+pair,long+vfirst,short+pair+v2", "long+pair,long+vfirst,short+pair"),
        (["decay=N"], "a+lr=8e-5+decay=8e-5,b+decay=.75+beta1=.5", "a+lr=8e-5,b+beta1=.5"),
        (["decay=N"], "a+lr=1+decay=8e+5,b+decay=8e+5+lr=8e+5", "a+lr=1,b+lr=8e+5"),
        (["beta[12]=N"], "a+lr=1+beta1=.9+beta2=.99,b+lr=2", "a+lr=1,b+lr=2"),
        (["cap=N", "targets=N"], "lr=1+targets=1/.5/.25+cap=896,lr=2+cap=8", "lr=1,lr=2"),
        (["backout"], "long,short+backout", "long,short"),
        (["backout"], "long,short", "long,short"),
    ],
)
def test_words_are_taken_out_of_rows_whole(words, text, left):
    words = [word.replace("=N", f"={techniques.NUMBER}") for word in words]
    assert techniques.without("layers", *words)(SimpleNamespace(layers=text), Frontier) == left


TWO_STAGES = "--extension_frac 0 --stages length=1+window=128+lr=1,length=4+window=256+lr=2"


@pytest.mark.parametrize("words", [*OF_2026, f"{NEWEST} {TWO_STAGES}"])
def test_one_stage_has_as_many_tokens_and_the_last_window(words):
    """But for rounding of its length to whole sequences."""
    flags = ["--record", *words.split()]
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


# ---- Statistics: of runs that have a deviation of 1 around technique and seed


def tables(count: int, rows: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return differences to the record's run in a block, (count, rows, seeds), a row for each
    technique; the record has a run for each block and seed. Return, too, what is true of each."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 3, rows)
    runs = rng.normal(0, 1, (count, rows, seeds)) + true[:, None]
    records = rng.normal(0, 1, (count, -(-rows // ablate.BLOCK), seeds))
    return runs - records.repeat(ablate.BLOCK, 1)[:, :rows], true


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out"),
    [
        (2, 2, []),
        (5, 3, []),
        (12, 4, []),
        (33, 3, []),
        (5, 3, [4]),
        (12, 4, [0, 9]),
        (12, 3, [8, 9, 10]),  # one of its block is left
        (33, 3, [*range(8), 12, 32]),  # a whole block
    ],
)
def test_the_deviation_is_that_of_a_least_squares_fit(rows, seeds, left_out):
    """With a variable for each technique, and one for each run of the record; of techniques that
    are whole."""
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


@pytest.mark.parametrize("seeds", [4, 7])
def test_a_single_technique_has_the_paired_t_test(seeds):
    values = tables(1, 1, seeds)[0][0]
    found = Effects.of(0.01 * values, values, None)
    test = stats.ttest_1samp(0.01 * values[0], 0)
    low, high = test.confidence_interval(0.95)
    assert found.free == seeds - 1 and found.half("loss") == pytest.approx((high - low) / 2)
    verdict, p = found.verdict(0, "loss")
    assert p == pytest.approx(test.pvalue) and (verdict == "not settled") == (p >= 0.01)


@pytest.mark.parametrize("difference", [0.0, 1e-4])
def test_equal_losses_err_by_their_rounding(difference):
    """Each of a difference's two losses has four digits, and an error that is uniform: its variance
    is 1e-8 / 12."""
    losses = np.full((1, 4), difference)
    found = Effects.of(losses, 0 * losses, 0.5)
    error = math.sqrt(2 * 1e-8 / 12 / 4)
    assert found.errors["loss"] == pytest.approx(error)
    assert found.errors["together"] == pytest.approx(error / 0.5)
    p = 2 * stats.t.sf(difference / error, 3)
    assert found.verdict(0, "loss") == ("not settled", pytest.approx(p))


def test_techniques_that_are_alone_with_their_runs_of_the_record_are_pooled():
    """Of 17 techniques, one of each eight is left, and the 17th: the variance of differences is the
    mean of three, and twice that of a run."""
    values = tables(1, 17, 5)[0][0]
    values[[*range(1, 8), *range(8, 15)], 0] = math.nan
    expected = math.sqrt(values[[0, 15, 16]].var(1, ddof=1).mean() / 2)
    assert ablate.pooled(values) == (pytest.approx(expected), 12)


@pytest.mark.parametrize(
    ("rows", "seeds", "free"), [(1, 3, 2), (1, 4, 3), (2, 3, 2), (2, 4, 3), (4, 2, 3), (9, 1, 0)]
)
def test_three_degrees_of_freedom_are_the_least_for_a_verdict(rows, seeds, free):
    """However large the effects are."""
    values = tables(1, rows, seeds)[0][0] + 1e6
    found = Effects.of(values, values, 1.0)
    assert found.free == free and (free < 3) == (seeds < ablate.fewest_seeds(rows))
    for judge in ("loss", "time", "together"):
        verdict, p = found.verdict(0, judge)
        assert (verdict == "-") == math.isnan(p) == math.isnan(found.half(judge)) == (free < 3)
        assert free < 3 or verdict == "helps"


@pytest.mark.parametrize(
    ("rows", "seeds", "left_out"), [(3, 3, []), (12, 3, []), (12, 3, [1, 8]), (1, 4, [])]
)
def test_intervals_and_verdicts_are_right_as_often_as_they_say(rows, seeds, left_out):
    """Intervals 95 times in 100. A technique that does nothing gets a verdict once in 100."""
    losses, true = tables(2000, rows, seeds)
    losses[:, left_out] = math.nan
    inside = settled = 0
    for values in losses:
        found = Effects.of(values, np.zeros_like(values), 0.5)
        inside += abs(found.together[-1] - true[-1] / 0.5) <= found.half("together")
        nothing = Effects.of(values - true[:, None], np.zeros_like(values), 0.5)
        settled += nothing.verdict(0, "together")[0] != "not settled"
    for count, share in ((inside, 0.95), (settled, 0.01)):
        assert abs(count / 2000 - share) <= 2.5 * math.sqrt(share * (1 - share) / 2000)


def test_rank_correlation_of_a_textbook():
    """IQ and hours of television of ten people, whose squared differences of ranks sum to 194."""
    iq = 106, 100, 86, 101, 99, 103, 97, 113, 112, 110
    hours = 7, 27, 2, 50, 28, 29, 20, 12, 6, 17
    rho, low, high = ablate.rank_correlation(iq, hours)
    assert rho == pytest.approx(1 - 6 * 194 / (10 * 99))
    # z = artanh(-0.175758) = -0.177604; its deviation is sqrt((1 + 0.030891 / 2) / 7) = 0.380872
    assert (low, high) == pytest.approx((math.tanh(-0.924113), math.tanh(0.568905)), abs=1e-5)
    assert ablate.rank_correlation(iq, iq)[0] == pytest.approx(1)


def test_the_interval_of_a_rank_correlation_holds_it():
    """Of normal numbers with correlation r, rho is 6 / pi arcsin(r / 2)."""
    a, b = np.random.default_rng(0).standard_normal((2, 1000, 25))
    rho, inside = 6 / math.pi * math.asin(0.6 / 2), 0
    for x, y in zip(a, 0.6 * a + 0.8 * b, strict=True):
        _, low, high = ablate.rank_correlation(x, y)
        inside += low <= rho <= high
    assert 0.93 <= inside / 1000 <= 0.97


# ---- The table

SPECIAL = {"record": (1490, 0.0), "record_longer": (1862, None)}  # steps, harm to the loss
HEADER = ["technique", "loss without it", "time without it", "to equal loss"]
HEADER += ["p", "verdict", "gain_s"]


@pytest.fixture
def ablation(tmp_path, monkeypatch, capsys):
    """Return ablation(words): its runs are made up, and fail where (side, seed) is in `fails`. The
    longer run's loss is lower by `gain`. It returns status, lines printed, the error and the runs
    in order, by name, side and seed."""

    def call(
        words: str | list[str], changed_seed=-1, fails=(), gain=0.05
    ) -> tuple[int, list[str], str, dict]:
        made = {}

        def run(side: Side, name: str, seed: int) -> SimpleNamespace:
            if (side.name, seed) in fails:
                raise UserError(f"the run {name}_{side.name}_seed{seed} failed")
            noise = random.Random(f"{name} {side.name} {seed}")
            steps, harm = SPECIAL.get(side.name, (1490, 0.01 * (len(side.name) - 15)))
            if side.name == "record_longer":
                harm = -gain
            found = SimpleNamespace(loss=3.3 + harm + noise.gauss(0, 0.002), steps=steps)
            found.seconds = 80 + noise.gauss(0, 0.1)
            found.group, found.path = seed == changed_seed, Path(f"{side.name}_{seed}.txt")
            assert made.setdefault((name, side.name, seed), found) is found
            return found

        status = 0
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(Side, "run", run)
        try:
            ablate.main(words.split() if isinstance(words, str) else words)
        except SystemExit as end:
            status = end.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err, made

    return call


def by_hand(made: dict, seeds: range) -> tuple[dict[str, np.ndarray], float]:
    """Return for each technique's side, by seeds (seeds, 3), the difference of losses, the log
    of the times' ratio, and that of the times to equal loss; nan if a run failed. And the worth."""
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
    """Check that the table after the first seeds is that by hand, less what failed until then."""
    done = seeds[:count]
    values, worth = by_hand(made, done)
    table = np.array([values.get(s, np.full((count, 3), math.nan)) for s in HAVING])
    halves = []
    for of in range(3):
        deviation, free = ablate.pooled(table[..., of])
        halves.append(stats.t.isf(0.025, free) * deviation * math.sqrt(2 / count))
    effects = {s: v.mean(0) for s, v in values.items() if not np.isnan(v).any()}
    order = sorted(effects, key=lambda side: -effects[side][2])

    start = lines.index(f"after {count} of {len(seeds)} seeds:") + 2
    end = lines.index("", start)
    header, *rows = (re.split(r"  +", line) for line in lines[start:end])
    assert header == HEADER
    for side, (name, *cells, p, verdict, gain) in zip(order, rows, strict=True):
        mean = effects[side]
        assert name == HAVING[side].name
        ratios = zip(np.exp(mean[1:]), halves[1:], strict=True)
        percents = [f"{100 * (x - 1):+.1f} % ± {100 * x * half:.1f}" for x, half in ratios]
        assert cells == [f"{mean[0]:+.4f} ± {halves[0]:.4f}", *percents]
        size = len(side) - 15
        if abs(size) > 1:
            assert verdict == ("helps" if size > 0 else "hurts")
        assert (float(p) < 0.01) == (verdict != "not settled")
        assert gain == ("-" if HAVING[side].gain is None else f"{HAVING[side].gain:.1f}")
    known = [side for side in order if HAVING[side].gain is not None]
    for place, of, text in ((1, 2, "time to equal loss"), (3, 0, "loss")):
        gains, found = [HAVING[x].gain for x in known], [effects[x][of] for x in known]
        rho = np.corrcoef(stats.rankdata(gains), stats.rankdata(found))[0, 1]
        text = f"rank correlation of {text} with the gains of {len(known)} techniques: {rho:.2f}, "
        assert lines[end + place].startswith(f"{text}from ")
    assert lines[end + 5] == f"one step of 1490 is worth {worth / 1490:.2g} of the loss"


def test_rounds_and_their_tables_sorted_by_effect(ablation):
    status, lines, err, made = ablation(f"--ablate {FORK} --record {NEWEST} --run_id it --seed 4")
    assert (status, err) == (0, "")
    assert lines[0] == f"{len(made) // 3} runs a seed, 3 seeds: {len(made)} runs"
    said = "logs are logs/it_*.txt, tools/watch.py draws the newest; after a stop, --run_id it"
    assert lines[1] == f"{said} goes on"
    assert lines[2] == f"all {len(made) - 1} others: about 0 seconds, by the first run"
    seeds = [seed for _, _, seed in made]
    assert seeds == sorted(seeds) and set(seeds) == {4, 5, 6}
    shown = [side for _, side, seed in made if seed == 4]
    assert shown.pop(1) == "record_longer"
    places = [i for i, side in enumerate(shown) if side == "record"]
    assert places == [*range(0, len(shown), 9)]  # before each eight
    assert [side for side in shown if side != "record"] == [*HAVING] and len(HAVING) > 25
    assert sum(line.startswith("after ") for line in lines) == 3
    assert "±" not in "".join(lines[: lines.index("after 2 of 3 seeds:")])  # in the first table
    for count in (2, 3):
        check_table(lines, made, range(4, 7), count)


def test_a_technique_whose_run_fails_is_left_out(ablation):
    """From then on, also if a later run of it does not; the others are as without it."""
    fails = {("smear", 4), ("paired_heads", 4), ("paired_heads", 5), ("YaRN", 6)}
    words = f"--ablate {FORK} --record {NEWEST} --run_id it --seed 4"
    status, lines, err, made = ablation(words, fails=fails)
    assert (status, err) == (0, "")
    for count, left_out in ((2, {"smear", "paired heads"}), (3, {"smear", "paired heads", "YaRN"})):
        check_table(lines, made, range(4, 7), count)
        start = lines.index(f"after {count} of 3 seeds:") + 3
        shown = {re.split("  +", line)[0] for line in lines[start : lines.index("", start)]}
        assert {technique.name for technique in HAVING.values()} - shown == left_out
    for name, side, seed in (("smear", "smear", 4), ("YaRN", "YaRN", 6)):
        assert f"left out: {name}: the run it_{side}_seed{seed} failed" in lines


@pytest.mark.parametrize("side", ["record", "record_longer"])
def test_a_failing_run_of_the_record_ends_it(side, ablation):
    words = f"--ablate {FORK} --record {NEWEST} --run_id it"
    status, lines, err, made = ablation(words, fails={(side, 1)})
    assert status == 1 and err.count("\n") == 1 and f"{side}_seed1 failed" in err
    assert {seed for _, other, seed in made if other not in SPECIAL} == {0}


def names_in_table(lines: list[str], after: str) -> set[str]:
    """Return the techniques of the table behind a line."""
    start = lines.index(after) + 3
    return {re.split("  +", line)[0] for line in lines[start : lines.index("", start)]}


@pytest.mark.parametrize("word", ["value", "VaLue"])
def test_only_takes_techniques_by_a_word_of_their_names(word, ablation):
    words = f"--ablate {FORK} --record {NEWEST} --only {word} --run_id it --runs 2"
    _, lines, _, made = ablation(words)
    names = {t.name for t in ALONE if "value" in t.name}
    assert names_in_table(lines, "after 2 of 2 seeds:") == names and len(names) == 4
    assert len({side for _, side, _ in made} - {*SPECIAL}) == 4
    assert not any("rank correlation" in line for line in lines)  # no gain of them is known


def test_only_takes_several_words(ablation):
    words = ["--ablate", FORK, "--record", NEWEST, "--run_id", "it", "--runs", "2", "--only"]
    _, lines, _, _ = ablation([*words, "smear, polar,YARN,,extension, wide"])
    names = {"smear", "Polar Express", "YaRN", "extension, wide last window"}
    assert names_in_table(lines, "after 2 of 2 seeds:") == names


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("smeer", "smear"), ("normoun", "NorMuon"), ("bigramm", "table of bigrams")],
)
def test_a_word_that_is_in_no_name_is_refused_with_the_nearest_technique(word, nearest, ablation):
    for more in ([], ["--list"]):
        status, lines, err, made = ablation(["--ablate", FORK, "--only", f"yarn,{word}", *more])
        assert (status, lines, made) == (2, [], {}) and err.count("\n") == 1
        assert f"--only {word}: " in err and f'the nearest one is "{nearest}", --list names' in err


@pytest.mark.parametrize(("runs", "least"), [(1, True), (3, True), (4, False)])
def test_a_single_technique_will_do(runs, least, ablation):
    """With its paired t-test from four seeds on; with fewer there is no verdict, as is said before
    the runs."""
    words = f"--ablate {FORK} --record {NEWEST} --only smear --run_id it --runs {runs}"
    status, lines, err, made = ablation(words)
    assert (status, err, len(made)) == (0, "", 3 * runs)
    assert ("for intervals and verdicts --runs 4 is the least" in lines[2]) == least
    last = lines[lines.index(f"after {runs} of {runs} seeds:") + 3]
    values, _ = by_hand(made, range(runs))
    if least:
        assert "±" not in last and re.search(r" -  +-  +1\.1$", last)
        assert "these are too few runs for intervals and verdicts" in lines
    else:
        losses = values["smear"][:, 0]
        low, high = stats.ttest_1samp(losses, 0).confidence_interval(0.95)
        assert f"  {losses.mean():+.4f} ± {(high - low) / 2:.4f}  " in last
        p = stats.ttest_1samp(values["smear"][:, 2], 0).pvalue
        assert f"  {p:.3f}  not settled " in last or f"  {p:.2e}  hurts " in last


@pytest.mark.parametrize("gain", [-0.05, -0.5])
def test_where_time_has_no_worth_the_loss_may_be_judged_with_the_same_name(gain, ablation):
    words = f"--ablate {FORK} --record {NEWEST} --only smear,yarn --run_id it --runs 3"
    status, lines, err, made = ablation(words, gain=gain)
    assert status == 1 and [side for _, side, _ in made] == ["record", "record_longer"]
    expected = "logs/it_record_longer_*.txt has more steps, and no lower loss; go on with these "
    assert f"{expected}runs by --run_id it --judge loss\n" in err and err.count("\n") == 1
    status, lines, err, made = ablation(f"{words} --judge loss", gain=gain)
    assert (status, err, len(made)) == (0, "", 4 * 3)
    assert names_in_table(lines, "after 3 of 3 seeds:") == {"smear", "YaRN"}
    header = re.split("  +", lines[lines.index("after 3 of 3 seeds:") + 2])
    assert header == [name for name in HEADER if name != "to equal loss"]
    assert "more steps have no lower loss: what time is worth cannot be measured here" in lines


def test_the_worth_of_time_is_the_mean_of_the_seeds(ablation, monkeypatch):
    """A single longer run that ends higher does not end an ablation whose mean gain is positive."""
    gains = iter((0.05, -0.02, 0.03))
    words = f"--ablate {FORK} --record {NEWEST} --only smear,yarn --run_id it --runs 3"

    def worth(own, longer) -> float:
        return next(gains)

    monkeypatch.setattr(ablate.compare, "worth_of_time", worth)
    status, lines, err, _ = ablation(words)
    assert (status, err) == (0, "")
    found = [line.split(" worth ")[1] for line in lines if line.startswith("one step of 1490")]
    means = [0.05, 0.015, 0.02]
    assert found == [f"{mean / 1490:.2g} of the loss" for mean in means]


def test_a_name_goes_on_with_the_same_flags_only(ablation):
    words = f"--ablate {FORK} --record {NEWEST} --run_id it"
    assert ablation(f"{words} --runs 2 --only value")[0] == 0
    assert ablation(f"{words} --runs 3")[0] == 0  # more seeds, and more techniques
    status, lines, err, made = ablation(f"{words} --muon_lr 0.06")
    assert (status, lines, made) == (1, [], {})
    assert "logs/it.json: record was [" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        f"--ablate {FORK} --runs 0",
        f"--ablate {FORK} --only nothing",
        f"--ablate {FORK} --record {NEWEST} --only sum",
        "--ablate --record 2024-11-19_FlexAttention",
        "--ablate --no_such 1",
        "--ablate --runs many",
        "--ablate --eval auto",
        f"--record {NEWEST}",
    ],
)
def test_bad_flags_start_nothing(words, ablation):
    status, _, err, made = ablation(words)
    assert (status, made) == (2, {}) and err.count("\n") == 1


def test_a_record_without_techniques_is_named_with_the_script_that_has_many(ablation):
    status, _, err, made = ablation("--ablate --record 2024-11-19_FlexAttention")
    assert (status, made) == (2, {})
    text = "2024-11-19_FlexAttention of train_gpt.py has no technique that --ablate knows; "
    assert f"{text}forks/train_gpt_2026.py has many: ./run.sh --ablate forks/train_g" in err


@pytest.mark.parametrize("record", [NEWEST, "2026-01-19_BigramHashEmbedding", None])
def test_a_list_of_all_techniques_of_a_script_makes_no_runs(record, ablation):
    """Of its default record, if none is named. Those of other records are not in it; those that
    other numbers belong to have no flags."""
    named = f" --record {record}" if record else ""
    status, lines, err, made = ablation(f"--ablate {FORK} --list{named}")
    assert (status, err, made) == (0, "", {})
    record = record or Frontier.default_record
    header, *rows = (re.split("  +", line) for line in lines[: lines.index("")])
    names = ["technique", "switch", "brought", "gain_s", "where", "test", "without it"]
    assert header == names and f"without it: flags for {record}; -: " in lines[-1]
    for technique, row in zip(TECHNIQUES, rows, strict=True):
        name, switch, brought, gain, where, test, off = row
        assert (name, switch, brought) == (technique.name, technique.switch, technique.brought)
        assert (where, test) == (technique.where, technique.test)
        if technique.gain is not None:
            assert gain.startswith(f"{technique.gain:.1f}")
        assert gain.endswith(technique.more) and gain
        flags = flags_without(technique, RECORDS[record])
        if not technique.off:
            assert off == "-"
        else:
            assert off.split() == (flags or ["not", "in", record])
    assert sum(not technique.off for technique in TECHNIQUES) == 5


def test_a_list_may_be_of_words_and_of_a_script_with_few_techniques(ablation):
    _, lines, _, _ = ablation(f"--ablate {FORK} --list --only gate")
    names = {re.split("  +", line)[0] for line in lines[1 : lines.index("")]}
    assert names == {"attention gate", "value gates", "value gates read values"}
    _, lines, _, _ = ablation("--ablate --list")
    assert lines[1].startswith("value embeddings  ") and lines[2] == ""


def test_a_technique_is_where_its_row_says():
    """Its settings are the fork's, and those that are turned off are among them; its functions and
    classes are in the fork, and files of tests are there."""
    known = vars(Frontier.settings()).keys()
    source = (HERE / FORK).read_text("utf-8")
    for technique in TECHNIQUES:
        named = set(re.findall(r"--(\w+)", technique.switch))
        assert named and technique.off.keys() <= named <= known, technique.name
        for words in technique.where.split(", "):
            first, _, method = words.partition(".")
            assert re.search(rf"^(def |class ){first}\b|^{first} = ", source, re.M), technique.name
            assert hasattr(getattr(frontier, first), method or "__doc__"), technique.name
        for file in re.findall(r"test_\w+\.py", technique.test):
            assert (HERE / "tests/frontier" / file).exists()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", technique.brought)


@pytest.mark.parametrize(("changed_seed", "tables_before"), [(1, 1), (2, 2)])
def test_runs_whose_source_changed_are_refused(changed_seed, tables_before, ablation):
    """At the end of the round."""
    words = f"--ablate {FORK} --record {NEWEST} --only value --run_id it --runs 4"
    status, lines, err, made = ablation(words, changed_seed=changed_seed)
    assert status == 1 and "differ in source" in err and err.count("\n") == 1
    assert max(seed for *_, seed in made) == changed_seed
    assert sum(line.startswith("after ") for line in lines) == tables_before


def test_the_verdict_is_on_the_number_that_is_judged():
    rng = np.random.default_rng(5)
    losses, times = rng.normal(0, 0.001, (8, 3)), rng.normal(0, 0.1, (8, 3))
    losses[1] += 0.02  # by far, but a tenth of what the times wander
    times[2] -= 2
    found = Effects.of(losses, times, worth=1.0)
    verdicts = {
        judge: [found.verdict(i, judge)[0] for i in (1, 2)]
        for judge in ("loss", "time", "together")
    }
    assert verdicts == {
        "loss": ["helps", "not settled"],
        "time": ["not settled", "hurts"],
        "together": ["not settled", "hurts"],
    }
