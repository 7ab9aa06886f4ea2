/* The kernels of one instruction set. reduce.c includes this file once for each, with ZP__NAME(name) giving the names
 * and ZP__ISA_NAME that of the set. No alignment is assumed; plain loops that the compiler vectorises ("ivdep":
 * `to` may be `a` or `b`, never shifted against them). Integers are added and multiplied unsigned, so they wrap. MAX
 * and MIN give a NaN where either side is one. */

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
		_Pragma("GCC ivdep") for (size_t i = 0; i < count; i++)                                                \
		{                                                                                                      \
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
	KERNEL(max_##NAME, TYPE, WIDE, LOAD, STORE, (x > y) | (x != x) ? x : y)                                        \
	KERNEL(min_##NAME, TYPE, WIDE, LOAD, STORE, (x < y) | (x != x) ? x : y)

#define DIVIDE_KERNEL(NAME, TYPE, WIDE, LOAD, STORE)                                                                   \
	static void ZP__NAME(divide_##NAME)(void *data, size_t count, uint32_t divisor)                                \
	{                                                                                                              \
		ZP__NAME(TYPE) *d = data;                                                                              \
		WIDE by = (WIDE)divisor;                                                                               \
		for (size_t i = 0; i < count; i++) {                                                                   \
			WIDE x = LOAD(d[i]);                                                                           \
			d[i] = STORE(x / by);                                                                          \
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

DIVIDE_KERNEL(u8, u8, uint32_t, , (uint8_t))
DIVIDE_KERNEL(i8, i8, int32_t, , (int8_t))
DIVIDE_KERNEL(u16, u16, uint32_t, , (uint16_t))
DIVIDE_KERNEL(i16, i16, int32_t, , (int16_t))
DIVIDE_KERNEL(u32, u32, uint32_t, , )
DIVIDE_KERNEL(i32, i32, int32_t, , )
DIVIDE_KERNEL(u64, u64, uint64_t, , )
DIVIDE_KERNEL(i64, i64, int64_t, , )
DIVIDE_KERNEL(f16, u16, float, ZP__NAME(float_of_half), ZP__NAME(half_of_float))
DIVIDE_KERNEL(bf16, u16, float, ZP__NAME(float_of_brain), ZP__NAME(brain_of_float))
DIVIDE_KERNEL(f32, f32, float, , )
DIVIDE_KERNEL(f64, f64, double, , )

#define OPS_OF(TYPE)                                                                                                   \
	{                                                                                                              \
		ZP__NAME(sum_##TYPE), ZP__NAME(sum_##TYPE), ZP__NAME(prod_##TYPE), ZP__NAME(max_##TYPE),               \
			ZP__NAME(min_##TYPE)                                                                           \
	}

static const zp__reduce_kernels ZP__NAME(kernels) = {
	ZP__ISA_NAME,
	{OPS_OF(u8), OPS_OF(i8), OPS_OF(u16), OPS_OF(i16), OPS_OF(u32), OPS_OF(i32), OPS_OF(u64), OPS_OF(i64), OPS_OF(f16),
	 OPS_OF(bf16), OPS_OF(f32), OPS_OF(f64)},
	{ZP__NAME(divide_u8), ZP__NAME(divide_i8), ZP__NAME(divide_u16), ZP__NAME(divide_i16), ZP__NAME(divide_u32),
	 ZP__NAME(divide_i32), ZP__NAME(divide_u64), ZP__NAME(divide_i64), ZP__NAME(divide_f16), ZP__NAME(divide_bf16),
	 ZP__NAME(divide_f32), ZP__NAME(divide_f64)},
};

#undef KERNEL
#undef INTEGER_KERNELS
#undef FLOAT_KERNELS
#undef DIVIDE_KERNEL
#undef OPS_OF
#undef ZP__NAME
#undef ZP__ISA_NAME
