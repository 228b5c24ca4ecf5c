"""What only a GPU can show of the frontier. Run with `./run.sh test gpu`."""

from dataclasses import replace

import pytest
import reference
import torch
import train_gpt_2026
from runs import val_losses
from test_gpu import (
    check_attention,
    check_inference,
    check_model,
    check_steps,
    check_twins,
    documents,
    needs_fp8,
    relative_error,
)
from train_gpt_2026 import GPT, RECORDS, Head, Moment, Run

import train_gpt
from train_gpt import HERE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
A, B, C, _, D = (RECORDS[name] for name in list(RECORDS)[:5])


def at_window(window: int, short: int, step: int, hp) -> Moment:
    """Return the moment of a step, with these windows."""
    now = Moment(step, hp)
    now.window, now.short = window, short
    return now


@pytest.mark.parametrize("window", [128, 896, 1792])
def test_flex_attention_by_distance_equals_sdpa_with_gradients(window):
    """With keys of the token before."""
    first = train_gpt_2026.first_visible(documents(4096), torch.tensor(window), "distance")
    check_attention(train_gpt_2026.attend_with_offset, first.cuda(), 0.1)


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_loss_of_three_targets_equals_float64(fp8, monkeypatch):
    """Two chunks, so that the second adds to the first."""
    if fp8:
        needs_fp8()
    monkeypatch.setattr(Head, "chunk_len", lambda self, device: 512)
    head, shares = Head(replace(D, fp8=fp8, tied_frac=0.0)).cuda(), (1.0, 0.5, 0.25)
    head.weight.data.normal_(0, 0.05)
    x = torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50257, (1024,), device="cuda")
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    loss = head.loss(x, targets, shares)
    loss.backward()
    x64 = x.detach().double().requires_grad_()
    w64 = head.weight.detach().double().requires_grad_()
    chances = torch.log_softmax(reference.soft_capped(x64 @ w64.T, (23.0, 5.0, 7.5)), dim=1)
    total = 0.0
    for k, share in enumerate(shares):
        total = total - share * chances[: 1024 - k].gather(1, targets[k:, None]).sum()
    total.backward()
    tolerance = 0.07 if fp8 else 0.02
    mean = -chances.gather(1, targets[:, None]).mean().item()
    assert loss.item() == pytest.approx(mean, rel=2e-3)
    assert relative_error(x.grad, x64.grad) < tolerance
    assert relative_error(head.weight.grad, w64.grad) < tolerance


@pytest.mark.parametrize(
    "record, tied", [(A, False), (B, True), (C, False), (C, True), (D, False), (D, True)]
)
def test_the_model_on_cuda_equals_the_model_on_a_cpu(record, tied, randomize):
    """Also where the head is the embedding, with several targets."""
    hp = replace(record, model_dim=256, num_heads=2, fp8=False)
    now = at_window(384, 128, 0 if tied else hp.num_iterations, hp)
    check_model(lambda: randomize(GPT(hp)), 1024, now)


def test_cached_logits_are_the_uncached_ones_and_packed_scores_those_of_a_cpu(randomize):
    hp = replace(D, model_dim=256, num_heads=2)
    now = at_window(384, 128, hp.num_iterations, hp)
    check_inference(lambda: randomize(GPT(hp)), now, shift=11.5)


def test_a_step_after_warm_up_neither_synchronises_nor_compiles():
    """All stages of a run on four layers of full width."""
    layers = "short+v1+pair,long+v2,short+backout+pair,long+v1+x1+in2"
    sizes = {"num_layers": 4, "seq_len": 2048, "val_seq_len": 8192, "num_iterations": 28}
    check_steps(replace(D, layers=layers, **sizes), Run)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("record", [A, D])
def test_the_loss_s_twin_agrees_with_its_plain_function_at_the_record_s_shapes(record, compiled):
    check_twins("weighted_cross_entropy", record, compiled)


@pytest.mark.parametrize("record", [A, D])
def test_all_kernels_are_found_right_for_the_record(record):
    """A run's own comparison finds that, compiled."""
    kernels, lines = pytest.importorskip("gpu_kernels"), []
    device = torch.device("cuda")
    kernels.choose_kernels(GPT, record, device, train_gpt.all_reduce_, lines.append)
    assert lines == ["kernels: weighted_cross_entropy relu2_mlp symmetric_matmul"]


@pytest.fixture
def on_the_sample(capsys, monkeypatch, tmp_path):
    """Return run(flags): it trains on the sample, prints that, and returns the losses of
    validations, which are on 65536 tokens."""
    monkeypatch.chdir(tmp_path)
    files = f"--train_files {HERE}/data/kjv_train_*.bin --val_files {HERE}/data/kjv_val_*.bin"

    def run(flags: str) -> list[float]:
        files_and_sizes = f"{files} --val_seq_len 65536 --val_tokens 65536 --epochs 0 --keep 0"
        train_gpt.main(f"{files_and_sizes} {flags}".split(), Run)
        text = capsys.readouterr().out
        with capsys.disabled():
            print(f"\n{text}")
        return list(val_losses(text).values())

    return run


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "demo"])
def test_fifty_steps_of_each_record_on_the_sample(name, on_the_sample):
    """Its loss falls."""
    losses = on_the_sample(f"--record {name} --num_iterations 50 --val_loss_every 25")
    tied = RECORDS[name].tied_frac > 0  # then the head does not begin at zero
    assert losses[0] == pytest.approx(10.83 if tied else 10.8258, abs=0.01 if tied else 1e-3)
    assert losses[-1] < losses[1] < (9 if tied else 6.5)
