/* The digest of a result. A pure function; any thread may call. */
#include "digest.h"

/* Two rounds of multiply and fold over odd constants: every input bit reaches every output bit, so that sums of shares
 * do not cancel by the structure of CRCs or of slot numbers. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc)
{
	uint64_t x = slot * 0x9e3779b97f4a7c15u + crc + 1;
	x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
	x = (x ^ x >> 29) * 0xa0761d6478bd642fu;
	return x ^ x >> 32;
}
