"""Tests of forks/train_gpt_2026.py. A package, so that files of tests/ may have the same names."""
