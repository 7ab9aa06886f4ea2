/* CRC32C of frames and the digest of a result. */
#ifndef ZP_DIGEST_H
#define ZP_DIGEST_H

#include <stddef.h>
#include <stdint.h>

/* CRC32C (RFC 3720, appendix B.4) of `bytes` at `data`, going on from the CRC of what came before (0: nothing). */
uint32_t zp__crc32c(uint32_t crc, const void *data, size_t bytes);

/* The two that zp__crc32c() chooses from; for tests. The first must only be called where zp__crc32c_has_hardware(). */
uint32_t zp__crc32c_hardware(uint32_t crc, const void *data, size_t bytes);
uint32_t zp__crc32c_software(uint32_t crc, const void *data, size_t bytes);
int zp__crc32c_has_hardware(void);

/* What one frame of a result adds (modulo 2^64) to the digest of the whole: a mix of its number and its CRC32C. */
uint64_t zp__digest_share(uint64_t slot, uint32_t crc);

#endif
