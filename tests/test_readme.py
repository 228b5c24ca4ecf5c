"""README's fork and README's technique do what README says; its files and flags exist."""

import re
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch

import script
import train_gpt
from runs import rows
from test_scripts import launched
from train_gpt import HERE

README = (HERE / "README.md").read_text("utf-8")
FORK = re.search(r"```python\n(.*?)```", README, re.S)[1]
OF_FORKS = (HERE / "forks" / "README.md").read_text("utf-8")
TECHNIQUE = re.search(r"```diff\n(.*?)```", OF_FORKS, re.S)[1]
STEPS = 4


def gelu_mlp(mlp, x):
    """Return what the MLP would with GELU, from its definition by the error function."""
    h = x @ mlp.c_fc.weight.T
    return (h * (0.5 + 0.5 * torch.erf(h / 2**0.5))) @ mlp.c_proj.weight.T


def test_files_and_flags_that_readme_names_exist():
    for path in set(re.findall(r"\b(?:forks|tests|tools)/(?!my_)[\w/]+\.\w+", README)):
        assert (HERE / path).exists(), path
    known = set()
    for path in script.of_project():
        run = script.load(path)
        known |= vars(run.records[run.default_record]).keys()
    for path in (HERE / "train_gpt.py", *HERE.glob("tools/*.py"), *HERE.glob("data/*.py")):
        known |= {*re.findall(r'"--(\w+)', path.read_text("utf-8"))}
    commands = " ".join(re.findall(r"\./run\.sh[^`\n]*", README))
    assert {*re.findall(r"--(\w+)", commands)} <= known


def test_the_fork_in_readme_trains_with_its_rule_and_its_activation(flags, tmp_path):
    """In its last step, matrices change by 0.02 of the learning rate, and the loss is that of a GPT
    whose MLP has GELU."""
    (tmp_path / "my_fork.py").write_text(FORK)
    flags = [*flags, "--num_iterations", str(STEPS), "--fp8", "off"]
    saving = ["--save_every", "1", "--keep", "9", "--run_id", "it", "--val_loss_every", "0"]
    launched(["my_fork.py", *flags, *saving], tmp_path)
    before, after = (
        torch.load(tmp_path / f"logs/it/state_step00000{step}.pt", weights_only=True)
        for step in (STEPS - 1, STEPS)
    )
    assert after["script"] == "my_fork.py"

    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    now = train_gpt.Moment(STEPS - 1, hp)
    matrices = [n for n in before["model"] if re.fullmatch(r"blocks.*(weight|qkv_w)", n)]
    assert len(matrices) == 4 * hp.num_layers
    for name in matrices:
        change = (after["model"][name] - before["model"][name]).abs()
        wanted = torch.full_like(change, 0.02 * hp.muon_lr * now.lr)
        torch.testing.assert_close(change, wanted, rtol=0, atol=1e-6)

    model = train_gpt.GPT(hp)
    model.load_state_dict(before["model"])
    for block in model.blocks:
        block.mlp.forward = partial(gelu_mlp, block.mlp)
    size = hp.batch_seqs * hp.seq_len
    tokens = train_gpt.load_data_shard(tmp_path / "train_1.bin")[(STEPS - 1) * size :][: size + 1]
    tokens = torch.from_numpy(tokens.astype("int64"))
    inputs, targets = (part.view(-1, hp.seq_len) for part in (tokens[:-1], tokens[1:]))
    with torch.no_grad():
        losses = [model(i, t, now).item() for i, t in zip(inputs, targets, strict=True)]
    trained = rows(tmp_path / "logs/it.jsonl")[-1]["train_loss"]
    assert abs(sum(losses) / len(losses) - trained) < 1e-5


def test_the_technique_in_readme_scales_heads_and_learns(tiny, randomize, monkeypatch):
    """The model without the technique has the same logits if the gain of a head scales the head's
    columns of the output projection. Adam's first step has the size of the learning rate."""
    source = (HERE / "train_gpt.py").read_text("utf-8")
    for hunk in re.split(r"^@@.*\n", TECHNIQUE, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(before) == 1, hunk
        source = source.replace(before, after)
    changed = ModuleType("train_gpt_with_gain")
    changed.__file__ = str(HERE / "train_gpt.py")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)  # dataclasses look for it
    exec(compile(source, changed.__file__, "exec"), vars(changed))

    hp = changed.Hyperparameters(**{**vars(tiny), "head_gain": True, "batch_seqs": 1})
    model = randomize(changed.GPT(hp))
    plain = changed.GPT(replace(hp, head_gain=False))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    gains = {name: weights.pop(name) for name in list(weights) if name.endswith("attn.gain")}
    assert len(gains) == hp.num_layers
    for name, gain in gains.items():
        weights[name.replace("gain", "c_proj.weight")] *= gain.repeat_interleave(hp.head_dim)
    plain.load_state_dict(weights)
    tokens, now = torch.arange(hp.seq_len) * 7 % hp.vocab_size, train_gpt.Moment(0, hp)
    torch.testing.assert_close(plain.hidden(tokens, now), model.hidden(tokens, now))

    optimizers = changed.Optimizers(model, hp)
    changed.train_step(model, optimizers, tokens[None], tokens[None], now)
    for name, gain in gains.items():
        change = (model.get_parameter(name) - gain).abs()
        torch.testing.assert_close(change, torch.full_like(gain, hp.scalar_lr * now.lr))
