/* Block arithmetic in one real type (float or double), of one instruction set. Included by quantise_kernels.h with
 * ZP__REAL, ZP__BITS (an integer of its size), ZP__BITS_MAX, ZP__INFINITY_BITS, ZP__MAGIC (1.5 times 2 to its number of
 * fraction bits), ZP__REAL_MAX, ZP__REAL_TINY (the smallest subnormal), ZP__RANGE_MIN, ZP__LIFT and ZP__RNAME.
 *
 * Blocks have at most ZP__BLOCK_ELEMENTS_MAX elements. All loops are plain, so that the compiler can vectorise them, and
 * each element is computed independently: the result does not depend on the width of a register. */

/* The bits of a ZP__RNAME(number); like it, they need not be aligned. */
typedef ZP__BITS ZP__RNAME(bits) __attribute__((aligned(1), may_alias));

/* The meaning of a block's codes: number = (code - zero) * scale + low. */
typedef struct {
	ZP__REAL zero, scale, low;
} ZP__RNAME(grid);

typedef struct {
	ZP__REAL low, high;
	bool finite; /* false: low and high are not set */
} ZP__RNAME(range);

/* Maps float bits to integers with the same order: -NaN < -infinity < ... < -0 < +0 < ... < infinity < NaN. An
 * involution. */
static inline __attribute__((always_inline)) ZP__BITS ZP__RNAME(key)(ZP__BITS bits)
{
	return bits ^ (bits >> (8 * sizeof bits - 1) & ZP__BITS_MAX);
}

static inline __attribute__((always_inline)) ZP__BITS ZP__RNAME(bits_of)(ZP__REAL x)
{
	ZP__BITS bits;
	memcpy(&bits, &x, sizeof bits);
	return bits;
}

static inline ZP__REAL ZP__RNAME(number_of_key)(ZP__BITS key)
{
	ZP__REAL x;
	key = ZP__RNAME(key)(key);
	memcpy(&x, &key, sizeof x);
	return x;
}

static ZP__RNAME(range) ZP__RNAME(range_of_keys)(ZP__BITS least, ZP__BITS most)
{
	return (ZP__RNAME(range)){.low = ZP__RNAME(number_of_key)(least),
				  .high = ZP__RNAME(number_of_key)(most),
				  .finite = least > ~ZP__INFINITY_BITS && most < ZP__INFINITY_BITS};
}

static ZP__RNAME(range) ZP__RNAME(range_of)(const ZP__RNAME(number) *x, size_t count)
{
	const ZP__RNAME(bits) *bits = (const void *)x;
	ZP__BITS least = ZP__RNAME(key)(bits[0]), most = least;
	for (size_t i = 0; i < count; i++) {
		ZP__BITS key = ZP__RNAME(key)(bits[i]);
		least = key < least ? key : least;
		most = key > most ? key : most;
	}
	return ZP__RNAME(range_of_keys)(least, most);
}

/* Constants for encoding a block. */
typedef struct {
	ZP__RNAME(grid) grid;
	ZP__REAL unit;	  /* power of two by which numbers are multiplied first; 1 except in extreme blocks */
	ZP__REAL inverse; /* 1 / scale, if unit is 1 */
	ZP__REAL least, most; /* bounds of the nearest integer to (number - low) / scale */
	int32_t shift;	  /* added to that integer gives the code */
} ZP__RNAME(coder);

/* The nearest integer to t, ties to even, in the low bits; |t| must be below 2^20. */
static inline __attribute__((always_inline)) ZP__BITS ZP__RNAME(nearest)(ZP__REAL t)
{
	return ZP__RNAME(bits_of)(t + ZP__MAGIC);
}

