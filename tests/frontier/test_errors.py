"""Settings that cannot be, alone or together, end with one line that names the flag."""

import re

import pytest

import train_gpt
from frontier.small_runs import C, main
from runs import error_of
from train_gpt_2026 import LAYERS_HC

BAD = f"""save_every 3;grad_clip 1;adam_every 0;logit_sigmoid 23 5 0;logit_sigmoid -1 5 1
tied_frac .5 --vocab_size 500;key_offset on --rope full
yarn on --stages length=1,length=2;yarn on --stages window=128,length=2
layers {LAYERS_HC} --num_layers 8;layers long,long+backout,long+backout,long
val_tokens 1000;extension_frac .9 --num_iterations 1;extension_frac 1
stages foo;stages length=1+widow=2;stages length=two;stages length=0
stages length=nan;stages length=1/2;stages length=1.5;stages lr=1/2;stages lr=nan;stages lr=-1
stages cap=100 --align_to_documents off;stages length=1+cap=.5;stages ,
adam_groups heads+lr=1;adam_groups muon+lr=1;adam_groups lr=1;adam_groups head+rate=1
bigram_rows 1;bigram_rows -1;paired_heads on --num_heads 3;gate_by_values on --value_gate off
sublayer_lambdas on --x0_apart off;layers none,long,long,long --sublayer_lambdas on
adam_groups head+lr=x;adam_groups head+lr=1/2;adam_groups head+lr=-1
adam_groups head+lr=1,head+beta1=.5
adam_groups head+decay=1 --adam_rule torch;num_layers 6 --layers long,long,long,long"""


@pytest.mark.parametrize("words", re.split("[;\n]", BAD))
def test_a_bad_value_ends_with_one_line_that_names_its_flag(
    words, flags, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: pytest.fail("it trains"))
    status, err = error_of([*flags[C], *f"--{words}".split()], capsys, main)
    name = words.split()[0]
    begins = f"train_gpt_2026.py: error: --{name}", f"train_gpt_2026.py: error: argument --{name}"
    assert status == 1 and err.startswith(begins)
    assert not list(tmp_path.iterdir())
