/* The kernels of one instruction set: see each_isa.h. Plain loops that the compiler vectorises (`to` may be `a` or `b`,
 * never shifted against them); no alignment is assumed. Integers are added and multiplied unsigned, so they wrap. MAX
 * and MIN give a NaN if either side is one. If both sides are NaN, or neither is, the CPU chooses the bits of a NaN;
 * shares.c replaces them where peers have to agree. */

#include "half.h"

#define ZP__UNALIGNED __attribute__((aligned(1), may_alias))
typedef uint8_t ZP__NAME(u8) ZP__UNALIGNED;
typedef int8_t ZP__NAME(i8) ZP__UNALIGNED;
typedef uint16_t ZP__NAME(u16) ZP__UNALIGNED;
typedef int16_t ZP__NAME(i16) ZP__UNALIGNED;
typedef uint32_t ZP__NAME(u32) ZP__UNALIGNED;
typedef int32_t ZP__NAME(i32) ZP__UNALIGNED;
typedef uint64_t ZP__NAME(u64) ZP__UNALIGNED;
typedef int64_t ZP__NAME(i64) ZP__UNALIGNED;
typedef float ZP__NAME(f32) ZP__UNALIGNED;
typedef double ZP__NAME(f64) ZP__UNALIGNED;
#undef ZP__UNALIGNED

#define KERNEL(NAME, TYPE, WIDE, LOAD, STORE, RESULT)                                                                  \
	static void ZP__NAME(NAME)(void *to, const void *a, const void *b, size_t count)                               \
	{                                                                                                              \
		ZP__NAME(TYPE) *t = to;                                                                                \
		const ZP__NAME(TYPE) *p = a, *q = b;                                                                   \
		ZP__INDEPENDENT                                                                                        \
		for (size_t i = 0; i < count; i++) {                                                                   \
			WIDE x = LOAD(p[i]), y = LOAD(q[i]);                                                           \
			t[i] = STORE(RESULT);                                                                          \
		}                                                                                                      \
	}

