"""Fault-tolerant collective communication for training across the public internet."""
