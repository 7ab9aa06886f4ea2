/* Elementwise kernels, one set for each instruction set. */
#ifndef ZP_REDUCE_H
#define ZP_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#define ZP__DTYPES 12
#define ZP__OPS 5

enum zp__isa { ZP__BASELINE, ZP__AVX2, ZP__AVX512, ZP__ISA_COUNT };

typedef struct {
	const char *name;
	/* to[i] = a[i] op b[i] for `count` elements; `to` may be `a` or `b`. AVG adds. Indexed by dtype and op. */
	void (*reduce[ZP__DTYPES][ZP__OPS])(void *to, const void *a, const void *b, size_t count);
	/* data[i] = data[i] / divisor; integers toward zero. Indexed by dtype. */
	void (*divide[ZP__DTYPES])(void *data, size_t count, uint32_t divisor);
} zp__reduce_kernels;

extern const uint8_t zp__itemsize[ZP__DTYPES];

/* NULL where this CPU or this build lacks the instruction set. ZP__BASELINE is always there. */
const zp__reduce_kernels *zp__reduce_kernels_of(enum zp__isa isa);

/* The widest instruction set that this CPU has. */
enum zp__isa zp__isa_best(void);

#endif
