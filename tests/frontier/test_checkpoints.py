"""Checkpoints of the frontier keep all of its settings."""

import re
from dataclasses import replace

import pytest
from train_gpt_2026 import RECORDS, Hyperparameters, Run

import train_gpt
from frontier.small_runs import A, checkpoint, main
from train_gpt import HERE, UserError, load_checkpoint, newest_checkpoint, parse_args, show

NEW = sorted(vars(Hyperparameters()).keys() - vars(train_gpt.Hyperparameters()).keys())
TEXTS = {"stages": "window=256,window=512", "adam_groups": "scalar+lr=0.02", "adam_rule": "torch"}
SIZES = (
    "--model_dim 32 --num_heads 4 --head_dim 16 --seq_len 128 --val_seq_len 256 --val_tokens 512 "
    "--batch_seqs 2 --num_iterations 2 --epochs 0 --layers long+v0,short+x0 --num_layers 2 "
    f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin "
    "--device cpu --save_every 2 --run_id it"
)


def another(name: str, value):
    """Return a value of a new setting that differs from this one, of row A."""
    if isinstance(value, str):
        return TEXTS[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(x / 3 for x in value)
    return value / 3 or 0.5 if isinstance(value, float) else value * 2 or 2


def test_all_new_settings_are_saved_to_the_last_digit():
    """All differ from the record's."""
    words = ["--record", A, *SIZES.split()]
    for name in NEW:
        words += [f"--{name}", *show(another(name, getattr(RECORDS[A], name))).split(" ")]
    main(words)
    found = load_checkpoint("logs/it/state_step000002.pt", Run)["hyperparameters"]
    assert found == parse_args(words, Run)[0]
    assert not [name for name in NEW if getattr(found, name) == getattr(RECORDS[A], name)]


@pytest.mark.parametrize("name", NEW)
def test_to_go_on_with_a_new_setting_changed_is_refused_by_name(name, whole, monkeypatch):
    monkeypatch.chdir(whole(A).folder)
    was = load_checkpoint(checkpoint(8), Run)["hyperparameters"]
    now = replace(was, resume=True, **{name: another(name, getattr(was, name))})
    with pytest.raises(UserError, match=re.escape(f" --{name} {show(getattr(now, name))}")):
        newest_checkpoint(Run, now)
