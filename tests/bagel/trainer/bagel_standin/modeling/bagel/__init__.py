"""A tiny model with the symbols and call patterns that attnforge.bagel.patch() relies on."""