/* `low` and `high` must be finite. */
static ZP__RNAME(coder) ZP__RNAME(coder_of)(const zp__code *code, ZP__REAL low, ZP__REAL high)
{
	ZP__RNAME(coder) c = {.unit = 1};
	ZP__REAL levels = (ZP__REAL)code->levels, magnitude = high > -low ? high : -low;
	if (code->symmetric) {
		low = 0;
		high = magnitude;
	} else if (code->zero_point) {
		low = low < 0 ? low : 0;
		high = high > 0 ? high : 0;
	}
	ZP__REAL range = high - low;
	if (magnitude > ZP__REAL_MAX / 4)
		c.unit = (ZP__REAL)0.25;
	else if (range < ZP__RANGE_MIN && range > 0)
		c.unit = ZP__LIFT;
	if (c.unit != 1)
		range = high * c.unit - low * c.unit;
	c.inverse = range > 0 ? levels / range : 0;
	c.grid.scale = range / levels / c.unit;
	/* In a block of subnormals the scale is rounded coarsely: round up, since too small a scale would clamp. */
	if (c.unit != 1 && c.grid.scale * c.unit * levels < range)
		c.grid.scale += ZP__REAL_TINY;
	c.grid.low = code->zero_point ? 0 : low;
	c.least = code->symmetric ? -levels : 0;
	c.most = levels;
	c.grid.zero = code->symmetric ? (ZP__REAL)code->middle : 0;
	c.shift = code->symmetric ? 0 : -code->middle * code->is_signed;
	if (code->zero_point && !code->symmetric) {
		ZP__REAL lowest = low * c.inverse;
		if (c.unit != 1)
			lowest = low * c.unit / (c.grid.scale * c.unit);
		c.grid.zero = ZP__MAGIC - (lowest + ZP__MAGIC); /* exact: the nearest integer, negated */
		c.least = -c.grid.zero;
		c.most = (ZP__REAL)code->most - c.grid.zero;
		c.shift += (int32_t)c.grid.zero;
	}
	return c;
}

/* The code of one number, in the low bits. In an ordinary block nothing needs to be clamped: see quantise.c. */
#define ORDINARY(X) ((uint8_t)(ZP__RNAME(nearest)(((X)-low) * inverse) + shift))

static inline __attribute__((always_inline)) uint8_t ZP__RNAME(extreme)(const ZP__RNAME(coder) *c, ZP__REAL x)
{
	ZP__REAL t = (x * c->unit - c->grid.low * c->unit) / (c->grid.scale * c->unit);
	t = t > c->least ? t : c->least;
	t = t < c->most ? t : c->most;
	return (uint8_t)(ZP__RNAME(nearest)(t) + c->shift);
}

/* Writes the codes of a block; codes and numbers must not overlap. */
static void ZP__RNAME(encode)(const zp__code *code, const ZP__RNAME(coder) *c, uint8_t *restrict codes,
			      const ZP__RNAME(number) *restrict x, size_t count)
{
	ZP__REAL low = c->grid.low, inverse = c->inverse;
	ZP__BITS shift = c->shift;
	size_t pairs = count / 2, upper = count - pairs;
	if (!code->nibble && c->unit == 1) {
		for (size_t i = 0; i < count; i++)
			codes[i] = ORDINARY(x[i]);
	} else if (!code->nibble) {
		for (size_t i = 0; i < count; i++)
			codes[i] = ZP__RNAME(extreme)(c, x[i]);
	} else if (c->unit == 1) {
		for (size_t i = 0; i < pairs; i++)
			codes[i] = (uint8_t)((ORDINARY(x[i]) & 15) | ORDINARY(x[i + upper]) << 4);
		if (upper > pairs)
			codes[pairs] = ORDINARY(x[pairs]) & 15;
	} else {
		for (size_t i = 0; i < pairs; i++)
			codes[i] = (uint8_t)((ZP__RNAME(extreme)(c, x[i]) & 15) |
					     ZP__RNAME(extreme)(c, x[i + upper]) << 4);
		if (upper > pairs)
			codes[pairs] = ZP__RNAME(extreme)(c, x[pairs]) & 15;
	}
}

#undef ORDINARY

/* Writes a block whose range is known. */
static void ZP__RNAME(block_write)(const zp__code *code, uint8_t *header, uint8_t *codes, const ZP__RNAME(number) *x,
				   size_t count, ZP__RNAME(range) range)
{
	ZP__REAL parameters[2] = {(ZP__REAL)NAN, (ZP__REAL)NAN};
	if (range.finite) {
		ZP__RNAME(coder) c = ZP__RNAME(coder_of)(code, range.low, range.high);
		parameters[0] = code->zero_point ? c.grid.zero : c.grid.low;
		parameters[1] = c.grid.scale;
		ZP__RNAME(encode)(code, &c, codes, x, count);
	} else {
		memset(codes, 0, code->nibble ? count - count / 2 : count);
	}
	if (code->symmetric)
		memcpy(header, parameters + 1, sizeof(ZP__REAL));
	else
		memcpy(header, parameters, sizeof parameters);
}

