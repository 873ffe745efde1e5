"""The C++ launcher: its sources, and what loads it."""
