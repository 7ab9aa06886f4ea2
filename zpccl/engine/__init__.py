"""Moves bytes: the binding of the C engine, ciphers, and tensors of the host and of devices."""
