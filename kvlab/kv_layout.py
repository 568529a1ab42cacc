"""From a model's config.json, a KV dtype, a block size and TP to the descriptors and bytes of one pull.

A pull brings one request's KV blocks to one decode TP rank.  vLLM keeps the cache in pages (one block
of one layer), so a pull is a list of pages, and its length is what decides the cost of posting it:

- *global* layers keep every token: ceil(prompt / block) pages a layer;
- *sliding* layers keep their window: ceil(window / block) + 1 pages a layer, whatever the prompt (the
  one more is for a window that does not start at a block; NixlConnector's scheduler, ``blocks_per_sw``);
- *MLA* layers keep one latent vector a token, kv_lora_rank + qk_rope_head_dim wide, on every TP rank;
- *state* layers (gated delta net) keep one state a request, read as four descriptors a layer.

Where full and sliding layers mix, vLLM makes all pages the same size by raising the block size of the
layers with the smaller page (``unify_kv_cache_spec_page_size`` in vllm/v1/core/kv_cache_utils.py), and
groups layers so that every group has as many as the smallest kind has (``_get_kv_cache_groups_uniform_
page_size``).  A group that does not come out even is padded, and NixlConnector pulls the padding too.
With state layers the block grows until an attention page holds a state (``_align_hybrid_block_size``).

Two engines, two ways (both read in their source): vLLM 0.23 indexes K and V apart, two descriptors a
page (FLASH_ATTN registers two tensors, FlashInfer's one is split by NixlConnector), and reads all
regions for every group; vLLM 0.30 packs K and V into one page and leaves out what only padding uses.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.errors import BadInput

#: bytes of one element
DTYPE_BYTES = {
    **dict.fromkeys(("bfloat16", "float16", "half", "bf16", "fp16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 1),
    **dict.fromkeys(("float32", "float"), 4),
}
#: engine -> (K and V apart, padding: all regions of a group or only those that two groups share)
ENGINES = {"vllm-0.23": (True, "all"), "vllm-0.30": (False, "shared")}
#: vLLM's CacheConfig.DEFAULT_BLOCK_SIZE; FlashMLA takes 64 (get_preferred_block_size)
DEFAULT_BLOCK, DEFAULT_MLA_BLOCK = 16, 64
#: one layer in N is global where a config gives no layer_types (the classes' defaults in transformers)
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma4": 6, "gemma4_text": 6, "gpt_oss": 2, "cohere2": 4}
#: keys that change what is cached in ways this module does not know -> what they mean
_UNKNOWN = {
    "attention_chunk_size": "chunked local attention",
    "index_head_dim": "sparse attention with an indexer cache",
    "hybrid_override_pattern": "a Mamba hybrid",
    "layers_block_type": "a Mamba hybrid",
    "mamba_d_state": "a Mamba hybrid",
    "ssm_cfg": "a Mamba model",
    "cross_attention_layers": "cross attention",
}


@dataclass(frozen=True)
class Group:
    """Layers of one kind on one TP rank.

    :ivar layers: layers of the model; ``slots`` is what is pulled, padding included
    :ivar token_bytes: KV of one token in one layer (0 for a state)
    :ivar page_bytes: one block of one layer as it lies in memory, padding included
    :ivar pieces: sizes of the descriptors that one page is read as, bytes
    """

    name: str
    layers: int
    slots: int
    block_size: int
    token_bytes: int
    page_bytes: int
    pieces: tuple[int, ...]
    window: int | None = None
    state: bool = False

    def blocks(self, tokens: int, extra: int) -> int:
        """Blocks that a prompt of ``tokens`` hands over in each layer."""
        if self.state:
            return 1
        held = -(-tokens // self.block_size)
        return held if self.window is None else min(held, -(-self.window // self.block_size) + extra)


@dataclass(frozen=True)
class GroupPull:
    """The part of a pull that one layer group brings, descriptors of one size."""

    name: str
    blocks: int
    descriptors: int
    descriptor_bytes: int
    bytes: int


@dataclass(frozen=True)
class PullShape:
    """One decode rank's pull: all its descriptors and bytes, and each group's share.

    ``descriptor_bytes`` is the size of the most frequent descriptor.
    """

    prompt_tokens: int
    descriptors: int
    bytes: int
    descriptor_bytes: int
    groups: tuple[GroupPull, ...]


@dataclass(frozen=True)
class Layout:
    """How one model's KV lies in one rank's cache; :meth:`pull` says what a prompt hands over.

    :ivar kv_apart: K and V are two descriptors (True) or one (False)
    :ivar extra_window_blocks: blocks a sliding layer hands over beyond its window
    :ivar inferred: what of this was worked out backwards from published counts and is not stated anywhere
    """

    name: str
    model: str
    source: str
    dtype: str
    tp: int
    engine: str
    kv_apart: bool
    extra_window_blocks: int
    groups: tuple[Group, ...]
    inferred: tuple[str, ...] = ()

    @staticmethod
    def names() -> list[str]:
        """Return the names of the layouts that kvlab ships."""
        return sorted(_shipped())

    @property
    def global_bytes_per_token(self) -> int:
        """Bytes on this rank that every prompt token adds (global and MLA layers)."""
        return sum(g.layers * g.token_bytes for g in self.groups if g.window is None)

    @property
    def window_bytes(self) -> int:
        """Bytes on this rank of the sliding windows when full; they do not grow with the prompt beyond it."""
        return sum(g.layers * g.token_bytes * g.window for g in self.groups if g.window is not None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of the (longest) sliding window; None without one."""
        return max((g.window for g in self.groups if g.window is not None), default=None)

    @property
    def state_bytes(self) -> int:
        """Bytes on this rank of recurrent state, the same for every prompt."""
        return sum(g.layers * sum(g.pieces) for g in self.groups if g.state)

    def pull(self, prompt_tokens: int) -> PullShape:
        """Return the descriptors and bytes that a prompt of ``prompt_tokens`` hands to one rank.

        Before any merging: vLLM 0.30 and NIXL join neighbours where a fresh cache allows it.
        """
        if isinstance(prompt_tokens, bool) or not isinstance(prompt_tokens, int) or prompt_tokens < 1:
            raise BadInput(f"prompt_tokens: a whole number of tokens from 1 up is wanted (got {prompt_tokens!r})")
        parts = []
        for g in self.groups:
            blocks = g.blocks(prompt_tokens, self.extra_window_blocks)
            for size in dict.fromkeys(g.pieces):
                n = blocks * g.slots * g.pieces.count(size)
                parts.append(GroupPull(g.name, blocks, n, size, n * size))
        most = max(parts, key=lambda p: p.descriptors)
        total, size = sum(p.descriptors for p in parts), sum(p.bytes for p in parts)
        return PullShape(prompt_tokens, total, size, most.descriptor_bytes, tuple(parts))

    def table(self, prompt_lengths: Sequence[int]) -> pd.DataFrame:
        """Return a row a prompt length and layer group, then a row ``all`` with the sums."""
        rows = []
        for tokens in prompt_lengths:
            shape = self.pull(tokens)
            head = {"layout": self.name, "tp": self.tp, "dtype": self.dtype, "prompt_tokens": tokens}
            groups = {g.name: g for g in self.groups}
            for p in shape.groups:
                g = groups[p.name]
                what = {"group": p.name, "layers": g.layers, "window_tokens": g.window, "block_size": g.block_size}
                rows.append({**head, **what, **{k: v for k, v in vars(p).items() if k != "name"}})
            whole = {"group": "all", "layers": sum(g.layers for g in self.groups), "window_tokens": self.window_tokens}
            size = {"descriptor_bytes": shape.descriptor_bytes, "bytes": shape.bytes}
            rows.append({**head, **whole, "descriptors": shape.descriptors, **size})
        whole_numbers = ("window_tokens", "block_size", "blocks")
        return pd.DataFrame(rows).astype(dict.fromkeys(whole_numbers, "Int64"))

    def notes(self) -> list[str]:
        """Say what this layout takes for granted, one sentence each; what is inferred is marked so."""
        apart = "two descriptors (K and V apart)" if self.kv_apart else "one descriptor (K and V together)"
        said = [f"{self.name}: {self.source}", f"engine {self.engine}: a page is {apart}"]
        said += [
            f"{g.name}: {g.slots} layers are pulled for {g.layers} of the model (padding of vLLM's layer groups)"
            for g in self.groups
            if g.slots != g.layers
        ]
        return said + [f"inferred: {text}" for text in self.inferred]


