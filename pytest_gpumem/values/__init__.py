"""Frozen values that the other packages exchange; this package imports none of them."""
