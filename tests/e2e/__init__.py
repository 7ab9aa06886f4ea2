"""End-to-end tests: real processes, real sockets, real signals."""
