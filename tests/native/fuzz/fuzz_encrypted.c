/* fuzz_connection.c over encrypted connections: the peer has the keys, and what it sends is encrypted, but for what is odd. */
#define FUZZ_ENCRYPTED 1
#include "fuzz_connection.c"
