/* Elementwise kernels, one set for each instruction set. */
#ifndef ZP_REDUCE_H
#define ZP_REDUCE_H

#include <stddef.h>
#include <stdint.h>

#define ZP__DTYPES 12
#define ZP__OPS 5

enum zp__isa { ZP__BASELINE, ZP__AVX2, ZP__AVX512, ZP__ISA_COUNT };

/* Folds many shares without intermediate rounding or overflow: elements are widened to 32 bits (16-bit floats; integers
 * of 8 and 16 bits) or 64 (integers of 32). ZP__WORLD_SIZE_MAX integers cannot overflow there. No alignment is
 * assumed. */
typedef struct {
	void (*widen)(void *wide, const void *from, size_t count);
	/* wide[i] = wide[i] op from[i]. By op; NULL: widening gains nothing, so use `reduce`. */
	void (*fold[ZP__OPS])(void *wide, const void *from, size_t count);
	/* wide[i] = wide[i] + mean[i] * shares: a mean of up to ZP__WORLD_SIZE_MAX shares, so that the product is
	 * exact. NULL: for integers, whose means are too coarse for that. */
	void (*fold_mean)(void *wide, const void *mean, size_t count, uint32_t shares);
	/* to[i] = wide[i] / divisor, rounded once; integers toward zero. */
	void (*narrow)(void *to, const void *wide, size_t count, uint32_t divisor);
	/* The mean with one more share: to[i] = (a[i] * (shares - 1) + b[i]) / shares, rounded once; `to` may be `a` or
	 * `b`. Integers: only for 2 shares, otherwise the product may overflow. */
	void (*mean)(void *to, const void *a, const void *b, size_t count, uint32_t shares);
} zp__wide_kernels;

typedef struct {
	const char *name;
	/* to[i] = a[i] op b[i] for `count` elements; `to` may be `a` or `b`. AVG adds. Indexed by dtype and op. */
	void (*reduce[ZP__DTYPES][ZP__OPS])(void *to, const void *a, const void *b, size_t count);
	/* data[i] = data[i] / divisor; integers toward zero. Indexed by dtype; NULL: `wide` divides. */
	void (*divide[ZP__DTYPES])(void *data, size_t count, uint32_t divisor);
	zp__wide_kernels wide[ZP__DTYPES]; /* all NULL for dtypes without a wider one */
} zp__reduce_kernels;

extern const uint8_t zp__itemsize[ZP__DTYPES];
extern const uint8_t zp__wide_itemsize[ZP__DTYPES]; /* 0: there is no wider one */

/* NULL if this CPU or this build lacks the instruction set. ZP__BASELINE is always there. */
const zp__reduce_kernels *zp__reduce_kernels_of(enum zp__isa isa);

/* The widest instruction set that this CPU has. */
enum zp__isa zp__isa_best(void);

#endif
