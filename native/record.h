/* The record layer of encrypted connections; see record.c. */
#ifndef ZP_RECORD_H
#define ZP_RECORD_H

#include <stdint.h>
#include <sys/types.h>

#include "zp_api.h"

struct iovec;
struct zp__connection;

typedef struct zp__record_layer zp__record_layer;

/* Makes the record layer of one connection. -EINVAL: sizes of the cipher out of range; -ENOMEM. */
int zp__record_layer_open(const zp_aead *cipher, zp__record_layer **layer);

/* Wipes and frees it. NULL is legal. */
void zp__record_layer_close(zp__record_layer *layer);

/* Encrypts bytes of `iov` and sends what the socket takes; zp__record_flush() sends the rest. Returns the bytes
 * consumed from `iov`, or -errno. Sets c->writable to false when the socket is full. */
ssize_t zp__record_send(struct zp__connection *c, const struct iovec *iov, int count);

/* Sends the encrypted bytes that are buffered. 1: all sent; 0: the socket is full, and c->writable is false; -errno. */
int zp__record_flush(struct zp__connection *c);

/* Receives decrypted and verified bytes to `iov`: buffered ones, or else the next ones. Returns their number; 0: none
 * for now, and c->readable may be true or false; -errno; -EBADMSG: a record failed verification. */
ssize_t zp__record_receive(struct zp__connection *c, const struct iovec *iov, int count);

#endif
