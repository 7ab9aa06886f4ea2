/* A cursor over the buffers of an iovec array. */
#ifndef ZP_PIECES_H
#define ZP_PIECES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

typedef struct {
	const struct iovec *iov;
	int count;
	size_t done; /* bytes of the first buffer */
} zp__pieces;

static inline bool zp__pieces_left(zp__pieces *p)
{
	while (p->count && p->done == p->iov->iov_len) {
		p->iov++;
		p->count--;
		p->done = 0;
	}
	return p->count > 0;
}

static inline uint8_t *zp__piece_at(const zp__pieces *p)
{
	return (uint8_t *)p->iov->iov_base + p->done;
}

static inline size_t zp__piece_bytes(const zp__pieces *p)
{
	return p->iov->iov_len - p->done;
}

#endif
