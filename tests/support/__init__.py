"""Helpers that several test files share: models, a page, checks and stand-ins."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
