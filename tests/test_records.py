"""Records: their published numbers and results, and the table of forks/five_minutes.py.
tools/records.py: records side by side, and runs beside what is published of their records."""

import json
import re
from dataclasses import replace

import pytest
import torch

import five_minutes
import records
import train_gpt
from logfile import RULE
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
SYSTEMS["medium_2025-01-18"] = f"""{SYSTEMS["2025-01-26_BatchSize"]}
--num_iterations 7500 --seq_len 65536 --val_seq_len 65536
--num_layers 16 --model_dim 1024 --num_heads 8
--embed_lr 0.3 --head_lr 0.003 --scalar_lr 0.015 --muon_lr 0.025 --w_s 32 --grad_s {2**29}
"""


@pytest.mark.parametrize("name", SYSTEMS)
def test_each_record_has_the_published_numbers(name):
    words = ["--record", name, *SYSTEMS[name].split()]
    assert train_gpt.parse_args(words, Run) == (RECORDS[name], name)


def test_a_record_is_found_without_its_underscore_and_true_and_false_are_on_and_off():
    for words, name, fp8 in (
        ("--record medium2025 --fp8 False", "medium_2025-01-18", False),
        ("--record 2024-11-24 --fp8 true", "2024-11-24_WindowWarmup", True),
    ):
        found = train_gpt.parse_args(words.split(), Run)
        assert found == (replace(RECORDS[name], fp8=fp8), name)


def test_published_curves_agree_with_the_records_and_the_official_results():
    found = json.loads((HERE / "tools" / "published.json").read_text())
    assert RECORDS.keys() - {"demo"} <= found.keys()
    for name in found.keys() - {"muon", "adamw"}:  # tests/test_track3.py has these
        row = found[name]
        *steps, last = map(int, row["losses"])
        assert abs(row["losses"][str(last)] - row["mean"]) <= 2 * row.get("deviation", 0)
        # Until 2026-01-04 the official minutes are the logs' within 0.14 s. Later ones are counted
        # on from record to record, and lie 1.07, 1.29 and -1.13 s above the logs' mean.
        # GPT-2 medium's minutes have one digit.
        error = 0.2 if name < "2026-01-05" else 3 if name.startswith("medium") else 1.3
        assert row["seconds"][str(last)] == pytest.approx(60 * row["minutes"], abs=error)
        if name in RECORDS:
            hp = RECORDS[name]
            assert hp.num_iterations == last and steps == [*range(0, last, hp.val_loss_every)]


ROWS = [line.split() for line in five_minutes.__doc__.splitlines() if "e1" in line]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_record_trains_20_tokens_a_parameter_in_about_five_minutes_at_the_assumed_rate(row):
    name, rate, budget, parameters, tokens, cost, seconds, batch, steps = row
    hp = five_minutes.RECORDS[name]
    with torch.device("meta"):
        model = train_gpt.GPT(hp)
    embeddings = sum(p.numel() for table in model.tables() for p in table.parameters())
    scalars = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    count = sum(p.numel() for p in model.parameters()) - embeddings - scalars
    read = hp.num_iterations * hp.batch_seqs * hp.seq_len
    assert read / count == pytest.approx(20, abs=0.02)
    assert count / 1e6 == pytest.approx(float(parameters.removesuffix("M")), rel=3e-3)
    assert read / 1e6 == pytest.approx(float(tokens.removesuffix("M")), rel=3e-3)
    assert [int(steps), int(batch)] == [hp.num_iterations, hp.batch_seqs * hp.seq_len]
    assert float(cost) == pytest.approx(6 * count * read, rel=5e-3)
    assert float(budget) == pytest.approx(300 * 1e12 * float(rate), rel=5e-3)
    assert float(seconds) == pytest.approx(6 * count * read / (1e12 * float(rate)), abs=1)
    assert float(seconds) == pytest.approx(300, rel=0.07)


# -----------------------------------------------------------------------------
# tools/records.py

ONE_H100, H100S = "1 x NVIDIA H100 80GB HBM3", "8 x NVIDIA H100 80GB HBM3"
ANVIL = "2026-08-30_ANVIL2"


@pytest.fixture
def printed(tool):
    """Return printed(words): it calls the tool, and returns the cells of each line."""
    return lambda *words: [
        re.split("  +", line.strip()) for line in tool(records.main, words)[1].splitlines()
    ]


