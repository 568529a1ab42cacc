"""From a model's config.json, a KV dtype, a block size and TP to the descriptors and bytes of one pull.

A pull brings one request's KV blocks to one decode TP rank.  vLLM keeps the cache in pages (one block
of one layer), so a pull is a list of pages, and its length is what decides the cost of posting it:

- *global* layers keep every token: ceil(prompt / block) pages a layer;
- *sliding* layers keep their window: ceil(window / block) + 1 pages a layer, whatever the prompt (the
  one more is for a window that does not start at a block; NixlConnector's scheduler, ``blocks_per_sw``);
- *MLA* layers keep one latent vector a token, kv_lora_rank + qk_rope_head_dim wide, on every TP rank;
- *state* layers (gated delta net) keep one state a request, read as four descriptors a layer.

Where full and sliding layers mix, vLLM makes all pages the same size by raising the block size of the
layers with the smaller page (``unify_kv_cache_spec_page_size`` in v1/core/kv_cache_utils.py) and groups
them by the size of the smallest kind (``_get_kv_cache_groups_uniform_page_size``).  A group that does
not come out even is padded, and NixlConnector pulls the padding too.  With state layers the block grows
until an attention page holds a state (``_align_hybrid_block_size``).

Two engines, two ways (both read in their source): vLLM 0.23 indexes K and V apart, two descriptors a
page (FLASH_ATTN registers two tensors, FlashInfer's one is split by NixlConnector), and reads all
regions for every group; vLLM 0.30 packs K and V into one page and leaves out what only padding uses.
Not modelled: kernels that split a page (vLLM's kernel block sizes) and layouts with the block outermost.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
#: keys that change what is cached in ways this module does not know
_UNKNOWN = (
    *("attention_chunk_size", "index_head_dim", "sparse_attention_config", "linear_attn_config", "block_configs"),
    *("hybrid_override_pattern", "hybrid_layer_pattern", "layers_block_type", "mamba_d_state", "ssm_cfg"),
    *("cross_attention_layers", "is_encoder_decoder"),
)


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
    pieces: tuple[int, ...] = ()
    window: int | None = None

    def blocks(self, tokens: int, extra: int) -> int:
        """Blocks that a prompt of ``tokens`` hands over in each layer."""
        if not self.token_bytes:
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
    """One decode rank's pull: all its descriptors and bytes, and each group's share."""

    prompt_tokens: int
    descriptors: int
    bytes: int
    groups: tuple[GroupPull, ...]


@dataclass(frozen=True)
class Layout:
    """How one model's KV lies in one rank's cache; ``inferred``: what was worked out from published counts only."""

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

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV on this rank that every further token adds once windows are full (global and MLA layers)."""
        return sum(g.layers * g.token_bytes for g in self.groups if g.window is None)

    @property
    def window_bytes(self) -> int:
        """Bytes of KV on this rank in the sliding windows when full; with :attr:`bytes_per_token` the KV
        itself, where :meth:`pull` rounds up to blocks and counts padding."""
        return sum(g.layers * g.token_bytes * g.window for g in self.groups if g.window is not None)

    @property
    def window_tokens(self) -> int | None:
        """Tokens of the (longest) sliding window; None without one."""
        return max((g.window for g in self.groups if g.window is not None), default=None)

    @property
    def state_bytes(self) -> int:
        """Bytes on this rank of recurrent state, the same for every prompt."""
        return sum(g.layers * sum(g.pieces) for g in self.groups if not g.token_bytes)

    def pull(self, prompt_tokens: int) -> PullShape:
        """Return the descriptors and bytes that a prompt of ``prompt_tokens`` hands to one rank.

        Before any merging: vLLM 0.30 and NIXL join neighbours where a fresh cache allows it.
        """
        _whole(prompt_tokens, "prompt_tokens", f"layout {self.name}")
        parts = []
        for g in self.groups:
            blocks = g.blocks(prompt_tokens, self.extra_window_blocks)
            for size in dict.fromkeys(g.pieces):
                n = blocks * g.slots * g.pieces.count(size)
                parts.append(GroupPull(g.name, blocks, n, size, n * size))
        total, size = sum(p.descriptors for p in parts), sum(p.bytes for p in parts)
        return PullShape(prompt_tokens, total, size, tuple(parts))

    def table(self, prompt_lengths: Sequence[int]) -> pd.DataFrame:
        """Return a row a prompt length and layer group, then a row ``all`` with the sums."""
        rows: list[dict[str, Any]] = []
        groups = {g.name: g for g in self.groups}
        for tokens in prompt_lengths:
            shape = self.pull(tokens)
            head = {"layout": self.name, "tp": self.tp, "dtype": self.dtype, "prompt_tokens": tokens}
            for p in shape.groups:
                g = groups[p.name]
                what = {"group": g.name, "layers": g.layers, "window_tokens": g.window, "block_size": g.block_size}
                rows.append({**head, **what, **{k: v for k, v in vars(p).items() if k != "name"}})
            sums = {"group": "all", "descriptors": shape.descriptors, "bytes": shape.bytes}
            rows.append({**head, **sums, "layers": sum(g.layers for g in self.groups)})
        not_in_all = ("window_tokens", "block_size", "blocks", "descriptor_bytes")
        return pd.DataFrame(rows).astype(dict.fromkeys(not_in_all, "Int64"))

    def notes(self) -> list[str]:
        """Say what this layout takes for granted, one sentence each; what is inferred is marked so."""
        said = [f"{self.name} is {self.model}: {self.source}"]
        if any(g.name != "MLA" and g.token_bytes for g in self.groups):
            said.append(f"K and V of a page are {'two descriptors' if self.kv_apart else 'one descriptor'}")
        fixed = [g for g in self.groups if g.window is not None or not g.token_bytes]
        if fixed:
            n = sum(g.blocks(2**40, self.extra_window_blocks) * g.slots * len(g.pieces) for g in fixed)
            said.append(f"{n:,} descriptors do not depend on the prompt (once it fills the window)")
        for g in (g for g in self.groups if g.slots != g.layers):
            said.append(f"{g.name}: {g.slots} layers pulled for {g.layers} (padding of layer groups, {self.engine})")
        return said + [f"inferred: {text}" for text in self.inferred]