#define INTEGER_KERNELS(TYPE, UNSIGNED, WIDE, STORED)                                                                  \
	KERNEL(sum_##TYPE, UNSIGNED, WIDE, (WIDE), STORED, x + y)                                                    \
	KERNEL(prod_##TYPE, UNSIGNED, WIDE, (WIDE), STORED, x *y)                                                    \
	KERNEL(max_##TYPE, TYPE, ZP__NAME(TYPE), , , x > y ? x : y)                                                    \
	KERNEL(min_##TYPE, TYPE, ZP__NAME(TYPE), , , x < y ? x : y)

#define FLOAT_KERNELS(NAME, TYPE, WIDE, LOAD, STORE)                                                                   \
	KERNEL(sum_##NAME, TYPE, WIDE, LOAD, STORE, x + y)                                                             \
	KERNEL(prod_##NAME, TYPE, WIDE, LOAD, STORE, x *y)                                                             \
	KERNEL(max_##NAME, TYPE, WIDE, LOAD, STORE, ((x > y) | (x != x)) ? x : y)                                      \
	KERNEL(min_##NAME, TYPE, WIDE, LOAD, STORE, ((x < y) | (x != x)) ? x : y)

#define DIVIDE_KERNEL(TYPE, WIDE)                                                                                      \
	static void ZP__NAME(divide_##TYPE)(void *data, size_t count, uint32_t divisor)                                \
	{                                                                                                              \
		ZP__NAME(TYPE) *d = data;                                                                              \
		WIDE by = (WIDE)divisor;                                                                               \
		for (size_t i = 0; i < count; i++)                                                                     \
			d[i] = d[i] / by;                                                                              \
	}

/* SUM: type of a wide element; integers are added unsigned, so that a wrong one from a peer wraps. They are divided as
 * doubles, which is exact and much faster: a sum has at most 43 bits, so a fractional quotient is never rounded to an
 * integer. */
#define FOLD_KERNEL(NAME, TYPE, SUM, LOAD, OP)                                                                         \
	static void ZP__NAME(NAME)(void *wide, const void *from, size_t count)                                         \
	{                                                                                                              \
		ZP__NAME(SUM) *w = wide;                                                                               \
		const ZP__NAME(TYPE) *f = from;                                                                        \
		ZP__INDEPENDENT for (size_t i = 0; i < count; i++) w[i] OP LOAD(f[i]);                            \
	}

#define FOLD_MEAN_KERNEL(NAME, LOAD)                                                                                   \
	static void ZP__NAME(fold_mean_##NAME)(void *wide, const void *mean, size_t count, uint32_t shares)            \
	{                                                                                                              \
		ZP__NAME(f32) *w = wide;                                                                               \
		const ZP__NAME(u16) *m = mean;                                                                         \
		float weight = (float)shares;                                                                          \
		ZP__INDEPENDENT for (size_t i = 0; i < count; i++) w[i] += LOAD(m[i]) * weight;                   \
	}

#define WIDE_KERNELS(NAME, TYPE, SUM, SIGNED, REAL, LOAD, STORE)                                                       \
	FOLD_KERNEL(widen_##NAME, TYPE, SUM, LOAD, =)                                                                  \
	FOLD_KERNEL(fold_sum_##NAME, TYPE, SUM, LOAD, +=)                                                              \
	static void ZP__NAME(narrow_##NAME)(void *to, const void *wide, size_t count, uint32_t divisor)                \
	{                                                                                                              \
		ZP__NAME(TYPE) *t = to;                                                                                \
		const ZP__NAME(SUM) *w = wide;                                                                         \
		REAL by = (REAL)divisor;                                                                               \
		if (divisor == 1) {                                                                                    \
			ZP__INDEPENDENT for (size_t i = 0; i < count; i++) t[i] = STORE((SIGNED)w[i]);            \
			return;                                                                                        \
		}                                                                                                      \
		ZP__INDEPENDENT for (size_t i = 0; i < count; i++)                                                \
			t[i] = STORE((SIGNED)((REAL)(SIGNED)w[i] / by));                                               \
	}                                                                                                              \
	static void ZP__NAME(mean_##NAME)(void *to, const void *a, const void *b, size_t count, uint32_t shares)       \
	{                                                                                                              \
		ZP__NAME(TYPE) *t = to;                                                                                \
		const ZP__NAME(TYPE) *p = a, *q = b;                                                                   \
		ZP__NAME(SUM) weight = (ZP__NAME(SUM))(shares - 1);                                                    \
		REAL by = (REAL)shares;                                                                                \
		ZP__INDEPENDENT for (size_t i = 0; i < count; i++)                                                \
		{                                                                                                      \
			ZP__NAME(SUM) sum = LOAD(p[i]) * weight + LOAD(q[i]);                                          \
			t[i] = STORE((SIGNED)((REAL)(SIGNED)sum / by));                                                \
		}                                                                                                      \
	}

INTEGER_KERNELS(u8, u8, uint32_t, (uint8_t))
INTEGER_KERNELS(i8, u8, uint32_t, (uint8_t))
INTEGER_KERNELS(u16, u16, uint32_t, (uint16_t))
INTEGER_KERNELS(i16, u16, uint32_t, (uint16_t))
INTEGER_KERNELS(u32, u32, uint32_t, (uint32_t))
INTEGER_KERNELS(i32, u32, uint32_t, (uint32_t))
INTEGER_KERNELS(u64, u64, uint64_t, (uint64_t))
INTEGER_KERNELS(i64, u64, uint64_t, (uint64_t))
FLOAT_KERNELS(f16, u16, float, ZP__NAME(float_of_half), ZP__NAME(half_of_float))
FLOAT_KERNELS(bf16, u16, float, ZP__NAME(float_of_brain), ZP__NAME(brain_of_float))
FLOAT_KERNELS(f32, f32, float, , )
FLOAT_KERNELS(f64, f64, double, , )

DIVIDE_KERNEL(u64, uint64_t)
DIVIDE_KERNEL(i64, int64_t)
DIVIDE_KERNEL(f32, float)
DIVIDE_KERNEL(f64, double)

WIDE_KERNELS(u8, u8, u32, int32_t, double, (uint32_t), (uint8_t))
WIDE_KERNELS(i8, i8, u32, int32_t, double, (uint32_t), (int8_t))
WIDE_KERNELS(u16, u16, u32, int32_t, double, (uint32_t), (uint16_t))
WIDE_KERNELS(i16, i16, u32, int32_t, double, (uint32_t), (int16_t))
WIDE_KERNELS(u32, u32, u64, int64_t, double, (uint64_t), (uint32_t))
WIDE_KERNELS(i32, i32, u64, int64_t, double, (uint64_t), (int32_t))
WIDE_KERNELS(f16, u16, f32, float, float, ZP__NAME(float_of_half), ZP__NAME(half_of_float))
WIDE_KERNELS(bf16, u16, f32, float, float, ZP__NAME(float_of_brain), ZP__NAME(brain_of_float))
FOLD_KERNEL(fold_prod_f16, u16, f32, ZP__NAME(float_of_half), *=)
FOLD_KERNEL(fold_prod_bf16, u16, f32, ZP__NAME(float_of_brain), *=)
FOLD_MEAN_KERNEL(f16, ZP__NAME(float_of_half))
FOLD_MEAN_KERNEL(bf16, ZP__NAME(float_of_brain))

#define OPS_OF(TYPE)                                                                                                   \
	{                                                                                                              \
		ZP__NAME(sum_##TYPE), ZP__NAME(sum_##TYPE), ZP__NAME(prod_##TYPE), ZP__NAME(max_##TYPE),               \
			ZP__NAME(min_##TYPE)                                                                           \
	}

/* For integers only the mean is computed wide: their sums and products wrap to the same bits at any width. */
#define WIDE_OF(TYPE, SUM, PROD, MEAN)                                                                                 \
	{                                                                                                              \
		ZP__NAME(widen_##TYPE), {SUM, ZP__NAME(fold_sum_##TYPE), PROD}, MEAN, ZP__NAME(narrow_##TYPE),         \
			ZP__NAME(mean_##TYPE)                                                                          \
	}
#define WIDE_INTEGER(TYPE) WIDE_OF(TYPE, NULL, NULL, NULL)
#define WIDE_FLOAT(TYPE)                                                                                               \
	WIDE_OF(TYPE, ZP__NAME(fold_sum_##TYPE), ZP__NAME(fold_prod_##TYPE), ZP__NAME(fold_mean_##TYPE))

static const zp__reduce_kernels ZP__NAME(kernels) = {
	ZP__ISA_NAME,
	{OPS_OF(u8), OPS_OF(i8), OPS_OF(u16), OPS_OF(i16), OPS_OF(u32), OPS_OF(i32), OPS_OF(u64), OPS_OF(i64), OPS_OF(f16),
	 OPS_OF(bf16), OPS_OF(f32), OPS_OF(f64)},
	{NULL, NULL, NULL, NULL, NULL, NULL, ZP__NAME(divide_u64), ZP__NAME(divide_i64), NULL, NULL, ZP__NAME(divide_f32),
	 ZP__NAME(divide_f64)},
	{WIDE_INTEGER(u8), WIDE_INTEGER(i8), WIDE_INTEGER(u16), WIDE_INTEGER(i16), WIDE_INTEGER(u32), WIDE_INTEGER(i32), {0},
	 {0}, WIDE_FLOAT(f16), WIDE_FLOAT(bf16), {0}, {0}},
};

#undef KERNEL
#undef INTEGER_KERNELS
#undef FLOAT_KERNELS
#undef DIVIDE_KERNEL
#undef OPS_OF
#undef FOLD_KERNEL
#undef FOLD_MEAN_KERNEL
#undef WIDE_KERNELS
#undef WIDE_OF
#undef WIDE_INTEGER
#undef WIDE_FLOAT
