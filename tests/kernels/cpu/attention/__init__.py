"""Tests of attention over tiles, without a model."""
