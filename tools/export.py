"""Export a checkpoint as a model for Hugging Face transformers.

    ./run.sh tools/export.py [CHECKPOINT] --export hf DIR     the newest checkpoint under logs/

DIR then holds weights (safetensors), settings, GPT-2's tokenizer and a modelling file. The model

    transformers.AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

gives the logits that the checkpoint gives in float32. The window is that of the checkpoint's step.
GPT-2's tokenizer needs no code of DIR. But AutoTokenizer does not know the model in config.json:
without the tokenizer's type, it asks whether it may run code of DIR.

    transformers.AutoTokenizer.from_pretrained(DIR, tokenizer_type="gpt2")

Models of train_gpt.py can be exported and, with --same_model, those of forks that do not change the
model.
"""

import argparse
import json
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "data")]
from script import OWN, Checkpoint, parse_with_checkpoint  # noqa: E402

import train_gpt  # noqa: E402
from gpt2 import MERGES, gpt2_tokens  # noqa: E402
from train_gpt import END_OF_TEXT, Hyperparameters, UserError  # noqa: E402

MODELING = Path(__file__).with_name("modeling_speedrun.py")
# Settings that have the same names in the modelling file.
SHARED = (
    "model_dim",
    "num_heads",
    "head_dim",
    "rope",
    "rope_base",
    "norm_eps",
    "window_rule",
    "logit_softcap",
)

# Fields of a layer, and weights, that the modelling file knows.
LAYER_FIELDS = {"window", "values"}
WEIGHTS = re.compile(
    r"(value_embeds\.embed\.\d|embed|lm_head)\.weight|skip_weights"
    r"|blocks\.\d+\.((attn\.)?lambdas|attn\.qkv_w|attn\.c_proj\.weight|mlp\.c_(fc|proj)\.weight)"
)
# A fork's own settings with such names do not change the model.
OF_TRAINING = re.compile(r"(adam|muon|momentum|batch|val|save)_\w+|\w*(_lr|_decay|_steps|stages)")


def unknown_settings(hp: Hyperparameters) -> set[str]:
    """Return the names of settings that may change the model and that train_gpt.py does not have,
    or not with this value."""
    choices = {f.name: get_args(f.type) for f in fields(Hyperparameters)}
    unknown = set()
    for f in fields(hp):
        value = getattr(hp, f.name)
        if f.name not in choices:
            if value != f.default and not OF_TRAINING.fullmatch(f.name):
                unknown.add(f.name)
        elif isinstance(value, str) and choices[f.name] and value not in choices[f.name]:
            unknown.add(f.name)
    return unknown


def check_known(hp: Hyperparameters, model: train_gpt.GPT) -> None:
    """Raise UserError for a model that the modelling file would compute wrongly."""
    unknown = unknown_settings(hp)
    for layer in model.layers:
        for f in fields(layer):
            if f.name not in LAYER_FIELDS and getattr(layer, f.name) != f.default:
                unknown.add(f.name)
    if not unknown:  # else the list would be long
        unknown = {name for name in model.state_dict() if not WEIGHTS.fullmatch(name)}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise UserError(f"{MODELING} does not know {names}: add it there, or export another model")


def hf_config(hp: Hyperparameters, model: train_gpt.GPT, window: int) -> dict:
    """Return config.json: fields of SpeedrunConfig, and where transformers finds the classes."""
    return {
        "model_type": "nanogpt_speedrun",
        "architectures": ["SpeedrunForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING.stem}.SpeedrunConfig",
            "AutoModelForCausalLM": f"{MODELING.stem}.SpeedrunForCausalLM",
        },
        "dtype": "float32",
        "tie_word_embeddings": False,
        **{name: getattr(hp, name) for name in SHARED},
        "layers": [{"window": layer.window, "values": layer.values} for layer in model.layers],
        "attn_scale": hp.attn_scale or hp.head_dim**-0.5,
        "window": window,
        "vocab_size": min(hp.vocab_size, END_OF_TEXT + 1),  # the rest was never trained
        "table_rows": hp.vocab_size,
        "head_rows": hp.padded_vocab,
    }


def export_hf(checkpoint: Checkpoint, folder: Path, same_model: bool = False) -> None:
    """Write the whole folder, or nothing. UserError if it exists, or if a fork saved the checkpoint
    and `same_model` does not confirm that its model is train_gpt.py's."""
    if folder.exists():
        raise UserError(f"{folder} already exists: name a new folder, or remove it")
    model = checkpoint.model(torch.device("cpu"), compile="off")  # fails if the weights do not fit
    check_known(checkpoint.hp, model)
    saved_by = checkpoint.saved.get("script", OWN.name)
    if saved_by != OWN.name and not same_model:
        reason = f"{checkpoint.path} was saved by {saved_by}, whose model may differ"
        raise UserError(f"{reason} from that of {OWN.name}: if it does not, add --same_model")
    # Embeddings that were trained in bfloat16 stay so: transformers makes them float32 again.
    weights = {name: w.contiguous() for name, w in checkpoint.saved["model"].items()}
    tokens = {token: i for i, token in enumerate([*gpt2_tokens(), "<|endoftext|>"])}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    texts = {
        "config.json": hf_config(checkpoint.hp, model, checkpoint.now.window),
        "generation_config.json": {"eos_token_id": END_OF_TEXT, "use_cache": False},
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", **special},
        "vocab.json": tokens,
    }
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir(parents=True)
    try:
        for name, value in texts.items():
            indent = None if name == "vocab.json" else 2
            text = json.dumps(value, indent=indent, ensure_ascii=False)
            (temporary / name).write_text(text, encoding="utf-8")
        shutil.copy(MODELING, temporary)
        shutil.copy(MERGES, temporary / "merges.txt")
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(folder)
    except BaseException as error:
        shutil.rmtree(temporary)
        if isinstance(error, SafetensorError):
            raise UserError(f"could not write {folder}: is the disk full? ({error})") from error
        raise


def export(argv: list[str] | None) -> None:
    """Write the folder that the flags name; UserError if they are invalid."""
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__)
    help_ = "write a Hugging Face model into the new folder DIR"
    parser.add_argument("--export", nargs=2, metavar=("hf", "DIR"), required=True, help=help_)
    text = "confirm that the fork has the model of train_gpt.py"
    parser.add_argument("--same_model", action="store_true", help=text)
    args, checkpoint = parse_with_checkpoint(parser, argv)
    if args.export[0] != "hf":
        raise UserError(f"--export {args.export[0]}: the only format is hf")
    folder = Path(args.export[1])
    export_hf(checkpoint, folder, args.same_model)
    print(f"{checkpoint.path}: exported to {folder}")
    name, auto = repr(str(folder)), "transformers.Auto"
    print("import transformers")
    print(f"model = {auto}ModelForCausalLM.from_pretrained({name}, trust_remote_code=True)")
    print(f'tokenizer = {auto}Tokenizer.from_pretrained({name}, tokenizer_type="gpt2")')


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint. An error is one line and status 1."""
    train_gpt.as_program("export.py", lambda: export(argv))


if __name__ == "__main__":
    main()
