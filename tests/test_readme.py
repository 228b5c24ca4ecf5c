"""The fork that README shows trains as it says; files and flags that README names exist."""

import re

import torch
import train_gpt_2026
import train_gpt_track3
from runs import rows
from test_scripts import launched

import train_gpt
from train_gpt import HERE

README = (HERE / "README.md").read_text("utf-8")
FORK = re.search(r"```python\n(.*?)```", README, re.S)[1]
STEPS = 4


def gelu_mlp(mlp):
    """Return the MLP as a function of x, with GELU from its definition by the error function."""

    def forward(x):
        h = x @ mlp.c_fc.weight.T
        return (h * (0.5 + 0.5 * torch.erf(h / 2**0.5))) @ mlp.c_proj.weight.T

    return forward


def test_files_and_flags_that_readme_names_exist():
    for path in set(re.findall(r"\b(?:forks|tests|tools)/(?!my_)[\w/]+\.\w+", README)):
        assert (HERE / path).exists(), path
    known = set()
    for script in (train_gpt, train_gpt_2026, train_gpt_track3):
        known |= vars(script.Hyperparameters()).keys()
    for path in (HERE / "train_gpt.py", *HERE.glob("tools/*.py"), *HERE.glob("data/*.py")):
        known |= {*re.findall(r'"--(\w+)', path.read_text("utf-8"))}
    commands = " ".join(re.findall(r"\./run\.sh[^`\n]*", README))
    assert {*re.findall(r"--(\w+)", commands)} <= known


def test_the_fork_in_readme_trains_with_its_rule_and_its_activation(flags, tmp_path):
    """In its last step, matrices change by 0.02 of the learning rate, and the loss is that of a GPT
    whose MLP has GELU."""
    (tmp_path / "my_fork.py").write_text(FORK)
    flags = [*flags, "--num_iterations", str(STEPS)]
    saving = ["--save_every", "1", "--keep", "9", "--run_id", "it", "--val_loss_every", "0"]
    launched(["my_fork.py", *flags, *saving], tmp_path)
    before, after = (
        torch.load(tmp_path / f"logs/it/state_step00000{step}.pt", weights_only=True)
        for step in (STEPS - 1, STEPS)
    )
    assert after["script"] == "my_fork.py"

    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    now = train_gpt.moment(STEPS - 1, hp)
    matrices = [n for n in before["model"] if re.fullmatch(r"blocks.*(weight|qkv_w)", n)]
    assert len(matrices) == 4 * hp.num_layers
    for name in matrices:
        change = (after["model"][name] - before["model"][name]).abs()
        wanted = torch.full_like(change, 0.02 * hp.muon_lr * now.lr)
        torch.testing.assert_close(change, wanted, rtol=0, atol=1e-6)

    model = train_gpt.GPT(hp)
    model.load_state_dict(before["model"])
    for block in model.blocks:
        block.mlp.forward = gelu_mlp(block.mlp)
    batches = train_gpt.distributed_data_generator(
        hp.train_files, hp.seq_len, hp.batch_seqs, 0, 1, start_step=STEPS - 1, epochs=0
    )
    inputs, targets = next(batches)
    with torch.no_grad():
        losses = [model(i, t, now.window).item() for i, t in zip(inputs, targets, strict=True)]
    trained = rows(tmp_path / "logs/it.jsonl")[-1]["train_loss"]
    assert abs(sum(losses) / len(losses) - trained) < 1e-5
