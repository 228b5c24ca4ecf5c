"""A GPT of the NanoGPT speedrun for Hugging Face transformers; it needs nothing else but PyTorch.

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Documents begin with token 50256, and so should prompts: no token attends to what is before the last
50256. Keys and values are not cached: generate() computes everything again for each token.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

BLOCK = 128  # tokens in a block of the window


class SpeedrunConfig(PretrainedConfig):
    """Names and values are those of train_gpt.py; a layer is a dict with window and values."""

    model_type = "nanogpt_speedrun"
    attribute_map = {"hidden_size": "model_dim", "num_attention_heads": "num_heads"}

    def __init__(
        self,
        layers=(),
        model_dim=768,
        num_heads=6,
        head_dim=128,
        vocab_size=50257,
        table_rows=50257,
        head_rows=50304,
        window=1792,
        window_rule="blocks",
        attn_scale=0.12,
        rope="half",
        rope_base=1024.0,
        norm_eps=2.0**-23,
        logit_softcap=15.0,
        **others,
    ):
        self.layers = list(layers)
        self.num_hidden_layers = len(layers)
        self.model_dim, self.num_heads, self.head_dim = model_dim, num_heads, head_dim
        self.vocab_size, self.table_rows, self.head_rows = vocab_size, table_rows, head_rows
        self.window, self.window_rule, self.attn_scale = window, window_rule, attn_scale
        self.rope, self.rope_base, self.norm_eps = rope, rope_base, norm_eps
        self.logit_softcap = logit_softcap
        fixed = {"bos_token_id": 50256, "eos_token_id": 50256, "use_cache": False}
        super().__init__(**({"tie_word_embeddings": False} | fixed | others))


def norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def visible(input_ids: Tensor, window: int, rule: str) -> Tensor:
    """Return a mask (B, 1, T, T): causal, within a document, and within the window's tokens
    or whole blocks."""
    position = torch.arange(input_ids.size(1), device=input_ids.device)
    document = torch.where(input_ids == 50256, position, 0).cummax(1).values
    if rule == "blocks":
        start = (position // BLOCK + 1 - max(window // BLOCK, 1)) * BLOCK
    else:
        start = position + 1 - max(window, 1)
    first = torch.maximum(document, start)[:, None, :, None]
    return (position >= first) & (position <= position[:, None])


def rotation(length: int, config: SpeedrunConfig, device) -> tuple[Tensor, Tensor]:
    """Return cos and sin (T, 1, D / 2); with "half" RoPE, half of the frequencies are 0."""
    pairs = config.head_dim // 2
    if config.rope == "full":
        frequency = config.rope_base ** -(torch.arange(pairs, device=device) / pairs)
    else:
        turning = pairs // 2
        exponent = torch.arange(turning, device=device) / max(turning - 1, 1)
        frequency = F.pad(config.rope_base**-exponent, (0, pairs - turning))
    angle = torch.arange(length, device=device)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: SpeedrunConfig, values: str | None):
        super().__init__()
        self.heads, self.scale = (config.num_heads, config.head_dim), config.attn_scale
        self.eps = config.norm_eps
        width = math.prod(self.heads)
        self.qkv_w = nn.Parameter(torch.empty(3, width, config.model_dim))
        self.lambdas = nn.Parameter(torch.empty(1 if values == "first" else 2))
        self.c_proj = nn.Linear(width, config.model_dim, bias=False)

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, C), and v (B, T, H, D) before another value is mixed in."""
        qkv = F.linear(x, self.qkv_w.flatten(0, 1))
        q, k, v = qkv.view(*x.shape[:2], 3, *self.heads).unbind(2)
        q, k = (rotate(norm(t, self.eps), *rotary) for t in (q, k))
        own = v
        if len(self.lambdas) == 1:
            v = (1 - self.lambdas[0]) * v + self.lambdas[0] * (v if value is None else value)
        else:
            v = self.lambdas[0] * v
            if value is not None:
                v = v + self.lambdas[1] * value.view_as(v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return self.c_proj(out.transpose(1, 2).flatten(2)), own


class MLP(nn.Module):
    def __init__(self, config: SpeedrunConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.model_dim, 4 * config.model_dim, bias=False)
        self.c_proj = nn.Linear(4 * config.model_dim, config.model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: SpeedrunConfig, layer: dict):
        super().__init__()
        attends = layer["window"] != "none"
        self.attn = Attention(config, layer["values"]) if attends else None
        self.mlp = MLP(config)
        self.lambdas = nn.Parameter(torch.empty(2))


class SpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """Token and value embeddings, layers linked as a U-net, and a head with soft-capped logits."""

    config_class = SpeedrunConfig

    def __init__(self, config: SpeedrunConfig):
        super().__init__(config)
        width = config.num_heads * config.head_dim
        tables = sorted({layer["values"] for layer in config.layers} - {None, "first"})
        values = nn.ModuleDict({name: nn.Embedding(config.table_rows, width) for name in tables})
        self.embed = nn.Embedding(config.table_rows, config.model_dim)
        self.value_embeds = nn.ModuleDict({"embed": values})
        self.blocks = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.skip_weights = nn.Parameter(torch.empty(len(config.layers) // 2))
        self.lm_head = nn.Linear(config.model_dim, config.head_rows, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None, **others) -> CausalLMOutput:
        """Return logits (B, T, vocab_size) and, with labels, the mean loss of the next tokens
        (-100: left out). Everything up to the head is in the model's dtype."""
        config = self.config
        sizes = {"long": config.window, "short": config.window // 2}
        masks = {k: visible(input_ids, size, config.window_rule) for k, size in sizes.items()}
        if attention_mask is not None:  # a token of padding is visible to itself only
            itself = torch.eye(input_ids.size(1), dtype=torch.bool, device=input_ids.device)
            padding = attention_mask[:, None, None, : input_ids.size(1)].bool()
            masks = {name: mask & padding | itself for name, mask in masks.items()}
        rotary = rotation(input_ids.size(1), config, input_ids.device)
        values = {name: table(input_ids) for name, table in self.value_embeds["embed"].items()}
        eps = config.norm_eps
        x = x0 = norm(self.embed(input_ids), eps)
        half, outputs = len(self.skip_weights), []
        for i, (layer, block) in enumerate(zip(config.layers, self.blocks, strict=True)):
            if i >= half:  # the upper layers add the output of their mirror images below
                x = x + self.skip_weights[i - half] * outputs.pop()
            x = block.lambdas[0] * x + block.lambdas[1] * x0
            if block.attn is not None:
                value, mask = values.get(layer["values"]), masks[layer["window"]]
                out, v = block.attn(norm(x, eps), value, rotary, mask)
                values.setdefault("first", v)
                x = x + out
            x = x + block.mlp(norm(x, eps))
            if i < half:
                outputs.append(x)
        cap = config.logit_softcap  # cap * tanh(logit / cap) + cap: softmax ignores what is added
        logits = 2 * cap * torch.sigmoid(self.lm_head(norm(x, eps)).float() / (cap / 2))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits[..., : config.vocab_size])
