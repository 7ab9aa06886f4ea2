"""The protocol: pure state machines. No I/O, no clock, no randomness."""
