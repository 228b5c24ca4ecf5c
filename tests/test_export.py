"""A model exported to Hugging Face transformers is the model that was trained."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import export
import train_gpt
import train_gpt_2026
from frontier.small_runs import ROW, SIZES, D
from runs import console_of
from tokenizer import GPT2, gpt2_merges, gpt2_tokens
from train_gpt import HERE

pytest.importorskip("transformers", reason="transformers is not installed")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

RECORDS = {
    train_gpt: "--record medium --num_layers 6 --model_dim 32 --num_heads 2 --head_dim 16",
    train_gpt_2026: f"{ROW[D]} {SIZES}",
}
TEXTS = (
    "<|endoftext|>And<|endoftext|><|endoftext|> God said they'll DON'T  1234 56,789.0 \n\n\ttabs ",
    "naïve Здравствуй 中文字符 हिन्दी e\u0301 🙂👩‍👩‍👧 \x00\ufeff ½ Ⅻ\u00a0\u3000  ",
    "it's don't you're we've I'm they'll he'd IT'S '90s",
)
END_OF_TEXT = 4090
PROMPT = [END_OF_TEXT, 818, 262, 3726]
# What the printed code is followed by.
USE = f"""
import torch
torch.set_grad_enabled(False)
x, padding = torch.load("FOLDER/x.pt"), torch.full((1, 3), {END_OF_TEXT})
seen = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
answers = {{
    "logits": model(x).logits,
    "loss": model(x, labels=x).loss.item(),
    "padded": model(torch.cat([padding, x[:1, :4]], 1), attention_mask=seen).logits[0, 3:],
    "written": model.generate(x[:1, :4], max_new_tokens=9, do_sample=False)[0].tolist(),
    "ids": [tokenizer(text).input_ids for text in {TEXTS!r}],
}}
for name in ("output_hidden_states", "output_attentions"):
    try:
        answers[name] = model(x, **{{name: True}}) and ""
    except ValueError as error:
        answers[name] = str(error)
answers["texts"] = [tokenizer.decode(ids) for ids in answers["ids"]]
torch.save(answers, "FOLDER/answers.pt")
"""


def write_checkpoint(of, path: Path, tokenizer: str) -> tuple[torch.nn.Module, train_gpt.Moment]:
    """Write a checkpoint with random weights, of a script's record. Return its model and moment."""
    words = f"{RECORDS[of]} --tokenizer {tokenizer} --vocab_size 4096 --end_of_text {END_OF_TEXT}"
    hp, record = train_gpt.parse_args(words.split(), of.Run)
    model = of.Run.GPT(hp)
    torch.manual_seed(0)
    for p in model.parameters():
        p.data = torch.rand(p.shape) * p.size(-1) ** -0.5
    state = {"script": f"{of.__name__}.py", "record": record, "hyperparameters": dict(vars(hp))}
    step = hp.num_iterations // 8
    torch.save(state | {"step": step, "seconds": 1.0, "model": model.state_dict()}, path)
    return model.eval(), of.Run.Moment(step, hp)


def write_tokenizer(path: Path) -> None:
    """Write GPT-2's first tokens as a tokenizer.json."""
    first = GPT2(END_OF_TEXT)
    merges = [tuple(line.split(" ")) for line in gpt2_merges(END_OF_TEXT)[1:]]
    ids = {token: i for i, token in enumerate([*gpt2_tokens(END_OF_TEXT), first.mark])}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([first.mark])
    tokenizer.save(str(path))


def refuse(*arguments, **options) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize(
    ("of", "folder", "tokenizer", "modes"),
    [(train_gpt, HERE, "gpt2", 1), (train_gpt_2026, ".", "own.json", 2)],
)
@torch.inference_mode()
def test_the_printed_code_gives_the_script_s_model_and_tokenizer(
    of, folder, tokenizer, modes, elsewhere, tmp_path, monkeypatch
):
    """In the project's folder, whose modules it can import, and in one without them, on a disk that
    refuses other modes, such as exFAT."""
    if modes > 1:
        monkeypatch.setattr(os, "chmod", refuse)
    write_tokenizer(tmp_path / "own.json")
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path / "hf"))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH")
    model, now = write_checkpoint(of, tmp_path / "it.pt", tokenizer)
    words = ["it.pt", "--export", "hf", "exported", "--device", "cpu"]
    code = console_of(words, tmp_path, export.main).partition("\n")[2]
    assert "logs" not in code and "_files" not in Path("exported/config.json").read_text()
    x = torch.randint(END_OF_TEXT, (2, 384), generator=torch.Generator().manual_seed(0))
    x[0, :4] = torch.tensor(PROMPT)
    x[0, [30, 40]] = x[1, 100] = END_OF_TEXT
    torch.save(x, "x.pt")
    assert len({path.stat().st_mode for path in Path("exported").glob("*.*")}) == modes
    code = (code + USE).replace("FOLDER", str(tmp_path))
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    found = torch.load("answers.pt")

    expected = torch.stack([model.lm_head.logits(model.hidden(row, now)) for row in x])
    expected = expected[..., : END_OF_TEXT + 1]
    assert found["logits"].equal(expected)
    chances = found["logits"].double().log_softmax(2)[:, :-1].gather(2, x[:, 1:, None])
    assert found["loss"] == pytest.approx(-chances.mean().item(), rel=1e-5)
    written = list(PROMPT)
    for _ in range(9):
        block = torch.tensor(written + [0] * (128 - len(written)))
        hidden = model.hidden(block, now)
        logits = model.lm_head.logits(hidden[: len(written)])[:, : END_OF_TEXT + 1]
        written.append(logits[-1].argmax().item())
    assert found["written"] == written
    # As many rows as there: with AVX-512, a matmul of another number of rows rounds otherwise.
    assert found["padded"].equal(model.lm_head.logits(hidden[:4])[:, : END_OF_TEXT + 1])
    encoding = GPT2(END_OF_TEXT).encoding
    assert found["ids"] == [encoding.encode(text, allowed_special="all") for text in TEXTS]
    assert found["texts"] == list(TEXTS)
    for name in ("output_hidden_states", "output_attentions"):
        assert found[name] == f"{name}: this model returns logits alone, so leave it out"
