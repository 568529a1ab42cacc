"""Tables for people: great-tables with labels and units from the schema, the same id on every run."""

from __future__ import annotations

from collections.abc import Mapping

import great_tables as gt
import pandas as pd


class Table(gt.GT):
    """A table whose text form is the same on every run (the library's own holds addresses)."""

    def __repr__(self) -> str:
        return "<table>"


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
    table = Table(frame[list(labels)], id=name).tab_header(title=title).cols_label(**labels)  # type: ignore[arg-type]
    for column, digits in (decimals or {}).items():
        table = table.fmt_number(columns=column, decimals=digits)
    if percent:
        table = table.fmt_percent(columns=list(percent), decimals=0)
    table = table.sub_missing(missing_text="–").tab_options(
        table_font_size="13px", table_margin_left="0", heading_align="left", data_row_padding="4px"
    )
    return table.tab_source_note(note) if note else table
