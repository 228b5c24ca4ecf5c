"""Settings that cannot be, alone or together, end with one line that names the flag."""

import functools
import re

import pytest

import train_gpt
import train_gpt_2026
import train_gpt_2026_08 as august
from frontier.small_runs import C
from runs import error_of
from train_gpt_2026 import LAYERS_HC

BAD_2026 = f"""save_every 3;grad_clip 1;tied_frac .5 --vocab_size 500 --end_of_text 499
key_offset on --rope full;gate_channels 15;gate_channels 34
layers {LAYERS_HC} --num_layers 8;extension_frac 1;gate_by_values on --value_gate off
stages length=1+widow=2;stages length=two;stages cap=100 --align_to_documents off
adam_groups heads+lr=1;adam_groups head+rate=1;adam_groups head+decay=1 --adam_rule torch
adam_groups head+lr=-1;stages share=0"""
BAD_LATER = {
    "fp8_mlp down": "argument --fp8_mlp",
    "layers short,long,short+pair+composed,long --num_layers 4": "composed, mudd need attention",
    "layers none+v0,long --num_layers 2": "cannot be layer 0 of 2: a layer without attention",
    "layers short,long+narrow --num_layers 2": "cannot be layer 1 of 2: narrow heads",
    "layers short+mudd,long --num_layers 2": "mudd is for the last layer",
    "layers short,long+mudd+bigram --num_layers 2": "adds embeddings and n-grams without these",
    "layers short+v0,long --num_layers 2": "needs a layer with the word bigram or mudd",
    "num_heads 3": "must be even, and model_dim / head_dim",
    "model_dim 8 --head_dim 4 --mlp_width 16": "must be at least 12",
    "stages length=1+window=128+cap=0": "a stage needs a window, a cap above 0, and falls of 0 or",
    "stages length=1+window=128+falls=2": "and falls of 0 or 1",
    "stages length=1+window=1e30": "is not of share=NUMBER",
    "stages length=1+window=128+prefix=1+candidates=.5": "candidates must be multiples of 16",
    "save_every 3": "must be a multiple of 2",
    "mudd_groups 5": "must divide model_dim",
    "tokenizer none": "tokens that are not GPT-2's need --canonical_mask off",
    "stages length=1+candidates=1024+window=128": "--prefix 0.25: needs prefix in --stages",
    "stages length=1+window=128": "needs candidates in --stages",
    "bigram_rows 100": "must be 0 with the table of --ngram_rows",
    "ngram_slow_from 6": "must be a multiple of 4",
    "grad_clip 1": "unknown words: --grad_clip 1",
}
CASES = [
    (train_gpt_2026, words, f"(argument )?--{words.split()[0]}")
    for words in re.split("[;\n]", BAD_2026)
]
CASES += [(august, words, f".*{re.escape(message)}") for words, message in BAD_LATER.items()]


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
