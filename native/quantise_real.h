/* Block arithmetic in one real type (float or double), of one instruction set. Included by quantise_kernels.h with
 * ZP__REAL, ZP__MASK (an integer of its size), ZP__REAL_MAX, ZP__REAL_HUGE and ZP__RNAME. Blocks are at most
 * ZP__BLOCK_ELEMENTS_MAX elements. */

/* As many numbers as a register holds, and the masks that comparing them gives. */
typedef ZP__REAL ZP__RNAME(vector) __attribute__((vector_size(ZP__VECTOR_BYTES)));
typedef ZP__MASK ZP__RNAME(masks) __attribute__((vector_size(ZP__VECTOR_BYTES)));

#define VECTORS (LANES * sizeof(ZP__REAL) / ZP__VECTOR_BYTES)
#define CHOOSE(mask, yes, no)                                                                                          \
	((ZP__RNAME(vector))(((mask) & (ZP__RNAME(masks))(yes)) | (~(mask) & (ZP__RNAME(masks))(no))))

/* Lowest and highest of a block; false if an element is not finite. In LANES independent columns, so that every
 * instruction set takes the same order (it matters for +0 and -0); in vector types, because the compiler does not
 * vectorise a search for the least by itself. */
static bool ZP__RNAME(range)(const ZP__REAL *x, size_t count, ZP__REAL *low, ZP__REAL *high)
{
	ZP__REAL lows[LANES], highs[LANES], odds[LANES];
	ZP__RNAME(vector) v[VECTORS], least[VECTORS], most[VECTORS], odd[VECTORS];
	for (size_t lane = 0; lane < LANES; lane++) { /* What does not fill all lanes, filled up by the first. */
		size_t i = count - count % LANES + lane;
		lows[lane] = x[i < count ? i : 0];
	}
	memcpy(least, lows, sizeof least);
	memcpy(most, lows, sizeof most);
	for (size_t k = 0; k < VECTORS; k++)
		odd[k] = least[k] - least[k]; /* 0 of a finite number, else NaN, which stays */
	for (size_t i = 0; i + LANES <= count; i += LANES) {
		memcpy(v, x + i, sizeof v);
		for (size_t k = 0; k < VECTORS; k++) {
			least[k] = CHOOSE(v[k] < least[k], v[k], least[k]);
			most[k] = CHOOSE(v[k] > most[k], v[k], most[k]);
			odd[k] += v[k] - v[k];
		}
	}
	memcpy(lows, least, sizeof lows);
	memcpy(highs, most, sizeof highs);
	memcpy(odds, odd, sizeof odds);
	bool finite = true;
	*low = lows[0];
	*high = highs[0];
	for (size_t lane = 0; lane < LANES; lane++) {
		finite &= odds[lane] == 0;
		*low = lows[lane] < *low ? lows[lane] : *low;
		*high = highs[lane] > *high ? highs[lane] : *high;
	}
	return finite;
}

#undef VECTORS
#undef CHOOSE

/* A step that takes 255 of from `low` to `high`; also where their difference overflows. */
static ZP__REAL ZP__RNAME(step)(ZP__REAL low, ZP__REAL high)
{
	ZP__REAL range = high - low;
	return range <= ZP__REAL_MAX ? range / 255 : high / 255 - low / 255;
}

static inline __attribute__((always_inline)) uint8_t ZP__RNAME(code)(ZP__REAL t)
{
	t += (ZP__REAL)0.5;
	t = t > 0 ? t : 0; /* NaN, too, becomes 0 */
	t = t < 255 ? t : 255;
	return (uint8_t)(int32_t)t;
}

static inline __attribute__((always_inline)) ZP__REAL ZP__RNAME(clamp)(ZP__REAL v)
{
	v = v > ZP__REAL_MAX ? ZP__REAL_MAX : v;
	return v < -ZP__REAL_MAX ? -ZP__REAL_MAX : v;
}

/* Halving keeps sums of large blocks finite; their lowest bits do not matter. 1 for all others. */
static inline ZP__REAL ZP__RNAME(halving)(ZP__REAL scale)
{
	return scale > ZP__REAL_HUGE ? (ZP__REAL)0.5 : 1;
}

static void ZP__RNAME(encode)(uint32_t algorithm, ZP__REAL parameters[2], uint8_t *codes, const ZP__REAL *x,
			      size_t count)
{
	ZP__REAL low, high;
	if (!ZP__RNAME(range)(x, count, &low, &high)) {
		parameters[0] = parameters[1] = (ZP__REAL)NAN;
		memset(codes, 0, count);
		return;
	}
	if (algorithm == ZP_QUANTIZE_ZERO_POINT_SCALE) {
		low = low < 0 ? low : 0;
		high = high > 0 ? high : 0;
	}
	ZP__REAL scale = ZP__RNAME(step)(low, high);
	parameters[0] = algorithm == ZP_QUANTIZE_MIN_MAX ? low : 0;
	parameters[1] = scale;
	if (scale == 0) {
		memset(codes, 0, count);
		return;
	}
	if (algorithm == ZP_QUANTIZE_MIN_MAX) {
		ZP__REAL half = ZP__RNAME(halving)(scale), from = low * half, by = scale * half;
		for (size_t i = 0; i < count; i++)
			codes[i] = ZP__RNAME(code)((x[i] * half - from) / by);
		return;
	}
	ZP__REAL zero = ZP__RNAME(code)(-low / scale);
	parameters[0] = zero;
	for (size_t i = 0; i < count; i++)
		codes[i] = ZP__RNAME(code)(x[i] / scale + zero);
}

