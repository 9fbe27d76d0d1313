"""A single device: its catalogue entry, its memory, and the workspaces of libraries.

May use: ``common``. It refers to no other device, and to no tensor. The catalogue imports no
torch.
"""
