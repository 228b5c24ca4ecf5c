"""Records, the flags that change them, their published results, and their techniques."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest

import records
import script
import train_gpt
import train_gpt_2026
import train_gpt_2026_07
from techniques import TECHNIQUES, flags_without
from train_gpt import HERE, RECORDS, Run

# The published settings, as flags.
COMMON = """
--num_layers 12 --model_dim 768 --num_heads 6 --head_dim 128
--batch_seqs 8 --val_tokens 10485760 --val_loss_every 125
--embed_lr 0.6 --head_lr 0.008 --scalar_lr 0.04 --warmup_steps 0 --grad_clip 0
--window_min 64 --window_span 1728 --window_step 64
--muon_lr 0.05 --momentum_start 0.85 --momentum_end 0.95 --momentum_warmup_steps 300
--adam_betas 0.8 0.95 --norm_eps 0.0078125
"""
OF_2024 = f"""{COMMON}
--seq_len 65536 --val_seq_len 65536 --vocab_size 50304 --window_rule tokens
--lr_final 0 --adam_eps 1e-8 --momentum_damped off --fp8 off --logit_softcap 30
--rope full --rope_base 10000 --attn_scale 0 --init_bound 1
"""
SYSTEMS = {
    "2024-11-19_FlexAttention": f"""{OF_2024}
--num_iterations 1875 --cooldown_frac {562 / 1875} --window_min 1024 --window_span 0
--adam_betas 0.9 0.95 --muon_lr 0.04 --momentum_warmup_steps 500
""",
    "2024-11-24_WindowWarmup": f"{OF_2024} --num_iterations 1750 --cooldown_frac {640 / 1750}",
    "2025-01-26_BatchSize": f"""{COMMON}
--num_iterations 1770 --cooldown_frac 0.4 --lr_final 0.1 --momentum_damped on
--seq_len 49152 --val_seq_len 262144 --vocab_size 50257
--window_rule blocks --window_min 128 --window_step 128 --adam_eps 1e-10 --logit_softcap 15
--fp8 on --x_s 2 --w_s 512 --grad_s {2**19}
--rope half --rope_base 1024 --attn_scale 0.12 --init_bound {3**0.5 * 0.5}
""",
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_record_has_the_published_numbers(name):
    words = ["--record", name, *SYSTEMS[name].split()]
    assert train_gpt.parse_args(words, Run) == (RECORDS[name], name)


def test_published_curves_agree_with_the_records_and_the_official_results():
    found = json.loads((HERE / "tools" / "published.json").read_text())
    assert RECORDS.keys() - {"demo"} <= found.keys()
    for name in found.keys() - {"muon", "adamw"}:  # tests/test_track3.py has these
        row = found[name]
        for curve in [row, row["one_h100"]] if "one_h100" in row else [row]:
            assert curve["losses"].keys() == curve["seconds"].keys()
            losses, times = list(curve["losses"].values()), list(curve["seconds"].values())
            assert losses == sorted(losses)[::-1] and times == sorted(times) and times[0] == 0
        *steps, last = map(int, row["losses"])
        assert abs(row["losses"][str(last)] - row["mean"]) <= 2 * row["deviation"]
        # Until 2026-01-04 the official minutes are the logs' within 0.14 s. Later ones are counted
        # on from record to record, and lie 1.07, 1.29 and -1.13 s above the logs' mean.
        error = 0.2 if name < "2026-01-05" else 1.3
        assert row["seconds"][str(last)] == pytest.approx(60 * row["minutes"], abs=error)
        if name in RECORDS:
            hp = RECORDS[name]
            assert hp.num_iterations == last and steps == [*range(0, last, hp.val_loss_every)]


# ---- Techniques

FRONTIER = "forks/train_gpt_2026.py"
OF_2026 = [name for name in train_gpt_2026.RECORDS if name.startswith("2026")]
RUNS = train_gpt_2026.Run, train_gpt_2026_07.Run
# These had begun with zeros before, or are off at 0.
NOT_DEFAULT = "value tables from small numbers", "mudd by token", "gates and factors by token"


def without(technique, record: str, run=train_gpt_2026.Run) -> tuple:
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
    for run, record in [(r, name) for r in RUNS for name in r.records if name[:4] == "2026"]:
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
    moment, steps = train_gpt_2026.Moment, range(hp.num_iterations)
    moments, ours = ([moment(step, settings) for step in steps] for settings in (hp, off))
    lengths = {now.seq_len for now in ours}
    assert abs(lengths.pop() - np.mean([now.seq_len for now in moments])) <= hp.seq_len / 2
    assert not lengths and {now.window for now in ours} == {moments[-1].window}


OLDER = {technique.name for technique in TECHNIQUES if technique.record < "2026-04"}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("train_gpt.py", {"value embeddings"}),
        ("forks/train_gpt_track3.py", set()),  # it has no such layers
        (f"{FRONTIER} --record 2025-08", {"attention gate", "whole documents", "value embeddings"}),
        (f"{FRONTIER} --record 2026-03", OLDER - {"wider q, k and v at first"}),
    ],
)
def test_techniques_are_those_of_the_script_s_record(words, names, capsys):
    records.main([*words.split(), "--techniques"])
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert {row[0] for row in rows} == names
    path, flags = script.take_script(words.split())
    for *_, off in rows:
        known = train_gpt.parse_args(flags, script.load(path))
        assert train_gpt.parse_args([*flags, *off.split()], script.load(path)) != known
