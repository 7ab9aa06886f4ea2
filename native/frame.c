/* The wire format of frame headers and record prefixes; no other file reads or writes it. Pure functions, no shared state.
 *
 *   0  magic "ZPF2"         4  kind, 3 zero bytes         8  attempt or channel
 *  16  chunk               20  length of the body         24  offset
 *  32  checksum of body    36  checksum of bytes 0 to 35
 *
 * Integers are big-endian. The header has the lower half of each checksum. */
#include "frame.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "checksum.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tensor bodies travel in little-endian byte order; this host is not"
#endif

#define MAGIC 0x5a504632u

static void put32(uint8_t *p, uint32_t value)
{
	uint32_t swapped = __builtin_bswap32(value);
	memcpy(p, &swapped, sizeof swapped);
}

static void put64(uint8_t *p, uint64_t value)
{
	uint64_t swapped = __builtin_bswap64(value);
	memcpy(p, &swapped, sizeof swapped);
}

static uint32_t get32(const uint8_t *p)
{
	uint32_t value;
	memcpy(&value, p, sizeof value);
	return __builtin_bswap32(value);
}

static uint64_t get64(const uint8_t *p)
{
	uint64_t value;
	memcpy(&value, p, sizeof value);
	return __builtin_bswap64(value);
}

void zp__frame_encode(uint8_t header[ZP__HEADER_BYTES], const zp__frame *frame)
{
	put32(header, MAGIC);
	header[4] = frame->kind;
	header[5] = header[6] = header[7] = 0;
	put64(header + 8, frame->id);
	put32(header + 16, frame->chunk);
	put32(header + 20, frame->length);
	put64(header + 24, frame->offset);
	put32(header + 32, frame->checksum);
	put32(header + 36, (uint32_t)zp__checksum_of(header, 36));
}

int zp__frame_decode(const uint8_t header[ZP__HEADER_BYTES], zp__frame *frame)
{
	if (get32(header) != MAGIC)
		return -EPROTO;
	if (get32(header + 36) != (uint32_t)zp__checksum_of(header, 36))
		return -EBADMSG;
	if (header[4] < ZP__REDUCE_SCATTER || header[4] > ZP__STARTED || header[5] || header[6] || header[7])
		return -EPROTO;
	frame->kind = header[4];
	frame->id = get64(header + 8);
	frame->chunk = get32(header + 16);
	frame->length = get32(header + 20);
	frame->offset = get64(header + 24);
	frame->checksum = get32(header + 32);
	return 0;
}

void zp__record_encode(uint8_t prefix[ZP__RECORD_PREFIX_BYTES], uint32_t bytes)
{
	put32(prefix, bytes);
}

uint32_t zp__record_decode(const uint8_t prefix[ZP__RECORD_PREFIX_BYTES])
{
	return get32(prefix);
}

size_t zp__frame_missing(zp__frame_parser *parser, uint8_t **space)
{
	*space = parser->bytes + parser->have;
	return ZP__HEADER_BYTES - parser->have;
}

int zp__frame_advance(zp__frame_parser *parser, size_t bytes, zp__frame *frame)
{
	assert(bytes <= ZP__HEADER_BYTES - parser->have);
	parser->have += (uint32_t)bytes;
	if (parser->have < ZP__HEADER_BYTES)
		return 0;
	parser->have = 0;
	int rc = zp__frame_decode(parser->bytes, frame);
	return rc < 0 ? rc : 1;
}