def write_log(path, record: str, curve: dict, place: str = H100S, data: str = "fineweb"):
    """Write the log of a run of 1600 steps; `curve` has losses and seconds by step."""
    results = [f"record {record} --muon_lr 0.1", f"on {place}, log in logs/it.txt"]
    for step, (loss, seconds) in curve.items():
        times = f"train_time:{1000 * seconds:.0f}ms step_avg:100.00ms"
        results.append(f"step:{step}/1600 val_loss:{loss:.4f} {times}")
    files = f"train_files: {data}_train_*.bin\nval_files: {data}_val_*.bin"
    path.write_text(f"\n{RULE}\n".join(["source", "torch 2.11.0", files, "\n".join(results)]))
    return path


def test_diff_prints_what_two_records_differ_in_and_nothing_else(printed):
    _, *rows = printed("--diff", "2024-11-24_WindowWarmup", "2024-11-19_FlexAttention")
    assert len(rows) == 7 and rows[0] == ["num_iterations", "1750", "1875"]
    assert rows[4] == ["adam_betas", "0.8 0.95", "0.9 0.95"]
    # Of scripts, one that has both records is taken.
    assert ["ngram_rows", "200000", "0"] in printed("--diff", "demo", "demo-89")


@pytest.mark.parametrize("place", [ONE_H100, H100S])
def test_losses_are_beside_the_published_ones_of_their_steps(place, printed, tmp_path):
    curve = {0: (10.83, 0), 250: (4.5807, 62.0), 260: (4, 70), 1600: (3.275, 754)}
    rows = [["250", "4.5807", "4.5851", "-0.0044"], ["1600", "3.2750", "3.2777", "-0.0027"]]
    if place == ONE_H100:  # only there, a published run on one H100 and times tell something
        rows[0] += ["4.5707", "62.0", "63.6", "-1.6"]
        rows[1] += ["3.2784", "754.0", "754.4", "-0.4"]
    log = write_log(tmp_path / "it.txt", "2026-01-19_BigramHashEmbedding", curve, place)
    *found, (spread,), (target,), (flags,) = printed(log)[3:]
    assert found == rows and flags.endswith(": --muon_lr 0.1")
    assert spread == "3.2750 is outside the published spread, 3.2777 +- 2 x 0.0011"
    assert target.startswith("the target of 3.28 is reached")


def test_medium_is_beside_its_own_target_and_curve(printed, tmp_path):
    log = write_log(tmp_path / "it.txt", "medium_2025-01-18", {125: (4.5, 25), 1600: (2.921, 400)})
    row, (target,), _ = printed(log)[2:]
    assert row == ["125", "4.5000", "4.5156", "-0.0156"]
    assert target.startswith("the target of 2.92 is missed by 0.00100; ")


@pytest.mark.parametrize(("flags", "mean"), [("", 3.2756), (" --canonical_mask off", 3.2773)])
def test_record_92_is_compared_with_the_form_that_it_has(flags, mean, printed, tmp_path):
    """With the mask of its last validation, and without; the logs in its folder are without."""
    log = write_log(tmp_path / "it.txt", f"{ANVIL}{flags}", {1194: (3.3, 40), 1600: (3.28, 60)})
    assert f"published spread, {mean} +- 2 x 0.0010" in str(printed(log))
    log = tmp_path / ANVIL / "public.txt"
    log.parent.mkdir()
    step = "step:1194/1194 val_loss:3.2775 train_time:39900ms step_avg:33.42ms"
    log.write_text(f"source\n{RULE}\n{step}\n")
    assert "published spread, 3.2773 +- 2 x 0.0010" in str(printed(log))


def test_records_are_listed_with_their_steps_and_published_results(printed):
    """One of GPT-2 medium was published in one run, and one in two forms."""
    rows = [" ".join(row) for row in printed("train_gpt.py") + printed("train_gpt_2026_08.py")]
    for row in (
        "medium_2025-01-18 7500 29.3 2.9166",
        "2026-08-30_ANVIL2 1194 0.682 3.2756 ± 0.0010, 3 runs",
        "2026-08-30_ANVIL2 --canonical_mask off 1194 0.665 3.2773 ± 0.0010, 18 runs",
    ):
        assert row in rows


def test_what_cannot_be_compared_is_said_in_one_line(tool, tmp_path):
    other = write_log(tmp_path / "it.txt", "2025-01-26_BatchSize", {0: (10.8, 0)}, data="mine")
    for words, reason in (
        ([other], "nothing is published"),
        (["no_such.txt"], "No such file"),
        ([other, other], "name one log, not 2: tools/leaderboard.py"),
    ):
        status, out, err = tool(records.main, words)
        assert (status, out, err.count("\n")) == (1, "", 1) and reason in err
