"""Suites that several implementations keep, run by tests/conformance: they extend the public ones of vram.testing."""