#define VALUE(CODE) (((ZP__REAL)(int32_t)(CODE)-zero) * scale + low)

static inline __attribute__((always_inline)) ZP__REAL ZP__RNAME(clamped)(ZP__REAL v)
{
	v = v > ZP__REAL_MAX / 4 ? ZP__REAL_MAX / 4 : v;
	return (v < -ZP__REAL_MAX / 4 ? -ZP__REAL_MAX / 4 : v) * 4;
}

/* Dequantises a block; codes and numbers must not overlap. */
static void ZP__RNAME(block_read)(const zp__code *code, const uint8_t *header, const uint8_t *restrict codes,
				  ZP__RNAME(number) *restrict x, size_t count)
{
	ZP__REAL parameters[2] = {code->symmetric ? (ZP__REAL)code->middle : 0};
	if (code->symmetric)
		memcpy(parameters + 1, header, sizeof(ZP__REAL));
	else
		memcpy(parameters, header, sizeof parameters);
	ZP__REAL zero = code->zero_point ? parameters[0] : 0, low = code->zero_point ? 0 : parameters[0];
	ZP__REAL scale = parameters[1];
	if (!(scale <= ZP__REAL_MAX && scale >= 0 && low <= ZP__REAL_MAX && low >= -ZP__REAL_MAX && zero >= 0 &&
	      zero <= (ZP__REAL)code->most && zero == (ZP__REAL)(int32_t)zero)) {
		for (size_t i = 0; i < count; i++)
			x[i] = (ZP__REAL)NAN;
		return;
	}
	bool ordinary = scale <= ZP__REAL_MAX / 1024 && low <= ZP__REAL_MAX / 4 && low >= -ZP__REAL_MAX / 4;
	scale *= ordinary ? 1 : (ZP__REAL)0.25;
	low *= ordinary ? 1 : (ZP__REAL)0.25;
	uint8_t flip = code->is_signed ? (uint8_t)code->middle : 0;
	size_t pairs = count / 2, upper = count - pairs;
	if (code->nibble) {
		for (size_t i = 0; i < pairs; i++) {
			x[i] = VALUE((codes[i] & 15) ^ flip);
			x[i + upper] = VALUE(codes[i] >> 4 ^ flip);
		}
		if (upper > pairs)
			x[pairs] = VALUE((codes[pairs] & 15) ^ flip);
	} else {
		for (size_t i = 0; i < count; i++)
			x[i] = VALUE((uint8_t)(codes[i] ^ flip));
	}
	for (size_t i = 0; !ordinary && i < count; i++)
		x[i] = ZP__RNAME(clamped)(x[i]);
}

#undef VALUE

/* x[i] = (x[i] op y[i]) / divisor, and the range of the result. */
#define COMBINE_LOOP(RESULT)                                                                                           \
	for (size_t i = 0; i < count; i++) {                                                                           \
		ZP__REAL a = x[i], b = y[i], r = RESULT;                                                               \
		x[i] = r;                                                                                              \
		ZP__BITS key = ZP__RNAME(key)(ZP__RNAME(bits_of)(r));                                                  \
		least = key < least ? key : least;                                                                     \
		most = key > most ? key : most;                                                                        \
	}

static ZP__RNAME(range) ZP__RNAME(combine)(uint32_t op, ZP__RNAME(number) *restrict x,
					   const ZP__RNAME(number) *restrict y, size_t count, uint32_t divisor)
{
	ZP__BITS least = ZP__BITS_MAX, most = ~ZP__BITS_MAX;
	ZP__REAL by = (ZP__REAL)divisor;
	if (op == ZP_PROD)
		COMBINE_LOOP(a * b)
	else if (op == ZP_MAX)
		COMBINE_LOOP(((a > b) | (a != a)) ? a : b)
	else if (op == ZP_MIN)
		COMBINE_LOOP(((a < b) | (a != a)) ? a : b)
	else if (divisor == 1)
		COMBINE_LOOP(a + b)
	else
		COMBINE_LOOP((a + b) / by)
	return ZP__RNAME(range_of_keys)(least, most);
}

#undef COMBINE_LOOP

