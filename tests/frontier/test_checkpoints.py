"""Checkpoints of the frontier keep all of its settings."""

import dataclasses
import re
from dataclasses import replace
from functools import partial

import pytest
import test_checkpoints
import torch
import train_gpt_2026
from test_checkpoints import typed  # the textbook's
from train_gpt_2026 import RECORDS, Hyperparameters, Run

import train_gpt
from frontier.small_runs import A, checkpoint, main
from train_gpt import HERE, UserError, load_checkpoint, names_about, parse_args

LEARNING = names_about(Hyperparameters, "learning")
NEW = vars(Hyperparameters()).keys() - vars(train_gpt.Hyperparameters()).keys()
# Of a run in which each setting is another one than the record's: what must fit the others.
TINY = {
    "model_dim": 32,
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 50432,
    "seq_len": 128,
    "val_seq_len": 256,
    "val_tokens": 512,
    "batch_seqs": 2,
    "num_iterations": 2,
    "epochs": 0,
    "layers": "long+v0,short+x0",
    "num_layers": 2,
}
NOT_TOGETHER = {"rope", "grad_clip"}  # they do not fit key_offset and adam_every
WITH = {  # settings that cannot be on alone
    "gate_by_values": "--value_gate on",
    "sublayer_lambdas": "--x0_apart on",
}
TEXTS = {
    "layers": "long,short,short,long",
    "stages": "window=256,window=512",
    "adam_groups": "scalar+lr=0.02",
}
another = partial(test_checkpoints.another, texts=TEXTS, check=train_gpt_2026.check)


def test_every_learning_setting_survives_a_checkpoint():
    """A run in which each of them is another one than the record's, but for two that do not fit the
    others; what a machine has is gone. Every new setting is one of learning."""
    assert NEW and NEW.issubset(LEARNING)
    own = RECORDS[A]
    others = [name for name in LEARNING if name not in NOT_TOGETHER | TINY.keys()]
    changed = TINY | {name: another(name, own) for name in others}
    assert all(getattr(own, name) != value for name, value in changed.items())
    words = [word for name, value in changed.items() for word in typed(name, value)]
    words += ["--device", "cpu", "--compile", "off", "--save_every", "2", "--run_id", "it"]
    words += ["--train_files", f"{HERE}/data/kjv_train_*.bin"]
    words += ["--val_files", f"{HERE}/data/kjv_val_*.bin", "--record", A]
    main(words)
    hp = load_checkpoint("logs/it/state_step000002.pt", Run)["hyperparameters"]
    assert {name: getattr(hp, name) for name in changed} == changed
    assert len(changed) == len(LEARNING) - len(NOT_TOGETHER)
    assert hp == replace(parse_args(words, Run)[0], device="auto", compile="auto")
    saved = torch.load("logs/it/state_step000002.pt", weights_only=True)["hyperparameters"]
    names = {f.name for f in dataclasses.fields(Hyperparameters)}
    assert saved.keys() == names - {"device", "compile", "kernels"}


@pytest.mark.parametrize("name", sorted(NEW))
def test_to_resume_with_a_new_setting_changed_is_refused_by_name(name, whole):
    path = str(whole(A).folder / checkpoint(2))
    was = load_checkpoint(path, Run)["hyperparameters"]
    now = another(name, was)
    text = f"{name} {train_gpt.show(getattr(was, name))} -> {train_gpt.show(now)}"
    words = ["--resume", path, *typed(name, now), *WITH.get(name, "").split()]
    with pytest.raises(UserError, match=re.escape(text)):
        parse_args(words, Run)
    hp, _ = parse_args([*words, "--resume_force"], Run)
    assert getattr(hp, name) == now != getattr(was, name)
