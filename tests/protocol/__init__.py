"""Unit tests of zpccl.protocol: one module for each of its modules."""
