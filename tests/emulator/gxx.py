"""Where the emulator's C++ lies."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
