/* The digest of a result, computed from the CRC32C of its frames. */
#ifndef ZP_DIGEST_H
#define ZP_DIGEST_H

#include <stdint.h>

#include "crc32c.h"

/* The summand of one frame: a hash of its slot number and its CRC32C. The digest of a result is the sum over all frames,
 * modulo 2^64. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc);

#endif
