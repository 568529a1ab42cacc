"""Outside text and bytes -> tidy rows.  Knows formats, knows no statistics."""
