"""Kinds of operations: what differs between them. What they have in common: ../operation.py."""