static void ZP__RNAME(quantise)(const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count)
{
	ZP__REAL buffer[ZP__BLOCK_ELEMENTS_MAX];
	const zp__code code = code_of(how);
	const size_t blocks = (count + how->block_elements - 1) / how->block_elements;
	uint8_t *header = wire, *codes = wire + blocks * code.parameter_bytes;
	for (size_t at = 0; at < count; at += how->block_elements) {
		size_t n = count - at < how->block_elements ? count - at : how->block_elements;
		const ZP__RNAME(number) *x = ZP__RNAME(load)(how->dtype, buffer, elements, at, n);
		ZP__RNAME(block_write)(&code, header, codes, x, n, ZP__RNAME(range_of)(x, n));
		header += code.parameter_bytes;
		codes += code.nibble ? n - n / 2 : n;
	}
}

static void ZP__RNAME(fold)(const zp__quantiser *how, uint8_t *wire, const void *local, size_t count, uint32_t divisor)
{
	ZP__REAL x[ZP__BLOCK_ELEMENTS_MAX], buffer[ZP__BLOCK_ELEMENTS_MAX];
	const zp__code code = code_of(how);
	const size_t blocks = (count + how->block_elements - 1) / how->block_elements;
	uint8_t *header = wire, *codes = wire + blocks * code.parameter_bytes;
	for (size_t at = 0; at < count; at += how->block_elements) {
		size_t n = count - at < how->block_elements ? count - at : how->block_elements;
		const ZP__RNAME(number) *y = ZP__RNAME(load)(how->dtype, buffer, local, at, n);
		ZP__RNAME(block_read)(&code, header, codes, x, n);
		ZP__RNAME(range) range = ZP__RNAME(combine)(how->op, x, y, n, divisor);
		ZP__RNAME(block_write)(&code, header, codes, x, n, range);
		header += code.parameter_bytes;
		codes += code.nibble ? n - n / 2 : n;
	}
}

static void ZP__RNAME(join)(const zp__quantiser *how, uint8_t *wire, const uint8_t *const shares[], uint32_t peers,
			    uint32_t rank, const void *local, size_t count, uint32_t divisor)
{
	ZP__REAL x[ZP__BLOCK_ELEMENTS_MAX], buffer[ZP__BLOCK_ELEMENTS_MAX];
	const zp__code code = code_of(how);
	const size_t blocks = (count + how->block_elements - 1) / how->block_elements;
	size_t header = 0, codes = blocks * code.parameter_bytes;
	for (size_t at = 0; at < count; at += how->block_elements) {
		size_t n = count - at < how->block_elements ? count - at : how->block_elements;
		ZP__RNAME(range) range = {.finite = false};
		for (uint32_t r = 0; r < peers; r++) {
			const ZP__RNAME(number) *y = r ? buffer : x;
			if (r == rank) {
				y = ZP__RNAME(load)(how->dtype, r ? buffer : x, local, at, n);
				if (r == 0 && y != x)
					memcpy(x, y, n * sizeof *x);
			} else {
				const uint8_t *share = shares[r - (r > rank)];
				ZP__RNAME(block_read)(&code, share + header, share + codes, r ? buffer : x, n);
			}
			if (r)
				range = ZP__RNAME(combine)(how->op, x, y, n, r + 1 < peers ? 1 : divisor);
		}
		ZP__RNAME(block_write)(&code, wire + header, wire + codes, x, n, range);
		header += code.parameter_bytes;
		codes += code.nibble ? n - n / 2 : n;
	}
}

static void ZP__RNAME(dequantise)(const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count)
{
	ZP__REAL buffer[ZP__BLOCK_ELEMENTS_MAX];
	const zp__code code = code_of(how);
	const size_t blocks = (count + how->block_elements - 1) / how->block_elements;
	const uint8_t *header = wire, *codes = wire + blocks * code.parameter_bytes;
	for (size_t at = 0; at < count; at += how->block_elements) {
		size_t n = count - at < how->block_elements ? count - at : how->block_elements;
		ZP__RNAME(number) *x = ZP__RNAME(target)(how->dtype, buffer, elements, at);
		ZP__RNAME(block_read)(&code, header, codes, x, n);
		ZP__RNAME(store)(how->dtype, elements, at, x, n);
		header += code.parameter_bytes;
		codes += code.nibble ? n - n / 2 : n;
	}
}

#undef ZP__REAL
#undef ZP__BITS
#undef ZP__BITS_MAX
#undef ZP__INFINITY_BITS
#undef ZP__MAGIC
#undef ZP__REAL_MAX
#undef ZP__REAL_TINY
#undef ZP__RANGE_MIN
#undef ZP__LIFT
#undef ZP__RNAME
