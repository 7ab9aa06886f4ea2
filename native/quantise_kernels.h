/* The quantisation kernels of one instruction set: FLOAT and the 16-bit types computed in float, DOUBLE in double.
 * See each_isa.h. */

#include "half.h"

typedef uint16_t ZP__NAME(unaligned_u16) __attribute__((aligned(1), may_alias));
typedef float ZP__NAME(number_f) __attribute__((aligned(1), may_alias));
typedef double ZP__NAME(number_d) __attribute__((aligned(1), may_alias));

/* The elements from `at` on as floats: in their array or, for a 16-bit type, converted to `buffer`. */
static const ZP__NAME(number_f) *ZP__NAME(load_f)(uint32_t dtype, float *buffer, const void *elements, size_t at,
						  size_t count)
{
	const ZP__NAME(unaligned_u16) *h = (const ZP__NAME(unaligned_u16) *)elements + at;
	if (dtype == ZP_FLOAT)
		return (const ZP__NAME(number_f) *)elements + at;
	if (dtype == ZP_FLOAT16)
		for (size_t i = 0; i < count; i++)
			buffer[i] = ZP__NAME(float_of_half)(h[i]);
	else
		for (size_t i = 0; i < count; i++)
			buffer[i] = ZP__NAME(float_of_brain)(h[i]);
	return buffer;
}

/* Where to write floats before store_f() is called: the array itself or, for a 16-bit type, `buffer`. */
static ZP__NAME(number_f) *ZP__NAME(target_f)(uint32_t dtype, float *buffer, void *elements, size_t at)
{
	return dtype == ZP_FLOAT ? (ZP__NAME(number_f) *)elements + at : buffer;
}

static void ZP__NAME(store_f)(uint32_t dtype, void *elements, size_t at, const ZP__NAME(number_f) *x, size_t count)
{
	ZP__NAME(unaligned_u16) *h = (ZP__NAME(unaligned_u16) *)elements + at;
	if (dtype == ZP_FLOAT16)
		for (size_t i = 0; i < count; i++)
			h[i] = ZP__NAME(half_of_float)(x[i]);
	else if (dtype == ZP_BFLOAT16)
		for (size_t i = 0; i < count; i++)
			h[i] = ZP__NAME(brain_of_float)(x[i]);
}

static const ZP__NAME(number_d) *ZP__NAME(load_d)(uint32_t dtype, double *buffer, const void *elements, size_t at,
						  size_t count)
{
	(void)dtype, (void)buffer, (void)count;
	return (const ZP__NAME(number_d) *)elements + at;
}

static ZP__NAME(number_d) *ZP__NAME(target_d)(uint32_t dtype, double *buffer, void *elements, size_t at)
{
	(void)dtype, (void)buffer;
	return (ZP__NAME(number_d) *)elements + at;
}

static void ZP__NAME(store_d)(uint32_t dtype, void *elements, size_t at, const ZP__NAME(number_d) *x, size_t count)
{
	(void)dtype, (void)elements, (void)at, (void)x, (void)count;
}

#define ZP__REAL float
#define ZP__BITS int32_t
#define ZP__BITS_MAX INT32_MAX
#define ZP__INFINITY_BITS ((int32_t)0x7f800000)
#define ZP__MAGIC 0x1.8p23f
#define ZP__REAL_MAX FLT_MAX
#define ZP__REAL_TINY 0x1p-149f
#define ZP__RANGE_MIN 0x1p-100f
#define ZP__LIFT 0x1p100f
#define ZP__RNAME(name) ZP__NAME(name##_f)
#include "quantise_real.h"

#define ZP__REAL double
#define ZP__BITS int64_t
#define ZP__BITS_MAX INT64_MAX
#define ZP__INFINITY_BITS ((int64_t)0x7ff0000000000000)
#define ZP__MAGIC 0x1.8p52
#define ZP__REAL_MAX DBL_MAX
#define ZP__REAL_TINY 0x1p-1074
#define ZP__RANGE_MIN 0x1p-900
#define ZP__LIFT 0x1p900
#define ZP__RNAME(name) ZP__NAME(name##_d)
#include "quantise_real.h"

static const zp__quantise_kernels ZP__NAME(kernels) = {
	{ZP__NAME(quantise_f), ZP__NAME(quantise_d)},
	{ZP__NAME(fold_f), ZP__NAME(fold_d)},
	{ZP__NAME(join_f), ZP__NAME(join_d)},
	{ZP__NAME(dequantise_f), ZP__NAME(dequantise_d)},
};
