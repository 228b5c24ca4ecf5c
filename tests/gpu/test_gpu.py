"""What only a GPU can show. Run with `./run.sh test gpu`; figures go to BENCHMARKS.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gpt
from train_gpt import GPT, HERE, RECORDS, CastedLinear, HeadLoss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
RECORD = RECORDS["2025-01-26_BatchSize"]
SAMPLE = {"train_files": f"{HERE}/data/kjv_train_*.bin", "val_files": f"{HERE}/data/kjv_val_*.bin"}


def needs_fp8():
    if not train_gpt.fp8_supported(torch.device("cuda")):
        pytest.skip("this GPU has no FP8 matmul (it needs compute capability 8.9)")


def relative_error(a, b) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return ((a - b).norm() / b.norm()).item()


def documents(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
    tokens[torch.randint(0, length, (length // 300,), generator=generator)] = 50256
    tokens[0] = 50256
    return tokens


@pytest.mark.parametrize("window", [128, 896, 1792])
def test_flex_attention_equals_sdpa_with_gradients(window):
    """Compiled FlexAttention in bfloat16 against SDPA in float64 under the dense mask."""
    first = train_gpt.first_visible(documents(4096), torch.tensor(window), "blocks")
    q, k, v, g = (
        torch.randn(1, 6, 4096, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )
    flex = torch.compile(train_gpt.attend, dynamic=False)
    results = []
    for attend, dtype, mask in (
        (flex, torch.bfloat16, train_gpt.flex_mask(first.cuda())),
        (train_gpt.attend, torch.float64, train_gpt.dense_mask(first.cuda())),
    ):
        qkv = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = attend(*qkv, mask, 0.12)
        out.backward(g.to(dtype))
        results.append([out, *(t.grad for t in qkv)])
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 0.02


def test_fp8_linear_equals_float64():
    needs_fp8()
    layer = CastedLinear(768, 50304, True, RECORD.x_s, RECORD.w_s, RECORD.grad_s).cuda()
    x = torch.randn(2048, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer.weight.data.normal_(0, 0.05)
    grad = 2.0**-17 * torch.randn(2048, 50304, device="cuda", dtype=torch.bfloat16)
    out = layer(x)
    out.backward(grad)
    x64, w64, g64 = x.detach().double(), layer.weight.detach().double(), grad.double()
    assert relative_error(out, x64 @ w64.T) < 0.04
    assert relative_error(x.grad, g64 @ w64) < 0.065
    assert relative_error(layer.weight.grad, g64.T @ x64) < 0.065


@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_head_and_loss_equal_float64(fp8):
    if fp8:
        needs_fp8()
    head = CastedLinear(768, 50304, fp8, RECORD.x_s, RECORD.w_s, RECORD.grad_s).cuda()
    head.weight.data.normal_(0, 0.05)
    x = torch.randn(12288, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 50257, (12288,), device="cuda")
    chunk = torch.compile(train_gpt.loss_chunk, dynamic=False)
    scales = head.scales if fp8 else None
    loss = HeadLoss.apply(x, head.weight, targets, 15.0, scales, chunk)
    loss.backward()
    rows = slice(0, 1024)  # float64 logits of all rows would be 4.9 GB
    x64 = x.detach()[rows].double().requires_grad_()
    w64 = head.weight.detach().bfloat16().double().requires_grad_()
    capped = 15 * torch.tanh(x64 @ w64.T / 15)
    torch.nn.functional.cross_entropy(capped, targets[rows], reduction="sum").div(12288).backward()
    assert relative_error(x.grad[rows], x64.grad) < (0.07 if fp8 else 0.02)
    with torch.no_grad():
        plain = HeadLoss.apply(x, head.weight, targets, 15.0, None, chunk)
    assert loss.item() == pytest.approx(plain.item(), rel=2e-3)
    assert head.weight.grad.isfinite().all()


def test_the_model_on_cuda_equals_the_model_on_a_cpu(randomize):
    """Loss and gradients of all layers: bfloat16, compiled and FlexAttention against float32."""
    hp = replace(RECORD, model_dim=256, num_heads=2, fp8=False)
    tokens = documents(1025)
    results = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = randomize(GPT(hp)).to_device(device, compiled=device.type == "cuda")
        inputs, targets = tokens[:-1].to(device), tokens[1:].long().to(device)
        loss = model(inputs, targets, 384)
        loss.backward()
        grads = {
            n: getattr(p, "grad32", p.grad) for n, p in model.named_parameters() if p.ndim >= 2
        }
        results.append((loss.item(), grads))
    (cpu_loss, cpu_grads), (cuda_loss, cuda_grads) = results
    assert cuda_loss == pytest.approx(cpu_loss, rel=1e-2)
    for name, grad in cpu_grads.items():
        assert relative_error(cuda_grads[name], grad) < 0.1, name


def run(capsys, monkeypatch, folder: Path, *flags) -> str:
    monkeypatch.chdir(folder)
    train_gpt.main([word for flag in flags for word in flag.split()])
    text = capsys.readouterr().out
    with capsys.disabled():
        print(f"\n{text}")
    return text


def test_fifty_steps_of_the_record_on_the_sample(capsys, monkeypatch, tmp_path):
    """The full-size record, its loss falling, in less memory than the published run's 29.9 GiB."""
    files = " ".join(f"--{name} {value}" for name, value in SAMPLE.items())
    text = run(
        *(capsys, monkeypatch, tmp_path),
        "--record 2025-01-26_BatchSize --num_iterations 50 --val_loss_every 25",
        f"--val_seq_len 65536 --val_tokens 65536 {files}",
    )
    losses = [float(x) for x in re.findall(r"val_loss:(\d+\.\d+)", text)]
    assert losses[0] == pytest.approx(10.8258, abs=1e-3)
    assert losses[2] < losses[1] < 6.5
    allocated = int(re.search(r"allocated: (\d+) MiB", text)[1])
    assert allocated < 29898


@pytest.mark.parametrize("window", [128, 896, 1792])
def test_speed_of_the_record_at_one_window(window, capsys, monkeypatch, tmp_path):
    """Thirty steps at a fixed window; prints ms/step and memory, asserts only that it runs."""
    files = " ".join(f"--{name} {value}" for name, value in SAMPLE.items())
    text = run(
        *(capsys, monkeypatch, tmp_path),
        f"--record 2025-01-26_BatchSize --num_iterations 30 --val_loss_every 0 {files}",
        f"--window_min {window} --window_span 0 --val_seq_len 65536 --val_tokens 65536",
    )
    assert "step:30/30 val_loss:" in text
