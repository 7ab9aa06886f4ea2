/* Sealed connections; see seal.c. */
#ifndef ZP_SEAL_H
#define ZP_SEAL_H

#include <stdint.h>
#include <sys/types.h>

#include "zp_api.h"

struct iovec;
struct zp__connection;

typedef struct zp__seal zp__seal;

/* Makes the seal of one connection. -EINVAL: a cipher of sizes that cannot be; -ENOMEM. */
int zp__seal_open(const zp_seal *cipher, zp__seal **seal);

/* Wipes and frees it. NULL is legal. */
void zp__seal_close(zp__seal *seal);

/* Seals and sends of `iov` what the socket takes, and a little more, which zp__seal_flush() sends. Returns the bytes
 * taken from `iov` or -errno. When the socket is full, c->writable is false. */
ssize_t zp__seal_send(struct zp__connection *c, const struct iovec *iov, int count);

/* Sends what is sealed. 1: all has gone; 0: the socket is full, and c->writable is false; -errno. */
int zp__seal_flush(struct zp__connection *c);

/* Receives verified bytes to `iov`. Returns their number; 0: none are there for now, though c->readable may be false
 * while bytes are; -errno, -EBADMSG when what came was not sealed by the other end for this place. */
ssize_t zp__seal_receive(struct zp__connection *c, const struct iovec *iov, int count);

#endif
