"""I/O shells around the machines of `zpccl.protocol`: sockets, threads, timers. They decide nothing."""
