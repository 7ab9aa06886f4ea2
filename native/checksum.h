/* The checksum of a span of bytes, 64 bits: of the bodies of frames, of their headers, and of results. */
#ifndef ZP_CHECKSUM_H
#define ZP_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZP__CHECKSUM_BLOCK_BYTES 1024u

/* A checksum of bytes that arrive piece by piece, from the first to the last. All zeros: no bytes so far. */
typedef struct {
	uint64_t sum[2];
	size_t bytes; /* number of bytes in the sum: whole blocks */
} zp__checksum;

/* Adds the whole blocks among the first `bytes` bytes at `data` that are not in the sum yet. */
void zp__checksum_advance(zp__checksum *checksum, const void *data, size_t bytes);

/* The checksum of the `bytes` bytes at `data`, some of which may have been added before. It is 0 for no bytes. */
uint64_t zp__checksum_finish(zp__checksum *checksum, const void *data, size_t bytes);

/* The same for bytes that are all there. */
uint64_t zp__checksum_of(const void *data, size_t bytes);

/* A bijection of 64 bits, in which every bit depends on every other. 0 stays 0. */
uint64_t zp__mix(uint64_t x);

enum zp__checksum_level { ZP__CHECKSUM_PORTABLE, ZP__CHECKSUM_PAIR, ZP__CHECKSUM_WIDE };

/* For tests: all checksums are made by this implementation from now on. False: this CPU or this build lacks it. */
bool zp__checksum_use(enum zp__checksum_level level);

#endif
