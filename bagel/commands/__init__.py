"""Commands of cli.py and what they share."""
