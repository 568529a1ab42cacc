"""The stand-in model: a small Qwen3 or Llama with random weights, made locally in a second, the same for a seed.

vLLM's ``--load-format dummy`` draws weights so small that the output hardly depends on the prompt, so a pull
that corrupted the KV cache would go unseen.  Here the weights are scaled so that attention carries the answer:

- embeddings are small beside what attention adds to the residual stream, so the last token alone decides little;
- the attention scores have a standard deviation of ``sharpness``.  Keys weighted by exp(N(0, s^2)) leave
  about n / exp(s^2) of n tokens that count (the effective sample size of log-normal weights): with s = 2.5 a
  head looks at a few tokens, others at each step, and not at an average in which one token drowns.

Seen with the default shape and a prompt of 512 random tokens: another token at any single place moves some
log-probability of the next token by 0.1 (late in the prompt) to 5 (early); one KV block of 32 tokens zeroed in
every layer moves it by 1.7 to 11, the values of one block in one layer by 0.5 to 1.2; float16 instead of float32
by 0.05.  96 greedy tokens were 76 different ones, and 4 of the 96 stayed after one early token had changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvlab.errors import BadInput
from kvlab.params import Count, Positive, Strict, Whole

_SPECIAL = ("<s>", "</s>", "<unk>")
_CHAT = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}"


class StandIn(Strict):
    """Shape and seed of the stand-in model; a token of KV is 2 x layers x kv_heads x head_dim x 2 bytes in float16."""

    architecture: Literal["Qwen3ForCausalLM", "LlamaForCausalLM"] = "Qwen3ForCausalLM"
    layers: Count = 4
    hidden: Count = 256
    heads: Count = 4
    kv_heads: Count = 2
    head_dim: Count = 64
    intermediate: Count = 512
    #: words t0, t1, ... after three special ones
    vocab: Count = 4096
    max_position: Count = 32768
    sharpness: Positive = 2.5
    seed: Whole = 1

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes over all layers, in a 2-byte type."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def path(self, folder: Path | str | None = None) -> Path:
        """Make the model once and return its folder: ``folder``, or one named after the shape in the user's cache."""
        if self.heads % self.kv_heads:
            raise BadInput(f"stand-in model: heads ({self.heads}) is no multiple of kv_heads ({self.kv_heads})")
        if self.vocab <= len(_SPECIAL):
            raise BadInput(f"stand-in model: vocab is {self.vocab}; at least {len(_SPECIAL) + 1} are needed")
        # What the weights look like is part of the name: a later kvlab does not meet an old folder.
        shape = json.dumps([1, self.model_dump()], sort_keys=True)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab" / "models"
        target = Path(folder) if folder else cache / f"standin-{hashlib.sha256(shape.encode()).hexdigest()[:12]}"
        if (target / "config.json").is_file():
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                made.chmod(0o755)
                self._write(made)
                made.rename(target)
            except OSError:
                # Two runs may make it at once: whoever renamed first has won.
                if not (target / "config.json").is_file():
                    raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError as error:
            raise BadInput(f"cannot make the stand-in model at {target}: {error.strerror}") from None
        return target

    def _write(self, folder: Path) -> None:
        config = {
            "architectures": [self.architecture],
            "model_type": "qwen3" if self.architecture.startswith("Qwen3") else "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "float16",
        }
        save_safetensors(folder / "model.safetensors", self.weights())
        _tokenizer(folder, self.vocab)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")

    def weights(self) -> dict[str, npt.NDArray[np.float16]]:
        """Return every tensor by its Hugging Face name; the same values for the same shape and seed."""
        rng = np.random.default_rng(self.seed)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float16]:
            # 1 / sqrt(fan-in): a normalised input gives an output of standard deviation `gain`.
            values: npt.NDArray[np.float32] = rng.standard_normal((rows, columns), np.float32)
            return (values * np.float32(gain / columns**0.5)).astype(np.float16)

        def ones(n: int, gain: float = 1.0) -> npt.NDArray[np.float16]:
            return np.full(n, gain, np.float16)

        normed = self.architecture.startswith("Qwen3")  # q and k are normalised, so the gain goes into their norms
        root = self.sharpness**0.5
        out = {"model.embed_tokens.weight": matrix(self.vocab, self.hidden, 0.1 * self.hidden**0.5)}
        for i in range(self.layers):
            layer = {
                "input_layernorm.weight": ones(self.hidden),
                "self_attn.q_proj.weight": matrix(q, self.hidden, 1.0 if normed else root),
                "self_attn.k_proj.weight": matrix(kv, self.hidden, 1.0 if normed else root),
                "self_attn.v_proj.weight": matrix(kv, self.hidden),
                "self_attn.o_proj.weight": matrix(self.hidden, q, 2.0),
                "post_attention_layernorm.weight": ones(self.hidden),
                "mlp.gate_proj.weight": matrix(self.intermediate, self.hidden),
                "mlp.up_proj.weight": matrix(self.intermediate, self.hidden),
                "mlp.down_proj.weight": matrix(self.hidden, self.intermediate),
            }
            if normed:
                layer |= {
                    "self_attn.q_norm.weight": ones(self.head_dim, root),
                    "self_attn.k_norm.weight": ones(self.head_dim, root),
                }
            out |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
        # A gain of 3 on the logits makes the choice of a token clear without pinning it to one.
        return out | {"model.norm.weight": ones(self.hidden), "lm_head.weight": matrix(self.vocab, self.hidden, 3.0)}


def save_safetensors(path: Path, tensors: dict[str, npt.NDArray[np.float16]]) -> None:
    """Write float16 ``tensors`` as safetensors: 8 bytes length, a JSON header, the data end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.tobytes())


def _tokenizer(folder: Path, vocab: int) -> None:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError:
        raise BadInput("the stand-in model needs the package tokenizers, which comes with vLLM") from None
    words = [*_SPECIAL, *(f"t{i}" for i in range(vocab - len(_SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
