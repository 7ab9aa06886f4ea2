/* The digest of a result, computed from the checksums of its frames. */
#ifndef ZP_DIGEST_H
#define ZP_DIGEST_H

#include <stdint.h>

#include "checksum.h"

/* The summand of one frame: a hash of its slot number and its checksum. The digest of a result is the sum over all
 * frames, modulo 2^64. */
uint64_t zp__digest_share(uint64_t slot, uint64_t checksum);

#endif
