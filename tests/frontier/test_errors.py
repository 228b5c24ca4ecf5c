"""Settings that cannot be, alone or together, end with one line that names the flag."""

import functools
import re

import pytest

import train_gpt
import train_gpt_2026
import train_gpt_2026_07 as july
import train_gpt_2026_08 as august
from frontier.small_runs import C
from runs import error_of
from train_gpt_2026 import LAYERS_HC

BAD_2026 = f"""save_every 3;grad_clip 1;tied_frac .5 --vocab_size 500;key_offset on --rope full
layers {LAYERS_HC} --num_layers 8;extension_frac 1;gate_by_values on --value_gate off
stages length=1+widow=2;stages length=two;stages cap=100 --align_to_documents off
adam_groups heads+lr=1;adam_groups head+rate=1;adam_groups head+decay=1 --adam_rule torch"""
BAD_JULY = """fp8_mlp down;attention_gate on;layers short,long,short+pair+composed,long"""
BAD_AUGUST = {
    "layers long+narrow,long --num_layers 2": "narrow heads are short",
    "mudd_groups 5": "must divide model_dim",
    "vocab_size 512": "is for GPT-2's tokens",
    "loss_sum off": "FP8 in all layers needs it",
    "stages length=1+candidates=10240+window=128": "--prefix 0.25: needs prefix in --stages",
    "stages length=1+window=128": "needs candidates in --stages",
    "bigram_rows 100": "needs --bigram_rows 0",
    "adam_every 0": "needs --ngram_slow_from a multiple of 4, --adam_every 2",
    "grad_clip 1": "is not possible with the n-gram table, which --ngram_rows 0 turns off",
    "grad_clip 1 --ngram_rows 0": "needs --adam_every 1",
}
CASES = [
    (train_gpt_2026, words, f"(argument )?--{words.split()[0]}")
    for words in re.split("[;\n]", BAD_2026)
]
CASES += [(july, words, f".*--{words.split()[0]}") for words in re.split("[;\n]", BAD_JULY)]
CASES += [(august, words, f".*{re.escape(message)}") for words, message in BAD_AUGUST.items()]


def test_what_errors_ask_for_leads_to_a_clipped_gradient():
    words = ["--record", "demo", "--grad_clip", "1", "--ngram_rows", "0", "--adam_every", "1"]
    assert train_gpt.parse_args(words, august.Run)[0].grad_clip == 1


@pytest.mark.parametrize(("script", "words", "message"), CASES)
def test_a_bad_value_ends_with_one_line_that_names_its_flag(
    script, words, message, flags, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: pytest.fail("it trains"))
    usual = flags[C] if script is train_gpt_2026 else ["--record", "demo"]
    main = functools.partial(train_gpt.main, run=script.Run)
    status, err = error_of([*usual, *f"--{words}".split()], capsys, main)
    assert status == 1 and re.match(f"{script.__name__}.py: error: {message}", err), err
    assert not list(tmp_path.iterdir())
