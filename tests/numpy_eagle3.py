"""An EAGLE-3 head in float64 NumPy, one token at a time, from the tensors of its folder (kernels `[out, in]`)."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x, positions, theta):
    """Channels `i` and `i + c/2` of `[n, heads, c]` as one complex number, turned by its angle."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], -1)


class Head:
    def __init__(self, tensors, config, embed):
        self.tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.config = config
        self.embed = np.asarray(embed, np.float64)

    def linear(self, name, x):
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, name, x):
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def last_hidden(self, tokens, hidden):
        """Output of the layer at the last of the slots `0..n-1`."""
        config = self.config
        slots = len(tokens)
        embedded = self.norm("midlayer.input_layernorm", self.embed[tokens])
        x = np.concatenate([embedded, self.norm("midlayer.hidden_norm", hidden)], -1)
        q, k, v = (
            self.linear(f"midlayer.self_attn.{name}_proj", x).reshape(slots, -1, config.head_dim) for name in "qkv"
        )
        positions = np.arange(slots)
        q, k = rotate(q, positions, config.rope.theta)[-1], rotate(k, positions, config.rope.theta)
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = k[:, shared] @ q[head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append(weights @ v[:, shared] / weights.sum())
        mixed = hidden[-1] + self.linear("midlayer.self_attn.o_proj", np.concatenate(heads))
        normed = self.norm("midlayer.post_attention_layernorm", mixed)
        gate = self.linear("midlayer.mlp.gate_proj", normed)
        gated = gate / (1 + np.exp(-gate)) * self.linear("midlayer.mlp.up_proj", normed)
        return mixed + self.linear("midlayer.mlp.down_proj", gated)

    def chain_logits(self, pair_tokens, pair_features, drafts):
        """Logits after the pairs and after each of `drafts`, `[1 + len(drafts), draft vocabulary]`."""
        tokens = list(pair_tokens)
        hidden = self.linear("fc", np.asarray(pair_features, np.float64))
        logits = []
        for draft in [*drafts, None]:
            last = self.last_hidden(np.array(tokens), hidden)
            logits.append(self.linear("lm_head", self.norm("norm", last)))
            tokens.append(draft)
            hidden = np.concatenate([hidden, last[None]])
        return np.array(logits)
