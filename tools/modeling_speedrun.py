"""A model of the NanoGPT speedrun for Hugging Face transformers, computed by the training script.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Documents begin with the token config.bos_token_id, and so should prompts: no token attends to what
is before the last one. Keys and values are not cached: generate() computes everything again for
each token. In this process, `import train_gpt` now means the exported script's.
"""

import importlib

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

# tools/export.py writes the script's name here. The script is a part of the exported file.
script = importlib.import_module("train_gpt")
BLOCK = 128  # the script's models read whole blocks of tokens


class SpeedrunConfig(PretrainedConfig):
    """The script's settings, and the step of the checkpoint: it decides the attention windows."""

    model_type = "nanogpt_speedrun"

    def __init__(self, settings=None, step=0, **others):
        self.settings, self.step = settings or {}, step
        super().__init__(**others)


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """The script's model."""

    config_class = SpeedrunConfig

    def __init__(self, config):
        super().__init__(config)
        run = script.Run
        settings = dict(config.settings)
        for name, value in settings.items():
            if isinstance(value, list):  # JSON has no tuples
                settings[name] = tuple(value)
        hp = type(run.records[run.default_record])(**settings)
        self.gpt = run.GPT(hp)
        self.now = run.Moment(config.step, hp)
        self.post_init()

    def get_input_embeddings(self):
        return self.gpt.embed

    def forward(self, input_ids, attention_mask=None, labels=None, **others) -> CausalLMOutput:
        """Return logits (B, T, vocab_size), 0 where attention_mask is 0, and with labels the mean
        loss of the next tokens (-100: left out). Each row is a text without its padding. ValueError
        if hidden states or attentions are asked for, which the script's model does not keep."""
        for name in ("output_hidden_states", "output_attentions"):
            if others.get(name) or getattr(self.config, name, False):
                raise ValueError(f"{name}: this model returns logits alone, so leave it out")
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size, device=input_ids.device)
        for i, row in enumerate(input_ids):
            kept = torch.ones_like(row) if attention_mask is None else attention_mask[i]
            tokens = row[kept.bool()]
            whole_blocks = F.pad(tokens, (0, -len(tokens) % BLOCK))
            x = self.gpt.hidden(whole_blocks, self.now)[: len(tokens)]
            logits[i, kept.bool()] = self.gpt.lm_head.logits(x)[:, : self.config.vocab_size]
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
