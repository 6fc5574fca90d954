"""Records shown as tables: one model of a table, and what it looks like as text, with rich, and in a notebook."""
