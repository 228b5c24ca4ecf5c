"""Tests of forks/train_gpt_2026.py. A package, so that its files may have the textbook's names."""
