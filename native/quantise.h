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

/* -EINVAL: a field of `how` is out of range. The other functions here expect a checked `how`. */
int zp__quantise_check(const zp__quantiser *how);

/* Bytes of parameters per block. */
uint32_t zp__quantise_parameter_bytes(const zp__quantiser *how);

/* Bits per element. */
uint32_t zp__quantise_code_bits(const zp__quantiser *how);

/* Quantises `count` elements to `wire`. */
void zp__quantise(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count);

/* Reduces in place: wire = quantise((dequantise(wire) op local) / divisor). */
void zp__quantise_fold(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *local, size_t count,
		       uint32_t divisor);

/* Reduces the shares of all `peers` in order of rank, divides by `divisor` and quantises to `wire`. `shares` are those of
 * all ranks but `rank`, quantised; that of `rank` is `local`, not quantised. The result is rounded once. */
void zp__quantise_join(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const uint8_t *const shares[],
		       uint32_t peers, uint32_t rank, const void *local, size_t count, uint32_t divisor);

/* Dequantises `count` elements from `wire`. */
void zp__dequantise(enum zp__isa isa, const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count);

#endif
