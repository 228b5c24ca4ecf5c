"""A model exported to Hugging Face transformers is the model that was trained."""

import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import export
import pytest
import torch
from conftest import at_window
from runs import console_of
from sample import gpt2_encoding
from script import Checkpoint

import train_gpt
from train_gpt import END_OF_TEXT, RECORDS, UserError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


SMALL = {"model_dim": 32, "num_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("record", ["2024-11-24_WindowWarmup", "2025-01-26_BatchSize"])
@torch.inference_mode()
def test_exported_logits_are_those_of_the_model(record, randomize, tmp_path):
    """Both kinds of models, with embeddings in bfloat16 as after training on a GPU."""
    hp = replace(RECORDS[record], num_layers=6, **SMALL)
    model = randomize(train_gpt.GPT(hp))
    for table in (model.embed, *model.value_embeds["embed"].values()):
        table.bfloat16()
    saved = {"model": model.state_dict(), "step": hp.num_iterations // 8}
    checkpoint = Checkpoint(tmp_path / "it.pt", saved, hp, train_gpt.Run)
    export.export_hf(checkpoint, tmp_path / "hf")
    found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", trust_remote_code=True
    )
    assert found.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(50256, (2, 384), generator=generator)
    x[0, [0, 30, 40]] = x[1, 100] = END_OF_TEXT
    now, model = train_gpt.Moment(saved["step"], hp), model.float().eval()
    assert now.window == 256
    expected, answer = (
        torch.stack([model.lm_head.logits(model.hidden(row, now)) for row in x]),
        found(x, labels=x),
    )
    assert torch.allclose(answer.logits, expected[..., :50257], atol=1e-5)
    chances = expected.double().softmax(2)[:, :-1].gather(2, x[:, 1:, None])
    assert answer.loss.item() == pytest.approx(-chances.log().mean().item(), rel=1e-5)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> SimpleNamespace:
    """Export the trained model; return the folder and what was printed."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    words = [trained.path, "--export", "hf", folder, "--device", "cpu"]
    return SimpleNamespace(folder=folder, console=console_of(words, folder.parent, export.main))


@torch.inference_mode()
def test_the_printed_code_loads_a_model_that_writes_the_same_text(trained, exported):
    first, *code = exported.console.splitlines()
    assert first == f"{trained.path}: exported to {exported.folder}"
    names = {}
    exec("\n".join(code), names)
    model = names["model"]
    text = "<|endoftext|>In the beginning\n\n  naïve 🙂"
    assert names["tokenizer"](text).input_ids == gpt2_encoding().encode(text, allowed_special="all")

    saved = train_gpt.load_checkpoint(trained.path, train_gpt.Run)
    hp = saved["hyperparameters"]
    plain = train_gpt.GPT(hp).eval()
    plain.load_state_dict(saved["model"])
    prompt = torch.tensor([[END_OF_TEXT, 818, 262, 3726]])
    written = model.generate(prompt, max_new_tokens=20, do_sample=False)[0]
    assert written[:4].equal(prompt[0]) and len(written) == 24
    padded = torch.nn.functional.pad(written, (0, 128 - len(written)))
    likeliest = plain.lm_head.logits(plain.hidden(padded, at_window(256, hp)))[:, :50257].argmax(1)
    assert written[4:].equal(likeliest[3:23])

    padding = torch.full((1, 3), END_OF_TEXT)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    a = model(torch.cat([padding, prompt], 1), attention_mask=mask).logits[0, 3:]
    assert torch.allclose(a, model(prompt).logits[0], atol=1e-5)


TEXTS = (
    "<|endoftext|>And<|endoftext|><|endoftext|> God said",
    "they'll DON'T  1234 56,789.0   spaces\n\n\ttabs \r\n\u00a0\u3000 and an end  ",
    "naïve Здравствуй 中文字符 हिन्दी e\u0301 🙂👩‍👩‍👧 \x00\ufeff ½ Ⅻ",
    "",
)


def test_the_tokenizer_is_gpt2s_and_runs_no_code(exported, tmp_path):
    for path in exported.folder.glob("*.[jt]*"):  # all but weights and code
        shutil.copy(path, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, tokenizer_type="gpt2")
    encoding = gpt2_encoding()
    for text in TEXTS:
        ids = encoding.encode(text, allowed_special="all")
        assert tokenizer(text).input_ids == ids and tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == END_OF_TEXT


def test_a_weight_that_the_modelling_file_does_not_know_is_refused_by_name(tiny):
    model = train_gpt.GPT(tiny)
    export.check_known(tiny, model)
    model.blocks[0].attn.gate = torch.nn.Linear(12, 2, bias=False)
    with pytest.raises(UserError, match=r"does not know blocks\.0\.attn\.gate\.weight:"):
        export.check_known(tiny, model)


@dataclass(frozen=True)
class Forked(train_gpt.Hyperparameters):
    gelu: bool = False  # another MLP
    muon_noise: float = 0.0  # noise


def test_settings_of_a_fork_that_may_change_a_model_are_refused_by_name(tiny):
    model = train_gpt.GPT(tiny)
    export.check_known(Forked(**vars(tiny), muon_noise=0.1), model)
    with pytest.raises(UserError, match="does not know gelu: add it there"):
        export.check_known(Forked(**vars(tiny), gelu=True), model)


def test_a_fork_s_model_is_exported_only_if_it_is_said_to_be_the_same(trained, tmp_path):
    saved = torch.load(trained.path, weights_only=True) | {"script": "my_fork.py"}
    path = tmp_path / "it.pt"
    torch.save(saved, path)
    words = [str(path), "--script", train_gpt.__file__, "--export", "hf", str(tmp_path / "hf")]
    with pytest.raises(UserError, match="was saved by my_fork.py, whose model may differ"):
        export.export(words)
    assert not (tmp_path / "hf").exists()
    export.export([*words, "--same_model"])
    assert (tmp_path / "hf/config.json").exists()