def load(
    name_or_path: str | Path,
    *,
    dtype: str = "bfloat16",
    block_size: int | None = None,
    tp: int = 1,
    engine: str = "vllm-0.23",
    kv_apart: bool | None = None,
    extra_window_blocks: int | None = None,
) -> Layout:
    """Return the layout of a shipped model (``names()``), a hub id among them, or a config.json on disk.

    :param dtype: of the KV cache; ``auto`` takes the model's own
    :param block_size: tokens a block, as ``--block-size`` sets it, before vLLM evens the pages out
    :param engine: one of :data:`ENGINES`
    :param kv_apart: K and V in two descriptors or in one, where the engine's way does not fit
    :param extra_window_blocks: blocks that a sliding layer hands over beyond its window (vLLM: 1)
    :raises BadInput: an unknown name (the nearest are named), an unreadable or unknown config, a TP that
        does not divide the heads
    """
    name, entry = _entry(name_or_path)
    config, where = entry["config"], f"layout {name}"
    _whole(tp, "tp", where)
    asked = {"block_size": block_size, "kv_apart": kv_apart, "extra_window_blocks": extra_window_blocks}
    for key, least in (("block_size", 1), ("extra_window_blocks", 0)):
        if asked[key] is not None:
            _whole(asked[key], key, where, least)
    own = _model_dtype(config)
    dtype = own if dtype == "auto" else dtype
    for value, known, what in ((dtype, DTYPE_BYTES, "KV dtype"), (engine, ENGINES, "engine")):
        if value not in known:
            raise BadInput(f"{where}: unknown {what} {value!r}; known: {', '.join(known)}")
    apart, padding = ENGINES[engine]
    read = {"kv_apart": apart, "extra_window_blocks": 1, **entry.get("reading", {})}
    read |= {k: v for k, v in asked.items() if v is not None}
    groups = _groups(config, where, (DTYPE_BYTES[dtype], DTYPE_BYTES[own]), read.get("block_size"), tp)
    slots = _slots([g.layers for g in groups], padding if all(g.token_bytes for g in groups) else "all")
    for i, g in enumerate(groups):
        halves = 2 if read["kv_apart"] and g.name != "MLA" else 1
        groups[i] = replace(g, slots=slots[i], pieces=g.pieces or (g.page_bytes // halves,) * halves)
    inferred = tuple(text for key, text in entry.get("inferred", {}).items() if asked.get(key) is None)
    made = (dtype, tp, engine, read["kv_apart"], read["extra_window_blocks"], tuple(groups), inferred)
    return Layout(name, entry["model"], entry["source"], *made)


def names() -> list[str]:
    """Return the names of the layouts that kvlab ships."""
    return sorted(_shipped())


@functools.cache
def _shipped() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("layouts.json").read_text("utf-8")))


