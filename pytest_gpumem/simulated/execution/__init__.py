"""The dispatch mode: every operator runs on ``meta``, and each new storage gets a block.

May use: ``common``, ``gpu``, ``machine``, ``operators``.
"""
