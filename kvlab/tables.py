"""Tables for people: great-tables with labels and units from the schema, the same id on every run."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import great_tables as gt
import pandas as pd

#: the page's own ink and ground, light or dark, instead of great-tables' black on white
_THEMED = "#{id} table, #{id} table * {{ background-color: transparent !important; border-color: #8888 !important; }}\n"
_THEMED += "#{id} table, #{id} table :not(a) {{ color: inherit !important; }}\n"


class Table(gt.GT):
    """A table whose text form holds its cells, the same on every run and with every version of the library."""

    kvlab_text = kvlab_id = ""

    def as_raw_html(self, *words: Any, **named: Any) -> str:
        """Return the table's HTML, readable in light and dark pages."""
        page = super().as_raw_html(*words, **named)
        return page.replace("<style>\n", "<style>\n" + _THEMED.format(id=self.kvlab_id), 1)

    def __repr__(self) -> str:
        return self.kvlab_text


def show(
    frame: pd.DataFrame,
    name: str,
    *,
    title: str,
    labels: Mapping[str, str],
    decimals: Mapping[str, int] | None = None,
    percent: tuple[str, ...] = (),
    note: str = "",
) -> gt.GT:
    """Show the columns of ``labels`` (name -> heading with unit), in that order.

    :param name: the table's HTML id, so that two executions give the same output
    :param decimals: digits after the point, by column; whole numbers get thousands separators
    :param percent: columns that hold shares of one
    :param note: what a reader must know to read the numbers
    """
    # A label or a log line from elsewhere is text, whatever it looks like.
    cells = frame[list(labels)].map(_plain)
    table = Table(cells, id=name).tab_header(title=_plain(title)).cols_label(**labels)  # type: ignore[arg-type]
    for column, digits in (decimals or {}).items():
        table = table.fmt_number(columns=column, decimals=digits)
    if percent:
        table = table.fmt_percent(columns=list(percent), decimals=0)
    table = table.sub_missing(missing_text="–").tab_options(
        table_font_size="13px", table_margin_left="0", heading_align="left", data_row_padding="4px"
    )
    table = table.tab_source_note(_plain(note)) if note else table
    table.kvlab_id = name
    table.kvlab_text = _text(frame[list(labels)], labels, decimals or {}, percent, title)
    return table


def _plain(value: Any) -> Any:
    return html.escape(value, quote=False) if isinstance(value, str) else value


def _text(
    frame: pd.DataFrame, labels: Mapping[str, str], decimals: Mapping[str, int], percent: tuple[str, ...], title: str
) -> str:
    """Return the cells as text, numbers as they are shown."""
    shown = {}
    for column, label in labels.items():
        digits = decimals.get(column)
        form = "{:.0%}" if column in percent else "{}" if digits is None else f"{{:,.{digits}f}}"
        shown[label] = ["–" if pd.isna(v) is True else form.format(v) for v in frame[column]]
    body = pd.DataFrame(shown).to_string(index=False) if len(frame) else "(no rows)"
    return f"{title}\n{body}"
