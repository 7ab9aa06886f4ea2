"""Tests of the data plane and its binding."""
