"""A wide-area network between network namespaces of this host: delays, rates, losses, queues, cuts. See README.md."""
