/* The digest of a result. A pure function; any thread may call it.
 *
 * Probability that peers with different results have the same digest, if the difference does not depend on the
 * constants of the checksum. The share of a slot is a bijection of its checksum. So if one frame differs, the digests
 * are equal as often as its checksums, 2 times in 2^64 (checksum.c). If several frames differ, the differences of their
 * shares must also add up to 0: once in 2^64, if zp__mix() behaves like a random permutation, which is assumed and not
 * proved. So the probability is less than once in 2^60.
 *
 * This is no defence against a malicious peer: it knows the constants, and can make different frames with the same
 * checksum. */
#include "digest.h"

uint64_t zp__digest_share(uint64_t slot, uint64_t checksum)
{
	return zp__mix(checksum ^ zp__mix(slot));
}
