/* Quantisation of floating tensors to one byte an element, by blocks. See quantise.c for the format and the rules. */
#ifndef ZP_QUANTISE_H
#define ZP_QUANTISE_H

#include <stddef.h>
#include <stdint.h>

#include "reduce.h"

#define ZP__BLOCK_ELEMENTS_MIN 1u
#define ZP__BLOCK_ELEMENTS_MAX 4096u

typedef struct {
	uint32_t algorithm; /* enum zp_quantization, not NONE */
	uint32_t dtype;	    /* enum zp_dtype, floating */
	uint32_t op;	    /* enum zp_op */
	uint32_t block_elements;
} zp__quantiser;

/* Bytes of the two parameters of a block of `dtype`. */
uint32_t zp__quantise_parameter_bytes(uint32_t dtype);

/* Writes `count` elements to `wire`. */
void zp__quantise(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count);

/* Replaces what `wire` holds by it op `local`, divided by `divisor` (1: not). */
void zp__quantise_fold(enum zp__isa isa, const zp__quantiser *how, uint8_t *wire, const void *local, size_t count,
		       uint32_t divisor);

/* Writes the `count` elements that `wire` holds. */
void zp__dequantise(enum zp__isa isa, const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count);

#endif
