/* The digest of a result. A pure function; any thread may call it. */
#include "digest.h"

/* Two rounds of multiply and fold with odd constants: every input bit affects every output bit, so that summands do not
 * cancel because of the structure of CRCs or slot numbers. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc)
{
	uint64_t x = slot * 0x9e3779b97f4a7c15u + crc + 1;
	x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
	x = (x ^ x >> 29) * 0xa0761d6478bd642fu;
	return x ^ x >> 32;
}
