/* The quantisation kernels of one instruction set: FLOAT and the 16-bit types computed in float, DOUBLE in double.
 * quantise.c includes this file once for each set, with ZP__NAME(name) and ZP__VECTOR_BYTES. */

#include "half.h"

typedef float ZP__NAME(unaligned_float) __attribute__((aligned(1), may_alias));
typedef double ZP__NAME(unaligned_double) __attribute__((aligned(1), may_alias));
typedef uint16_t ZP__NAME(unaligned_u16) __attribute__((aligned(1), may_alias));

static void ZP__NAME(load_f)(uint32_t dtype, float *x, const void *elements, size_t at, size_t count)
{
	const ZP__NAME(unaligned_u16) *h = (const ZP__NAME(unaligned_u16) *)elements + at;
	if (dtype == ZP_FLOAT)
		memcpy(x, (const ZP__NAME(unaligned_float) *)elements + at, count * sizeof *x);
	else if (dtype == ZP_FLOAT16)
		for (size_t i = 0; i < count; i++)
			x[i] = ZP__NAME(float_of_half)(h[i]);
	else
		for (size_t i = 0; i < count; i++)
			x[i] = ZP__NAME(float_of_brain)(h[i]);
}

static void ZP__NAME(store_f)(uint32_t dtype, void *elements, size_t at, const float *x, size_t count)
{
	ZP__NAME(unaligned_u16) *h = (ZP__NAME(unaligned_u16) *)elements + at;
	if (dtype == ZP_FLOAT)
		memcpy((ZP__NAME(unaligned_float) *)elements + at, x, count * sizeof *x);
	else if (dtype == ZP_FLOAT16)
		for (size_t i = 0; i < count; i++)
			h[i] = ZP__NAME(half_of_float)(x[i]);
	else
		for (size_t i = 0; i < count; i++)
			h[i] = ZP__NAME(brain_of_float)(x[i]);
}

static void ZP__NAME(load_d)(uint32_t dtype, double *x, const void *elements, size_t at, size_t count)
{
	(void)dtype;
	memcpy(x, (const ZP__NAME(unaligned_double) *)elements + at, count * sizeof *x);
}

static void ZP__NAME(store_d)(uint32_t dtype, void *elements, size_t at, const double *x, size_t count)
{
	(void)dtype;
	memcpy((ZP__NAME(unaligned_double) *)elements + at, x, count * sizeof *x);
}

#define ZP__REAL float
#define ZP__MASK int32_t
#define ZP__REAL_MAX FLT_MAX
#define ZP__REAL_HUGE (FLT_MAX / 1024)
#define ZP__RNAME(name) ZP__NAME(name##_f)
#include "quantise_real.h"

#define ZP__REAL double
#define ZP__MASK int64_t
#define ZP__REAL_MAX DBL_MAX
#define ZP__REAL_HUGE (DBL_MAX / 1024)
#define ZP__RNAME(name) ZP__NAME(name##_d)
#include "quantise_real.h"

static const zp__quantise_kernels ZP__NAME(kernels) = {
	{ZP__NAME(quantise_f), ZP__NAME(quantise_d)},
	{ZP__NAME(fold_f), ZP__NAME(fold_d)},
	{ZP__NAME(dequantise_f), ZP__NAME(dequantise_d)},
};

#undef ZP__NAME
#undef ZP__VECTOR_BYTES
