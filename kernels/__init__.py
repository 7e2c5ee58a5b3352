"""Attention over raw block addresses, and the block writes that go with it."""
