"""The shared builders of views: headings and digits from columns.csv, missing ends, words for ranges."""

import csv
from pathlib import Path

import pandas as pd
import pytest

from kvlab.views import build

VIEWS = Path(build.__file__).parent


def test_table_takes_heading_and_digits_from_the_list_unless_told():
    frame = pd.DataFrame({"arm": ["a"], "post_ms": [1.26], "post_share": [0.5], "other": [3]})
    lines = repr(build.table(frame, "t", "Title", "arm post_ms post_share")).split("\n")
    assert [" ".join(x.split()) for x in lines] == ["Title", "Arm Post (ms) Post share", "a 1.3 50%"]
    told = build.table(frame, "t", "T", "post_ms other", digits={"post_ms": None}, post_ms="Mean", other="More")
    assert repr(told).split() == ["T", "Mean", "More", "1.26", "3"]


def test_every_listed_column_is_shown_by_some_view():
    source = " ".join(p.read_text("utf-8") for p in VIEWS.glob("*.py"))
    rows = list(csv.DictReader((VIEWS / "columns.csv").read_text("utf-8").splitlines()))
    names = [r["column"] for r in rows]
    assert names == sorted(set(names)) and all(r["digits"] in ("", "%") or r["digits"].isdigit() for r in rows)
    assert [n for n in names if n not in source] == []


def test_a_missing_end_of_an_interval_is_the_point():
    frame = pd.DataFrame({"arm": ["a", "b"], "case": "c", "x": [1.0, 2.0], "lo": [0.5, None], "hi": [1.5, None]})
    shown = build.intervals(frame, None, "n", "Heading", "", "x", "lo", "hi", x_title="X")
    bundle = shown._repr_mimebundle_()
    spec = (bundle[0] if isinstance(bundle, tuple) else bundle)["application/vnd.vegalite.v5+json"]
    (rows,) = spec["datasets"].values()
    assert [(r["lo"], r["hi"]) for r in rows] == [(0.5, 1.5), (2, 2)]


@pytest.mark.parametrize(("ends", "form", "text"), [((1.201, 1.199), ".2f", "1.20"), ((1, 12), "d", "1 to 12")])
def test_span_says_a_range_once_where_both_ends_read_the_same(ends, form, text):
    assert build.span(*ends, form) == text
