"""Secrets out of text and plain data before they reach a run folder that people hand on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "REDACTED"
# TOKENIZER, AUTHOR, KEYBOARD are no secrets, nor are InfiniBand's partition and memory keys (UCX_IB_PKEY).
_SECRET = re.compile(
    r"TOKEN(?!IZ)|(?<![_.-][PRLM])KEY(?!BOARD)|SECRET|PASS(?:W|PHRASE)|AUTH(?!OR(?!I))|CREDENTIAL|SIGNATURE"
    r"|(?<![A-Z])SIG(?![A-Z])",
    re.IGNORECASE,
)
# token_ids and max_tokens count something when their value is numbers.
_COUNT = re.compile(r"[\[\]\d\s.,_ekm+-]+|true|false|none|null", re.IGNORECASE)
_NAME = re.compile(r"""(?<![\w.-])([\w.-]+)([\\"']*\s*[:=]\s*|(?<=[\w.-])\s+(?!-))""")
_VALUE = re.compile(r"""\\".*?\\"|"(?:[^"\\]|\\.)*"|'[^']*'|(?:(?:Bearer|Basic|Token)\s+)?[^\s&]+""", re.IGNORECASE)
_SHAPE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END[^\n]*|\Z)|\bBearer\s+\S+"
    r"|\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|nvapi-|xox[abprs]-)[\w-]{8,}|\bA[KS]IA[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
)
_USER = re.compile(r"(?<=://)[^\s\"'<>]{0,999}@|(?<![\w/.+-])[\w.+-]{1,80}:[^\s@:/\"']{1,200}@(?=[\w\[])")


def is_secret(name: str, value: str) -> bool:
    """Tell whether a variable, flag or key of this name and value holds a secret; ``max_tokens=16`` does not."""
    found = {x.upper() for x in _SECRET.findall(name)}
    counts = found == {"TOKEN"} and not name.upper().endswith("TOKEN") and _COUNT.fullmatch(value)
    return bool(found and value and not counts)


def redact(text: str | Sequence[str]) -> str:
    """Return ``text``, or a command line given as its words, with REDACTED for what looks like a secret.

    Known by name (``HF_TOKEN=``, ``--api-key``, ``"password":``, ``Authorization:``), by place (user and
    password in a URL) and by shape (keys of well-known services, JWT, PEM).  It errs on hiding.
    """
    if not isinstance(text, str):
        text = shlex.join(_word(before, word) for before, word in zip(["", *text], text, strict=False))
    text = _USER.sub(f"{HIDDEN}@", _SHAPE.sub(HIDDEN, text))
    out, end = [], 0
    for m in _NAME.finditer(text):
        if m.start() < end or (m[2].isspace() and m[1][0] != "-") or not _SECRET.search(m[1]):
            continue
        value = _VALUE.match(text, m.end())
        if value and is_secret(m[1], value[0].strip("\\\"'")):
            out += [text[end : m.end()], HIDDEN]
            end = value.end()
    return "".join([*out, text[end:]])


def _word(before: str, word: str) -> str:
    """Redact one word of a command line, which is a value as a whole where a flag or NAME= stands before it."""
    if before.startswith("-") and "=" not in before and not word.startswith("-") and is_secret(before, word):
        return HIDDEN
    name, equals, value = word.partition("=")
    plain = equals and re.fullmatch(r"[\w.-]+", name) and is_secret(name, value)
    return f"{name}={HIDDEN}" if plain else redact(word)


def redacted(document: Any, name: str = "") -> Any:
    """Return a copy of plain data (mappings, lists, text) with secrets hidden, by key and by :func:`redact`."""
    if isinstance(document, dict):
        # What hangs under a secret name is secret too, whatever its own name.
        under = f"{name}." if re.fullmatch(r"[\w.-]+", name) and _SECRET.search(name) else ""
        return {k: redacted(v, f"{under}{k}") for k, v in document.items()}
    if isinstance(document, list | tuple):
        return [redacted(v, name) for v in document]
    if isinstance(document, str):
        return HIDDEN if is_secret(name, document) else redact(document)
    return document


def secrets(document: Any, name: str = "") -> set[str]:
    """Return the secret values in plain data: by key (``HF_TOKEN``), after a flag (``--api-key X``) or ``NAME=``.

    Values that may stand anywhere (under eight characters, one word, numbers) are left out: see :func:`hide`.
    """
    if isinstance(document, dict):
        return set().union(*(secrets(v, str(k)) for k, v in document.items()))
    if isinstance(document, list | tuple):
        flags = [str(w) if str(w).startswith("-") else name for w in ["", *document]]
        return set().union(*(secrets(v, flag) for flag, v in zip(flags, document, strict=False)))
    key, _, value = str(document).partition("=")
    found = [(name, str(document)), (key, value)]
    own = {v for n, v in found if len(v) > 7 and v[0] != "-" and is_secret(n, v)}
    return {v for v in own if not v.isalpha() and re.search("[A-Za-z]", v)}


def without(text: str, values: Iterable[str]) -> str:
    """Return ``text`` with REDACTED for ``values``, the longest first: one may be part of another."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def hide(files: Iterable[Path], values: Iterable[str]) -> None:
    """Put REDACTED for ``values`` wherever they stand in ``files``: engines print their arguments and errors."""
    known = list(values)
    for path in files:
        before = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
        if (text := without(before, known)) != before:
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
