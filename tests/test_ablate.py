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
from ablate import TECHNIQUES, Effects
from compare import Side
from scipy import stats

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
    return ablate.flags_without(technique, hp, Frontier)


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


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
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
    having = [t.name for t in TECHNIQUES if ablate.flags_without(t, hp, train_gpt.Run)]
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
    words = [word.replace("=N", f"={ablate.NUMBER}") for word in words]
    assert ablate.without("layers", *words)(SimpleNamespace(layers=text), Frontier) == left


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


def tables(count: int, techniques: int, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return differences to the record's run in a block, (count, techniques, seeds); the record has
    a run for each block and seed. Return, too, what is true of each technique."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 3, techniques)
    runs = rng.normal(0, 1, (count, techniques, seeds)) + true[:, None]
    records = rng.normal(0, 1, (count, -(-techniques // ablate.BLOCK), seeds))
    return runs - records.repeat(ablate.BLOCK, 1)[:, :techniques], true


@pytest.mark.parametrize(
    ("techniques", "seeds", "left_out"),
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
def test_the_deviation_is_that_of_a_least_squares_fit(techniques, seeds, left_out):
    """With a variable for each technique, and one for each run of the record; of techniques that
    are whole."""
    values = tables(1, techniques, seeds)[0][0]
    values[left_out, : seeds - 1] = math.nan
    blocks = np.eye(-(-techniques // ablate.BLOCK)).repeat(ablate.BLOCK, 0)[:techniques]
    of_techniques = np.kron(np.eye(techniques), np.ones((seeds, 1)))
    design = np.hstack([of_techniques, np.kron(blocks, np.eye(seeds))])
    whole = np.delete(values, left_out, 0).ravel()
    design = np.delete(design.reshape(techniques, seeds, -1), left_out, 0).reshape(whole.size, -1)
    fit, _, rank, _ = np.linalg.lstsq(design, whole, rcond=None)
    free = whole.size - rank
    expected = math.sqrt(((whole - design @ fit) ** 2).sum() / free)
    assert ablate.pooled(values) == (pytest.approx(expected), free)


@pytest.mark.parametrize(("techniques", "left_out"), [(3, []), (12, []), (12, [1, 8])])
def test_intervals_and_verdicts_are_right_as_often_as_they_say(techniques, left_out):
    """Intervals 95 times in 100. A technique that does nothing gets a verdict once in 100."""
    losses, true = tables(2000, techniques, 3)
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

SPECIAL = {"record": (1490, 0.0), "record_longer": (1862, -0.05)}  # steps, harm to the loss
HEADER = ["technique", "loss without it", "time without it", "to equal loss"]
HEADER += ["p", "verdict", "gain_s"]


@pytest.fixture
def ablation(tmp_path, monkeypatch, capsys):
    """Return ablation(words): its runs are made up, and fail where (side, seed) is in `fails`. It
    returns status, lines printed, the error and the runs in order, by name, side and seed."""

    def call(words: str, changed_seed=-1, fails=()) -> tuple[int, list[str], str, dict]:
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
    assert lines[0] == "logs are logs/it_*.txt; after a stop, --run_id it goes on"
    seeds = [seed for _, _, seed in made]
    assert seeds == sorted(seeds) and set(seeds) == {4, 5, 6}
    shown = [side for _, side, seed in made if seed == 4]
    assert shown.pop(1) == "record_longer"
    places = [i for i, side in enumerate(shown) if side == "record"]
    assert places == [*range(0, len(shown), 9)]  # before each eight
    assert [side for side in shown if side != "record"] == [*HAVING] and len(HAVING) > 25
    assert sum(line.startswith("after ") for line in lines) == 2
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


@pytest.mark.parametrize("word", ["value", "VaLue"])
def test_only_takes_techniques_by_a_word_of_their_names(word, ablation):
    words = f"--ablate {FORK} --record {NEWEST} --only {word} --run_id it --runs 2"
    _, lines, _, made = ablation(words)
    names, start = {t.name for t in TECHNIQUES if "value" in t.name}, lines.index("") + 4
    assert {re.split("  +", line)[0] for line in lines[start : start + 4]} == names
    assert lines[start + 4] == "" and len(names) == 4
    assert len({side for _, side, _ in made} - {*SPECIAL}) == 4
    assert not any("rank correlation" in line for line in lines)  # no gain of them is known


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
        f"--ablate {FORK} --runs 1",
        f"--ablate {FORK} --only nothing",
        f"--ablate {FORK} --record {NEWEST} --only backout",
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


def test_too_few_techniques_are_named_with_the_script_that_has_more(ablation):
    status, _, err, made = ablation("--ablate --record 2025-01-26_BatchSize")
    assert (status, made) == (2, {})
    assert "it found value embeddings; forks/train_gpt_2026.py has many" in err


def test_a_list_of_the_techniques_makes_no_runs(ablation):
    status, lines, err, made = ablation(f"--ablate {FORK} --record {NEWEST} --list")
    assert (status, err, made) == (0, "", {})
    header, *rows = (re.split("  +", line) for line in lines)
    assert header == ["technique", "brought", "gain_s", "without it"]
    for technique, (name, brought, gain, off) in zip(HAVING.values(), rows, strict=True):
        assert (name, brought) == (technique.name, technique.brought)
        assert gain == ("-" if technique.gain is None else f"{technique.gain:.1f}")
        assert off.split() == flags_without(technique, RECORDS[NEWEST])


@pytest.mark.parametrize(("changed_seed", "tables_before"), [(1, 0), (2, 1)])
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
