/* Conversions between float and the 16-bit formats: exact one way, rounded to nearest even the other, NaN stays NaN
 * (quiet, with the upper bits of its payload). Branch-free so that loops over them vectorise. Included inside each
 * instruction set's region, hence without guard: ZP__NAME() gives each copy its own name. Source: IEEE 754-2008,
 * section 3.6 (binary16); bfloat16 is the upper half of binary32. */

static inline __attribute__((always_inline)) float ZP__NAME(float_of_bits)(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static inline __attribute__((always_inline)) uint32_t ZP__NAME(bits_of_float)(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

static inline __attribute__((always_inline)) float ZP__NAME(float_of_half)(uint16_t half)
{
	uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
	uint32_t exponent = magnitude & 0x0f800000;
	/* Rebias the exponent by 112; for infinities and NaNs by twice as much. */
	uint32_t normal = magnitude + 0x38000000 + (exponent == 0x0f800000 ? 0x38000000 : 0);
	/* Subnormals are m * 2^-24: build 2^-14 * (1 + m * 2^-10) and take the 2^-14 off again, exactly. */
	float subnormal = ZP__NAME(float_of_bits)(magnitude + 0x38800000) - ZP__NAME(float_of_bits)(0x38800000);
	uint32_t bits = exponent ? normal : ZP__NAME(bits_of_float)(subnormal);
	uint32_t quiet = (magnitude > 0x0f800000) ? 0x00400000 : 0;
	return ZP__NAME(float_of_bits)(bits | quiet | (uint32_t)(half & 0x8000) << 16);
}

static inline __attribute__((always_inline)) uint16_t ZP__NAME(half_of_float)(float value)
{
	uint32_t bits = ZP__NAME(bits_of_float)(value);
	uint32_t sign = bits >> 16 & 0x8000;
	uint32_t magnitude = bits & 0x7fffffff;
	uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
	/* Under 2^-14: adding 0.5 puts the last bit of a subnormal half (2^-24) last in the float, which rounds it.
	 * The clamp only keeps NaNs out of the sum; for greater magnitudes the sum is not used. */
	uint32_t small = magnitude < 0x38800000 ? magnitude : 0;
	uint32_t subnormal = ZP__NAME(bits_of_float)(ZP__NAME(float_of_bits)(small) + 0.5f) - 0x3f000000;
	uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
	uint32_t half = magnitude < 0x38800000 ? subnormal : magnitude >= 0x47800000 ? special : normal;
	return (uint16_t)(sign | half);
}

static inline __attribute__((always_inline)) float ZP__NAME(float_of_brain)(uint16_t brain)
{
	return ZP__NAME(float_of_bits)((uint32_t)brain << 16);
}

static inline __attribute__((always_inline)) uint16_t ZP__NAME(brain_of_float)(float value)
{
	uint32_t bits = ZP__NAME(bits_of_float)(value);
	uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
	uint32_t nan = bits >> 16 | 0x40;
	return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}
