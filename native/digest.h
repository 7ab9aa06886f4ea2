/* The digest of a result, which is made of the CRC32C of its frames. */
#ifndef ZP_DIGEST_H
#define ZP_DIGEST_H

#include <stdint.h>

#include "crc32c.h"

/* What one frame of a result adds (modulo 2^64) to the digest of the whole: a mix of its number and its CRC32C. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc);

#endif
