"""PNGs of masks and schedules."""