static void ZP__RNAME(decode)(uint32_t algorithm, const ZP__REAL parameters[2], const uint8_t *codes, ZP__REAL *x,
			      size_t count)
{
	ZP__REAL scale = parameters[1], half = ZP__RNAME(halving)(scale), by = scale * half;
	if (!(scale <= ZP__REAL_MAX)) { /* The mark of a block that was not finite; one pattern on all peers. */
		for (size_t i = 0; i < count; i++)
			x[i] = (ZP__REAL)NAN;
	} else if (algorithm == ZP_QUANTIZE_MIN_MAX) {
		ZP__REAL from = parameters[0] * half, back = 1 / half;
		for (size_t i = 0; i < count; i++)
			x[i] = ZP__RNAME(clamp)((from + (ZP__REAL)codes[i] * by) * back);
	} else {
		ZP__REAL zero = parameters[0];
		for (size_t i = 0; i < count; i++)
			x[i] = ZP__RNAME(clamp)(((ZP__REAL)codes[i] - zero) * scale);
	}
}

/* x[i] = x[i] op y[i], then / divisor. */
static void ZP__RNAME(combine)(uint32_t op, ZP__REAL *x, const ZP__REAL *y, size_t count, uint32_t divisor)
{
	switch (op) {
	case ZP_PROD:
		for (size_t i = 0; i < count; i++)
			x[i] *= y[i];
		break;
	case ZP_MAX:
		for (size_t i = 0; i < count; i++)
			x[i] = (x[i] > y[i]) | (x[i] != x[i]) ? x[i] : y[i];
		break;
	case ZP_MIN:
		for (size_t i = 0; i < count; i++)
			x[i] = (x[i] < y[i]) | (x[i] != x[i]) ? x[i] : y[i];
		break;
	default:
		for (size_t i = 0; i < count; i++)
			x[i] += y[i];
	}
	for (size_t i = 0; divisor != 1 && i < count; i++)
		x[i] /= (ZP__REAL)divisor;
}

/* Where block `block` of a frame of `count` elements has its parameters and codes. */
#define BLOCK_PLACES()                                                                                                 \
	size_t blocks = (count + how->block_elements - 1) / how->block_elements;                                       \
	const size_t parameter_bytes = 2 * sizeof(ZP__REAL);                                                           \
	for (size_t block = 0, at = 0; block < blocks; block++, at += how->block_elements)

#define BLOCK_HERE(POINTER)                                                                                            \
	size_t n = count - at < how->block_elements ? count - at : how->block_elements;                                \
	POINTER place = wire + block * parameter_bytes;                                                                \
	POINTER codes = wire + blocks * parameter_bytes + at

static void ZP__RNAME(quantise)(const zp__quantiser *how, uint8_t *wire, const void *elements, size_t count)
{
	ZP__REAL x[ZP__BLOCK_ELEMENTS_MAX], parameters[2];
	BLOCK_PLACES()
	{
		BLOCK_HERE(uint8_t *);
		ZP__RNAME(load)(how->dtype, x, elements, at, n);
		ZP__RNAME(encode)(how->algorithm, parameters, codes, x, n);
		memcpy(place, parameters, parameter_bytes);
	}
}

static void ZP__RNAME(fold)(const zp__quantiser *how, uint8_t *wire, const void *local, size_t count, uint32_t divisor)
{
	ZP__REAL x[ZP__BLOCK_ELEMENTS_MAX], y[ZP__BLOCK_ELEMENTS_MAX], parameters[2];
	BLOCK_PLACES()
	{
		BLOCK_HERE(uint8_t *);
		memcpy(parameters, place, parameter_bytes);
		ZP__RNAME(decode)(how->algorithm, parameters, codes, x, n);
		ZP__RNAME(load)(how->dtype, y, local, at, n);
		ZP__RNAME(combine)(how->op, x, y, n, divisor);
		ZP__RNAME(encode)(how->algorithm, parameters, codes, x, n);
		memcpy(place, parameters, parameter_bytes);
	}
}

static void ZP__RNAME(dequantise)(const zp__quantiser *how, void *elements, const uint8_t *wire, size_t count)
{
	ZP__REAL x[ZP__BLOCK_ELEMENTS_MAX], parameters[2];
	BLOCK_PLACES()
	{
		BLOCK_HERE(const uint8_t *);
		memcpy(parameters, place, parameter_bytes);
		ZP__RNAME(decode)(how->algorithm, parameters, codes, x, n);
		ZP__RNAME(store)(how->dtype, elements, at, x, n);
	}
}

#undef BLOCK_PLACES
#undef BLOCK_HERE
#undef ZP__REAL
#undef ZP__MASK
#undef ZP__REAL_MAX
#undef ZP__REAL_HUGE
#undef ZP__RNAME