def _entry(name_or_path: str | Path) -> tuple[str, dict[str, Any]]:
    name = str(name_or_path)
    known = {alias: short for short, e in _shipped().items() for alias in (short, e["model"].lower())}
    if short := known.get(name.lower()):
        return short, _shipped()[short]
    path = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if not os.path.isfile(path):  # unlike Path's, says no to a name that no file can have
        near = list(dict.fromkeys(known[m] for m in difflib.get_close_matches(name.lower(), known, 3, 0.5)))
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names())}"
        raise BadInput(f"no layout and no config.json at {name!r}; {hint}")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"{path}: a model's config.json is a JSON object")
    label = path.resolve().parent.name if path.name == "config.json" else path.stem
    return label, {"model": label, "source": path.name, "config": config}


def _whole(value: object, key: str, where: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{where}: {key} must be a whole number from {least} up (got {value!r})")
    return value


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _model_dtype(config: Mapping[str, Any]) -> str:
    found = [c.get(k) for c in (_text(config), config) for k in ("dtype", "torch_dtype")]
    return next((d for d in found if isinstance(d, str) and d in DTYPE_BYTES), "bfloat16")


def _number(config: Mapping[str, Any], where: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise BadInput(
            f"{where}: config.json has no {key!r}; where the hub's file leaves it to the class's default, "
            "save the whole with transformers: AutoConfig.from_pretrained(...).save_pretrained(...)"
        )
    return _whole(value, key, where)


def _kinds(c: Mapping[str, Any], where: str) -> list[str]:
    """Return full, sliding or linear for every layer that keeps KV of its own."""
    n, family = _number(c, where, "num_hidden_layers"), str(c.get("model_type"))
    listed, pattern = c.get("layer_types"), c.get("sliding_window_pattern") or _PATTERNS.get(family)
    # Qwen's classes leave the window off unless told to use it.
    windowed = c.get("sliding_window") and c.get("use_sliding_window", not family.startswith("qwen"))
    if listed is not None:
        kinds = [str(k).removesuffix("_attention") for k in (listed if isinstance(listed, list) else [listed])]
        odd = [k for k in kinds if k not in ("full", "sliding", "linear")]
        if odd or len(kinds) != n:
            what = f"a layer of type {odd[0]!r}" if odd else f"{len(kinds)} layer_types for {n} layers"
            raise BadInput(f"{where}: {what}, whose KV layout kvlab does not know")
    elif c.get("full_attention_interval"):
        every = _number(c, where, "full_attention_interval")
        kinds = ["linear" if (i + 1) % every else "full" for i in range(n)]
    elif not windowed:
        kinds = ["full"] * n
    elif isinstance(pattern, int) and pattern > 0:
        kinds = ["sliding" if (i + 1) % pattern else "full" for i in range(n)]
    else:
        first = _whole(c.get("max_window_layers") or 0, "max_window_layers", where, 0)
        kinds = ["full" if i < first else "sliding" for i in range(n)]
    # Gemma 3n and the small Gemma 4: the last layers read the KV of earlier ones.
    return kinds[: max(0, n - _whole(c.get("num_kv_shared_layers") or 0, "num_kv_shared_layers", where, 0))]


def _groups(config: Mapping[str, Any], where: str, sizes: tuple[int, int], block: int | None, tp: int) -> list[Group]:
    """Read the layer kinds and even their pages out as vLLM does; no padding of groups, K and V not split yet."""
    c = _text(config)
    if odd := [key for key in _UNKNOWN if c.get(key) or config.get(key)]:
        raise BadInput(f"{where}: {odd[0]} in config.json changes the KV cache in a way that kvlab does not know")
    get = functools.partial(_number, c, where)
    kinds = _kinds(c, where)
    if c.get("kv_lora_rank"):
        latent, block = (get("kv_lora_rank") + get("qk_rope_head_dim")) * sizes[0], block or DEFAULT_MLA_BLOCK
        return [Group("MLA", len(kinds), 0, block, latent, block * latent)]
    block, gemma4 = block or DEFAULT_BLOCK, str(c.get("model_type")).startswith("gemma4")
    heads = get("num_attention_heads")
    head_dim = _whole(c.get("head_dim") or get("hidden_size") // heads, "head_dim", where)
    if get("v_head_dim", head_dim) != head_dim:
        raise BadInput(f"{where}: values of another width than keys (v_head_dim), which kvlab does not know")
    groups = []
    for kind, name in (("full", "global"), ("sliding", "sliding")):
        own_heads, own_dim = get("num_key_value_heads", heads), head_dim
        if kind == "full" and "sliding" in kinds:
            own_dim = get("global_head_dim", 512 if gemma4 else head_dim)
            if c.get("attention_k_eq_v", not gemma4):  # Gemma4TextConfig.__post_init__: the gate, off by default
                own_heads = get("num_global_key_value_heads", own_heads)
        if n := kinds.count(kind):
            if max(own_heads, tp) % min(own_heads, tp):
                raise BadInput(f"{where}: tp {tp} and {own_heads} KV heads do not divide one another")
            # Fewer KV heads than ranks: every rank keeps one, so heads are there more than once.
            token = 2 * max(1, own_heads // tp) * own_dim * sizes[0]
            window = get("sliding_window") if kind == "sliding" else None
            groups.append(Group(name, n, 0, block, token, block * token, window=window))
    if not groups:
        raise BadInput(f"{where}: a model without attention layers, whose KV layout kvlab does not know")
    if states := kinds.count("linear"):
        if len(groups) > 1:
            raise BadInput(f"{where}: state layers beside sliding ones, whose KV layout kvlab does not know")
        return _with_state(get, where, groups[0], states, (sizes[1], str(c.get("mamba_ssm_dtype"))), tp)
    page = max(g.page_bytes for g in groups)
    even = [page // g.page_bytes if page % g.page_bytes == 0 else 1 for g in groups]
    return [replace(g, block_size=g.block_size * n, page_bytes=page) for g, n in zip(groups, even, strict=True)]


def _with_state(get: Any, where: str, g: Group, layers: int, dtypes: tuple[int, str], tp: int) -> list[Group]:
    """Add the gated delta net's states and grow the attention block until a page holds one.

    Shapes: MambaStateShapeCalculator.gated_delta_net_state_shape in vLLM; the convolution's state is read as
    three descriptors (query, key, value), the recurrent one as one.
    """
    k_heads, v_heads = get("linear_num_key_heads"), get("linear_num_value_heads")
    if k_heads % tp or v_heads % tp:
        raise BadInput(f"{where}: tp {tp} does not divide the {k_heads} and {v_heads} heads of its linear attention")
    k, v = k_heads // tp * get("linear_key_head_dim"), v_heads // tp * get("linear_value_head_dim")
    kept = (get("linear_conv_kernel_dim") - 1) * dtypes[0]
    pieces = (k * kept, k * kept, v * kept, v * get("linear_key_head_dim") * DTYPE_BYTES.get(dtypes[1], dtypes[0]))
    block = g.block_size * -(-sum(pieces) // g.page_bytes)
    page = block * g.token_bytes
    return [replace(g, block_size=block, page_bytes=page), Group("state", layers, 0, block, 0, page, pieces)]


def _slots(counts: Sequence[int], padding: str) -> list[int]:
    """Return the layers that are pulled for each kind, padding of vLLM's equal-sized layer groups included."""
    if len(counts) == 1:
        return list(counts)
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    lengths = [[-(-(n - i) // -(-n // size)) for i in range(-(-n // size))] for n in counts]
    everywhere = size if padding == "all" else sorted(x for one in lengths for x in one)[-2]
    return [sum(max(x, everywhere) for x in one) for one in lengths]
