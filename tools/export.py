"""Give a checkpoint to other programs: --export hf DIR makes a model for transformers.

    ./run.sh tools/export.py [CHECKPOINT] --export hf DIR     the newest checkpoint under logs/

DIR then holds weights (safetensors), settings, GPT-2's tokenizer and a modelling file, and

    transformers.AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

gives the logits that the checkpoint gives in float32. The window is that of the checkpoint's step.
"""

import argparse
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from sample import last_moment, load_model, parse_with_checkpoint

import program  # which sample found, as the others
import train_gpt
from gpt2 import MERGES, gpt2_tokens
from train_gpt import END_OF_TEXT, Hyperparameters, UserError

MODELING = Path(__file__).with_name("modeling_speedrun.py")
SHARED = ("model_dim", "num_heads", "head_dim", "rope", "rope_base", "norm_eps", "window_rule")


# What the modelling file does not know is refused: these settings, another field of a layer,
# another weight.
UNKNOWN = "attention_gate", "value_gate", "skip_gate", "smear", "key_offset", "yarn"
UNKNOWN += "scaled_projections", "logit_sigmoid", "bigram_rows", "sublayer_lambdas"
LAYER_FIELDS = {"window", "values", "skip_from"}
WEIGHTS = re.compile(
    r"(value_embeds\.embed\.\d|embed|lm_head)\.weight|skip_weights"
    r"|blocks\.\d+\.((attn\.)?lambdas|attn\.qkv_w|attn\.c_proj\.weight|mlp\.c_(fc|proj)\.weight)"
)


def check_known(hp: Hyperparameters, saved: dict) -> None:
    """UserError for a model that the modelling file would compute wrongly."""
    plain = asdict(train_gpt.Layer("long"))
    words = {
        name
        for layer in train_gpt.layer_table(hp)
        for name, value in asdict(layer).items()
        if name not in LAYER_FIELDS and value != plain[name]
    }
    usual = Hyperparameters()
    words |= {name for name in UNKNOWN if getattr(hp, name) != getattr(usual, name)}
    words |= {"window_rule"} if hp.window_rule == "distance" else set()
    if not words:  # else it would be a long list
        words = {name for name in saved["model"] if not WEIGHTS.fullmatch(name)}
    if words:
        names = ", ".join(sorted(words))
        raise UserError(f"{MODELING} does not know {names}: add it there, or export another model")


def hf_config(hp: Hyperparameters, window: int) -> dict:
    """config.json: the fields of SpeedrunConfig, and where transformers finds the classes."""
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
        "layers": [asdict(layer) for layer in train_gpt.layer_table(hp)],
        "softcap": train_gpt.sigmoid_form(hp.logit_softcap),
        "attn_scale": hp.attn_scale or hp.head_dim**-0.5,
        "window": window,
        "vocab_size": min(hp.vocab_size, END_OF_TEXT + 1),  # the rest was never trained
        "table_rows": hp.vocab_size,
        "head_rows": train_gpt.padded_vocab(hp),
    }


def export_hf(hp: Hyperparameters, saved: dict, folder: Path) -> None:
    """Make the folder whole or not at all; UserError if there is something already."""
    if folder.exists():
        raise UserError(f"{folder} is there already: name a new folder, or remove it")
    check_known(hp, saved)
    load_model(replace(hp, compile="off"), saved, torch.device("cpu"))  # or it says what is wrong
    # Embeddings that were trained in bfloat16 stay so: transformers makes them float32 again.
    weights = {name: w.contiguous() for name, w in saved["model"].items()}
    tokens = {token: i for i, token in enumerate([*gpt2_tokens(), "<|endoftext|>"])}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    texts = {
        "config.json": hf_config(hp, last_moment(saved, hp).window),
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


def parse(argv: list[str] | None):
    """Flags; UserError for those that cannot be."""
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__)
    help_ = "hf: for Hugging Face transformers; DIR is made"
    parser.add_argument("--export", nargs=2, metavar=("hf", "DIR"), required=True, help=help_)
    args, hp, loaded = parse_with_checkpoint(parser, argv)
    if args.export[0] != "hf":
        raise UserError(f"--export {args.export[0]}: hf is the one format there is")
    return Path(args.export[1]), hp, loaded


def export(parsed, store) -> None:
    """Write the folder."""
    folder, hp, loaded = parsed
    export_hf(hp, loaded.saved, folder)
    print(f"{loaded.checkpoint}: exported to {folder}")


def main(argv: list[str] | None = None) -> None:
    """Export a checkpoint; status 1 or 2 and a line if that cannot be."""
    program.as_program("export.py", lambda: parse(argv), export)


if __name__ == "__main__":
    main()
