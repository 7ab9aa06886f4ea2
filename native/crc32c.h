/* CRC32C (RFC 3720, appendix B.4). */
#ifndef ZP_CRC32C_H
#define ZP_CRC32C_H

#include <stddef.h>
#include <stdint.h>

typedef uint32_t zp__crc32c_function(uint32_t crc, const void *data, size_t bytes);

enum zp__crc32c_level { ZP__CRC32C_TABLES, ZP__CRC32C_INSTRUCTION, ZP__CRC32C_FOLDING };

/* CRC32C of `bytes` at `data`, continued from `crc`, the CRC of the data before (0: none). */
zp__crc32c_function zp__crc32c;

/* One implementation of zp__crc32c(), for tests; NULL where the CPU lacks it. Call zp__crc32c() before: it makes the
 * tables. */
zp__crc32c_function *zp__crc32c_of(enum zp__crc32c_level level);

#endif
