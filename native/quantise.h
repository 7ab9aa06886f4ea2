/* Quantisation of floating tensors to 8 or 4 bits an element, by blocks. See quantise.c for the format and the rules. */
#ifndef ZP_QUANTISE_H
#define ZP_QUANTISE_H

#include <stddef.h>
#include <stdint.h>

#include "reduce.h"
#include "zp_api.h"

#define ZP__BLOCK_ELEMENTS_MIN 1u
#define ZP__BLOCK_ELEMENTS_MAX 4096u

typedef zp_quantiser zp__quantiser;

/* -EINVAL if something in `how` is out of range. All else here wants it to be checked. */
int zp__quantise_check(const zp__quantiser *how);

/* Bytes of the parameters of a block. */
uint32_t zp__quantise_parameter_bytes(const zp__quantiser *how);

/* Bits of an element's code. */
uint32_t zp__quantise_code_bits(const zp__quantiser *how);

/* Writes `count` elements to `wire`. */
void zp__quantise(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count);

/* Replaces what `wire` holds by it op `local`, divided by `divisor` (1: not). */
void zp__quantise_fold(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *local, size_t count,
		       uint32_t divisor);

/* Writes to `wire` what `peers` have: `shares` of all but the one of `rank`, whose share is `local`, combined in
 * this order and divided by `divisor` (1: not). Each was rounded when it was quantised; the result is rounded once. */
void zp__quantise_join(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const uint8_t *const shares[],
		       uint32_t peers, uint32_t rank, const void *local, size_t count, uint32_t divisor);

/* Writes the `count` elements that `wire` holds. */
void zp__dequantise(enum zp__isa isa, const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count);

#endif
