"""The page about search logs: `read` collects what they hold, `bounds` models it, `charts` and `page` show it."""
