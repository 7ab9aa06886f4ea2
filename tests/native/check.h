/* The few things that all native tests use. */
#ifndef CHECK_H
#define CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition);          \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

/* xorshift64*: the same numbers in every run. */
static inline uint64_t random_next(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545f4914f6cdd1du;
}

/* FNV-1a (64 bits), continued from `digest`: for results that a test has on record. */
static inline uint64_t digest_add(uint64_t digest, const void *data, size_t bytes)
{
	const uint8_t *p = data;
	while (bytes--)
		digest = (digest ^ *p++) * 0x100000001b3u;
	return digest;
}

#endif
