"""Measure and verify variants, and keep the fastest."""
