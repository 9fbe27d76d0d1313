"""Frozen values that rooms hand to each other; this room uses no other one."""
