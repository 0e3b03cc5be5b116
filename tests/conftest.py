"""Shared by all tests: this folder is importable (small_models)."""
