"""Code that tests share, and functions that they run on ranks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the repository."""
