"""Tidy rows -> conclusions, as pure functions.  Knows statistics, knows no formats."""