def load(
    name_or_path: str | Path,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    tp: int = 1,
    engine: str | None = None,
    kv_apart: bool | None = None,
    extra_window_blocks: int | None = None,
    cross_layers: bool = False,
) -> Layout:
    """Return the layout of a shipped model (``names()``), a hub id among them, or a config.json on disk.

    :param dtype: of the KV cache; ``auto`` takes the model's own
    :param block_size: tokens a block, as ``--block-size`` sets it, before vLLM evens the pages out
    :param engine: one of :data:`ENGINES`; vllm-0.23 unless the shipped entry says otherwise
    :param kv_apart: K and V in two descriptors or in one, where the engine's default does not fit
    :param extra_window_blocks: blocks that a sliding layer hands over beyond its window (vLLM: 1)
    :param cross_layers: one descriptor a block over all layers (enable_cross_layers_blocks); needs one group
    :raises BadInput: an unknown name (the nearest are named), an unreadable or unknown config, a TP that
        does not divide the heads
    """
    name, entry = _entry(name_or_path)
    config = entry["config"]
    where = f"layout {name}"
    for value, what, least in ((tp, "tp", 1), (block_size, "block_size", 1), (extra_window_blocks, "extra_window_blocks", 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise BadInput(f"{where}: {what} must be a whole number from {least} up (got {value!r})")
    own = _model_dtype(config)
    dtype = own if dtype == "auto" else dtype
    if dtype not in DTYPE_BYTES:
        raise BadInput(f"{where}: unknown KV dtype {dtype!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    reading = entry.get("reading", {})
    engine = engine or reading.get("engine", "vllm-0.23")
    if engine not in ENGINES:
        raise BadInput(f"{where}: unknown engine {engine!r}; known: {', '.join(ENGINES)}")
    asked = (block_size, kv_apart, extra_window_blocks)
    apart, padding = ENGINES[engine]
    kv_apart = apart if kv_apart is None else kv_apart
    extra = reading.get("extra_window_blocks", 1) if extra_window_blocks is None else extra_window_blocks
    groups = _groups(config, where, DTYPE_BYTES[dtype], DTYPE_BYTES[own], block_size or reading.get("block_size"), tp)
    groups = [_pieces(_padded(g, groups, padding), kv_apart) for g in groups]
    if cross_layers:
        if len(groups) != 1:
            raise BadInput(f"{where}: blocks across layers need layers of one kind; this model has {len(groups)}")
        g = groups[0]
        groups = [Group(g.name, 1, 1, g.block_size, g.layers * g.token_bytes, 0, (g.slots * g.page_bytes,), g.window)]
    inferred = tuple(entry.get("inferred", ())) if asked == (None, None, None) else ()
    source = entry.get("source", "")
    return Layout(
        name, entry.get("model", name), source, dtype, tp, engine, kv_apart, extra, tuple(groups), inferred
    )


def names() -> list[str]:
    """Return the names of the layouts that kvlab ships."""
    return Layout.names()


@functools.cache
def _shipped() -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("layouts.json").read_text("utf-8"))
    return entries


def _entry(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    name = str(name_or_path)
    for short, entry in _shipped().items():
        if name.lower() in (short, entry["model"].lower()):
            return short, entry
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = {**{e["model"].lower(): s for s, e in _shipped().items()}, **{s: s for s in _shipped()}}
        near = list(dict.fromkeys(known[m] for m in difflib.get_close_matches(name.lower(), known, 3, 0.5)))
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names())}"
        raise BadInput(f"no layout and no config.json at {name!r}; {hint}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: a model's config.json is a JSON object")
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    return label, {"model": label, "source": path.name, "config": config}


def _model_dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    found = [c.get(k) for c in (text or {}, config) for k in ("dtype", "torch_dtype")]
    return str(next((d for d in found if d in DTYPE_BYTES), "bfloat16"))


class _Config:
    """A config's text part, read with one clear line where something is missing or odd."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        nested = config.get("text_config")
        self.data: Mapping[str, Any] = nested if isinstance(nested, dict) else config
        self.where = where
        for key, meaning in _UNKNOWN.items():
            if self.data.get(key):
                raise BadInput(f"{where}: {key} means {meaning}, whose KV layout kvlab does not know")
        if config.get("is_encoder_decoder"):
            raise BadInput(f"{where}: an encoder-decoder model, whose KV layout kvlab does not know")

    def number(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise BadInput(
                f"{self.where}: config.json has no {key!r}; where the hub's file leaves it to the class's default, "
                "save the whole with transformers: AutoConfig.from_pretrained(...).save_pretrained(...)"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{self.where}: {key} must be a whole number from 1 up (got {value!r})")
        return value

    def kinds(self) -> list[str]:
        """Return full, sliding or linear for every layer that keeps KV of its own."""
        n = self.number("num_hidden_layers")
        listed = self.data.get("layer_types")
        window = self.data.get("sliding_window")
        pattern = self.data.get("sliding_window_pattern") or _PATTERNS.get(str(self.data.get("model_type")))
        if listed is not None:
            kinds = [str(k).removesuffix("_attention") for k in listed]
            odd = [k for k in kinds if k not in ("full", "sliding", "linear")]
            if odd or len(kinds) != n:
                what = f"a layer of type {odd[0]!r}" if odd else f"{len(kinds)} layer_types for {n} layers"
                raise BadInput(f"{self.where}: {what}, whose KV layout kvlab does not know")
        elif self.data.get("full_attention_interval"):
            every = self.number("full_attention_interval")
            kinds = ["full" if (i + 1) % every == 0 else "linear" for i in range(n)]
        elif not window or self.data.get("use_sliding_window") is False:
            kinds = ["full"] * n
        elif isinstance(pattern, int) and pattern > 0:
            kinds = ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(n)]
        else:
            first = self.number("max_window_layers") if "max_window_layers" in self.data else 0
            kinds = ["full" if i < first else "sliding" for i in range(n)]
        # Gemma 3n and the small Gemma 4: the last layers read the KV of earlier ones.
        shared = self.data.get("num_kv_shared_layers") or 0
        return kinds[: n - int(shared)]


def _groups(
    config: Mapping[str, Any], where: str, size: int, state_size: int, block_size: int | None, tp: int
) -> list[Group]:
    """Read the layer kinds and even their pages out as vLLM does; no padding, no pieces yet."""
    c = _Config(config, where)
    kinds = c.kinds()
    count = {k: kinds.count(k) for k in dict.fromkeys(kinds)}
    if c.data.get("kv_lora_rank"):
        latent = c.number("kv_lora_rank") + c.number("qk_rope_head_dim")
        block = block_size or DEFAULT_MLA_BLOCK
        return [Group("MLA", len(kinds), len(kinds), block, latent * size, block * latent * size, ())]
    block = block_size or DEFAULT_BLOCK
    heads = c.number("num_attention_heads")
    kv_heads = c.number("num_key_value_heads", heads)
    head_dim = c.number("head_dim", c.number("hidden_size", 0 or None) // heads if not c.data.get("head_dim") else None)
    if c.number("v_head_dim", head_dim) != head_dim:
        raise BadInput(f"{where}: values of another width than keys (v_head_dim), which kvlab does not know")
    groups = []
    for kind, layers in count.items():
        if kind == "linear":
            continue
        own_heads, own_dim = kv_heads, head_dim
        if kind == "full" and "sliding" in count:
            own_dim = c.number("global_head_dim", head_dim)
            if c.data.get("attention_k_eq_v", True):
                own_heads = c.number("num_global_key_value_heads", kv_heads)
        token = 2 * _heads_per_rank(own_heads, tp, where) * own_dim * size
        window = c.number("sliding_window") if kind == "sliding" else None
        name = "global" if kind == "full" else "sliding"
        groups.append(Group(name, layers, layers, block, token, block * token, (), window))
    if not groups:
        raise BadInput(f"{where}: a model without attention layers, whose KV layout kvlab does not know")
    groups.sort(key=lambda g: g.name)
    if "linear" in count:
        return _with_state(c, groups, count["linear"], state_size, tp)
    if len(groups) > 1:
        page = max(g.page_bytes for g in groups)
        even = [page // g.page_bytes if page % g.page_bytes == 0 else 1 for g in groups]
        groups = [
            Group(g.name, g.layers, g.layers, g.block_size * by, g.token_bytes, page, (), g.window)
            for g, by in zip(groups, even, strict=True)
        ]
    return groups


def _with_state(c: _Config, groups: list[Group], layers: int, size: int, tp: int) -> list[Group]:
    """Add the gated delta net's states and grow the attention block until a page holds one.

    Shapes: MambaStateShapeCalculator.gated_delta_net_state_shape in vLLM.
    """
    if len(groups) > 1:
        raise BadInput(f"{c.where}: state layers beside sliding ones, whose KV layout kvlab does not know")
    k_heads, v_heads = c.number("linear_num_key_heads"), c.number("linear_num_value_heads")
    k_dim, v_dim = c.number("linear_key_head_dim"), c.number("linear_value_head_dim")
    if k_heads % tp or v_heads % tp:
        raise BadInput(f"{c.where}: tp {tp} does not divide the {k_heads} and {v_heads} heads of its linear attention")
    kept = (c.number("linear_conv_kernel_dim") - 1) * size // tp
    ssm_size = DTYPE_BYTES.get(str(c.data.get("mamba_ssm_dtype")), size)
    pieces = (
        k_heads * k_dim * kept,
        k_heads * k_dim * kept,
        v_heads * v_dim * kept,
        v_heads // tp * v_dim * k_dim * ssm_size,
    )
    g = groups[0]
    block = g.block_size * -(-sum(pieces) // (g.block_size * g.token_bytes))
    block = max(block, g.block_size)
    page = block * g.token_bytes
    return [
        Group(g.name, g.layers, g.layers, block, g.token_bytes, page, ()),
        Group("state", layers, layers, block, 0, page, pieces, state=True),
    ]


def _heads_per_rank(kv_heads: int, tp: int, where: str) -> int:
    # Fewer KV heads than ranks: every rank keeps one, so heads are there more than once.
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise BadInput(f"{where}: tp {tp} and {kv_heads} KV heads do not divide one another")
    return max(1, kv_heads // tp)


def _padded(g: Group, groups: Sequence[Group], padding: str) -> Group:
    """Count the layer slots that are pulled for ``g``, padding of vLLM's equal-sized layer groups included."""
    if len(groups) == 1 or g.state:
        return g
    counts = [x.layers for x in groups]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    lengths: list[list[int]] = []
    for n in counts:
        many = -(-n // size)
        lengths.append([-(-(n - i) // many) for i in range(many)])
    everywhere = size if padding == "all" else sorted(x for one in lengths for x in one)[-2]
    if any(x.state for x in groups):
        everywhere = 0
    slots = sum(max(x, everywhere) for x in lengths[groups.index(g)])
    return Group(g.name, g.layers, slots, g.block_size, g.token_bytes, g.page_bytes, g.pieces, g.window)


def _pieces(g: Group, kv_apart: bool) -> Group:
    if g.state:
        return g
    pieces = (g.page_bytes // 2,) * 2 if kv_apart and g.name != "MLA" else (g.page_bytes,)
    return Group(g.name, g.layers, g.slots, g.block_size, g.token_bytes, g.page_bytes, pieces, g.window)
