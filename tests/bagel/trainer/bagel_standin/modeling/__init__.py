"""Stands in for the package `modeling` of ByteDance-Seed/Bagel."""
