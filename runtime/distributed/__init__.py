"""Attention over several devices: context parallelism and DTensor."""
