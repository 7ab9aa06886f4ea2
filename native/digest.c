/* The digest of a result. A pure function; any thread may call it.
 *
 * How probable it is that peers with different results have the same digest, if the difference has nothing to do with
 * the constants of the checksum. The share of a slot is a bijection of its checksum: if one frame differs the digests
 * are equal as often as its checksums are, 2 times in 2^64 (checksum.c). If several differ, the differences of their
 * shares must add up to 0 as well; with zp__mix() in the place of a random permutation, which is assumed and not
 * proved, that is once in 2^64. So it is less than once in 2^60.
 *
 * This is no defence against a peer that means harm: it knows the constants, and can make frames that differ and have
 * the same checksum. */
#include "digest.h"

uint64_t zp__digest_share(uint64_t slot, uint64_t checksum)
{
	return zp__mix(checksum ^ zp__mix(slot));
}
